//! Changes of contents the server may still lose: kept until a sync covers them, and made again if it was killed.
//!
//! A write is answered when the server's memory has it. Should that server be killed, an application that goes on
//! and calls fsync must not be told that bytes are safe which are nowhere. So copies are kept, as NFS clients
//! keep unstable writes until a COMMIT (RFC 8881 section 18.3), and recovery has the next server restore them. Each names the
//! file's change counter when it was answered: by that the server knows what came later, of this mount's and of others'.
//!
//! What sets a file's length or puts zeros into it without bytes of ours (ftruncate, fallocate) is kept as the operation.
//! Each is kept whole, also where a later one has overtaken some of it, and restored whole: so a file goes through nothing in
//! recovery but what it was before, and a crash in the midst of it leaves nothing else.
//! Of a server whose answers are durable (`Attached::durable_answers`) nothing is kept.
//!
//! # Bounds
//! At most [`MAX_KEPT_BYTES`]. A write beyond is not kept: should the server lose it, the next fsync of that file
//! fails with EIO, once, as after a failed write-back of a local file system. The control thread syncs whenever
//! something was kept for a while, which is also what bounds the number of files.
//!
//! # Invariants
//! * A write is noted with the session that answered it. If recovery to a newer one has begun meanwhile, it is not
//!   taken, and the caller restores it by himself.
//! * Entries go away only by a sync that began after they were noted. A recovery ends with such a sync: there are only entries of
//!   the server's present life.

use super::losses::Losses;
use crate::file::volume::UnsyncedChanges;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rpc::Allocate;
use parking_lot::Mutex;
use std::collections::BTreeMap;

/// Bytes kept at most, with what an entry costs beside its bytes. Small, for every write is copied once more:
/// what streams past it is written by programs that seldom sync and can be run again.
pub(super) const MAX_KEPT_BYTES: usize = 32 << 20;
/// What an entry costs beside its bytes, about: itself, the room its list has grown ahead, and malloc's share.
const ENTRY_BYTES: usize = 128;

/// What was done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// These bytes were written.
    Bytes(Vec<u8>),
    /// The file was made to end here.
    End,
    /// fallocate(2).
    Allocate {
        /// Bytes of the range.
        len: u64,
        /// What was asked for.
        how: Allocate,
    },
}

/// A change of a file's contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Kept {
    number: u64,
    /// The file's change counter when it was answered.
    pub(crate) change: u64,
    /// Where.
    pub(crate) offset: u64,
    /// What.
    pub(crate) what: What,
}

impl Kept {
    fn cost(&self) -> usize {
        match &self.what {
            What::Bytes(bytes) => bytes.len() + ENTRY_BYTES,
            What::End | What::Allocate { .. } => ENTRY_BYTES,
        }
    }
}

#[derive(Debug, Default)]
struct FileWrites {
    kept: Vec<Kept>,
    /// The last write that was not kept, and the file's change counter after it.
    dropped: Option<(u64, u64)>,
}

#[derive(Debug, Default)]
struct State {
    /// 0: a recovery is under way.
    session: u64,
    /// What that session's server has answered it cannot lose: nothing is kept.
    durable_answers: bool,
    /// The session before that one, if its server's answers were durable.
    durable_before: Option<u64>,
    /// Number of the next write.
    next: u64,
    cost: usize,
    /// In order: what is written again is written in the same order each time.
    files: BTreeMap<InodeNo, FileWrites>,
}

impl State {
    /// Keeps a change, or that there was one.
    fn keep(&mut self, ino: InodeNo, offset: u64, what: Option<What>, change: u64) {
        if self.durable_answers {
            return;
        }
        let number = self.next;
        self.next += 1;
        let file = self.files.entry(ino).or_default();
        match what {
            Some(what) => {
                let kept = Kept { number, change, offset, what };
                self.cost += kept.cost();
                file.kept.push(kept);
            }
            None => file.dropped = Some((number, change)),
        }
    }
}

/// What a sync that begins now covers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark(u64);

/// All unsynced writes of a mount.
#[derive(Debug, Default)]
pub(crate) struct Unsynced {
    state: Mutex<State>,
    losses: Losses,
}

impl Unsynced {
    /// Notes a write that `session` answered. `false`: the server that answered is gone and recovery did not see
    /// this write; it must be restored.
    pub(crate) fn note(&self, session: u64, ino: InodeNo, offset: u64, bytes: &[u8], change: u64) -> bool {
        let mut state = self.state.lock();
        if state.session != session {
            return state.durable_before == Some(session);
        }
        let fits = !state.durable_answers && state.cost + bytes.len() + ENTRY_BYTES <= MAX_KEPT_BYTES;
        state.keep(ino, offset, fits.then(|| What::Bytes(bytes.to_vec())), change);
        true
    }

    fn note_operation(&self, session: u64, ino: InodeNo, offset: u64, what: What, change: u64) {
        let mut state = self.state.lock();
        if state.durable_answers {
            return;
        }
        if state.session != session {
            // The server that answered is gone and recovery has passed this file: it may be lost, and nobody can tell.
            self.losses.note(ino);
            return;
        }
        let fits = state.cost + ENTRY_BYTES <= MAX_KEPT_BYTES;
        state.keep(ino, offset, fits.then_some(what), change);
    }

    /// Notes that `session` has made a file end at `size`; `change` is the file's counter then.
    pub(crate) fn note_end(&self, session: u64, ino: InodeNo, size: u64, change: u64) {
        self.note_operation(session, ino, size, What::End, change);
    }

    /// Notes what `session` has allocated, zeroed or punched; `change` is the file's counter then.
    pub(crate) fn note_allocate(
        &self,
        session: u64,
        ino: InodeNo,
        (offset, len): (u64, u64),
        how: Allocate,
        change: u64,
    ) {
        self.note_operation(session, ino, offset, What::Allocate { len, how }, change);
    }

    /// A sync begins.
    pub(crate) fn mark(&self) -> Mark {
        Mark(self.state.lock().next)
    }

    /// A sync of a file, or of all (`None`), that began at `mark` has succeeded.
    pub(crate) fn synced(&self, ino: Option<InodeNo>, mark: Mark) {
        let mut state = self.state.lock();
        let State { files, cost, .. } = &mut *state;
        let mut clear = |file: &mut FileWrites| {
            file.kept.retain(|kept| {
                let stays = kept.number >= mark.0;
                if !stays {
                    *cost -= kept.cost();
                }
                stays
            });
            file.dropped = file.dropped.filter(|(number, _)| *number >= mark.0);
            !file.kept.is_empty() || file.dropped.is_some()
        };
        match ino {
            Some(ino) => {
                if files.get_mut(&ino).is_some_and(|file| !clear(file)) {
                    files.remove(&ino);
                }
            }
            None => files.retain(|_, file| clear(file)),
        }
    }

    /// Whether the server has promised to lose nothing that it answered.
    pub(crate) fn answers_are_durable(&self) -> bool {
        self.state.lock().durable_answers
    }

    /// Whether something is kept that a sync would free.
    pub(crate) fn is_empty(&self) -> bool {
        self.state.lock().files.is_empty()
    }

    /// How much is kept, for people.
    pub(crate) fn changes(&self) -> UnsyncedChanges {
        let state = self.state.lock();
        let mut changes = UnsyncedChanges { files: state.files.len() as u64, ..UnsyncedChanges::default() };
        for file in state.files.values() {
            changes.has_more |= file.dropped.is_some();
            let bytes = file.kept.iter().map(|kept| match &kept.what {
                What::Bytes(bytes) => bytes.len() as u64,
                What::End | What::Allocate { .. } => 0,
            });
            changes.bytes += bytes.sum::<u64>();
        }
        changes
    }

    /// Files whose written bytes were lost, or nobody knows.
    pub(crate) fn losses(&self) -> &Losses {
        &self.losses
    }

    /// Files with writes that recovery has to look at.
    pub(crate) fn files(&self) -> Vec<InodeNo> {
        self.state.lock().files.keys().copied().collect()
    }

    /// What to restore of a file, in the order in which the server did it: what it has restored of a client is known by the last
    /// counter. And the counter of the last change that was not kept.
    pub(super) fn changes_of(&self, ino: InodeNo) -> (Vec<Kept>, Option<u64>) {
        let state = self.state.lock();
        let Some(file) = state.files.get(&ino) else {
            return (Vec::new(), None);
        };
        let mut kept = file.kept.clone();
        kept.sort_by_key(|kept| kept.change);
        (kept, file.dropped.map(|(_, change)| change))
    }

    /// Nothing is restored of this file.
    pub(super) fn forget(&self, ino: InodeNo) {
        let mut state = self.state.lock();
        if let Some(file) = state.files.remove(&ino) {
            state.cost -= file.kept.iter().map(Kept::cost).sum::<usize>();
        }
    }

    /// A recovery has begun: until it is done nothing is taken.
    pub(super) fn begin_recovery(&self) {
        let mut state = self.state.lock();
        if state.session != 0 {
            state.durable_before = state.durable_answers.then_some(state.session);
            state.session = 0;
        }
    }

    /// From now on only what this session answers is taken.
    pub(super) fn begin_session(&self, session: u64, durable_answers: bool) {
        let mut state = self.state.lock();
        (state.session, state.durable_answers) = (session, durable_answers);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INO: InodeNo = InodeNo(7);

    fn unsynced() -> Unsynced {
        let unsynced = Unsynced::default();
        unsynced.begin_session(1, false);
        unsynced
    }

    fn ranges(unsynced: &Unsynced) -> Vec<(u64, Vec<u8>)> {
        unsynced
            .changes_of(INO)
            .0
            .into_iter()
            .filter_map(|kept| match kept.what {
                What::Bytes(bytes) => Some((kept.offset, bytes)),
                _ => None,
            })
            .collect()
    }

    #[test]
    fn a_sync_frees_what_was_before_it() {
        let unsynced = unsynced();
        assert!(unsynced.note(1, INO, 0, b"before", 1));
        let mark = unsynced.mark();
        assert!(unsynced.note(1, INO, 6, b"after", 2));
        assert!(unsynced.note(1, InodeNo(8), 0, b"other", 3));
        unsynced.synced(Some(INO), mark);
        assert_eq!(ranges(&unsynced), [(6, b"after".to_vec())]);
        assert_eq!(unsynced.changes().to_string(), "10 unsynced bytes in 2 files");
        unsynced.synced(None, unsynced.mark());
        assert!(unsynced.is_empty());
        assert_eq!(unsynced.changes(), UnsyncedChanges::default());
        assert_eq!(unsynced.state.lock().cost, 0);
    }

    #[test]
    fn changes_are_kept_whole_and_in_the_order_of_their_counters() {
        let unsynced = unsynced();
        let punch = What::Allocate { len: 90, how: Allocate::PunchHole };
        assert!(unsynced.note(1, INO, 2, b"answered late", 3));
        assert!(unsynced.note(1, INO, 0, b"first", 1));
        unsynced.note_end(1, INO, 4, 4);
        unsynced.note_allocate(1, INO, (1, 90), Allocate::PunchHole, 5);
        assert!(unsynced.note(1, INO, 0, b"all of it", 2));
        let kept = unsynced.changes_of(INO).0.into_iter();
        let kept: Vec<_> = kept.map(|kept| (kept.change, kept.offset, kept.what)).collect();
        let written = |bytes: &[u8]| What::Bytes(bytes.to_vec());
        assert_eq!(
            kept,
            [
                (1, 0, written(b"first")),
                (2, 0, written(b"all of it")),
                (3, 2, written(b"answered late")),
                (4, 4, What::End),
                (5, 1, punch),
            ]
        );
        unsynced.synced(None, unsynced.mark());
        assert_eq!(unsynced.state.lock().cost, 0);
        // A lost server's answer cannot be made good any more.
        unsynced.begin_session(2, false);
        let told = unsynced.losses().before_open(INO);
        unsynced.note_allocate(1, INO, (0, 1), Allocate::PunchHole, 100);
        assert!(unsynced.losses().tell(INO, &told));
    }

    #[test]
    fn another_session_s_answer_is_not_taken() {
        let unsynced = unsynced();
        unsynced.begin_session(2, false);
        assert!(!unsynced.note(1, INO, 0, b"late", 1));
        assert!(unsynced.is_empty());
    }

    #[test]
    fn of_what_is_too_much_the_last_is_known() {
        let unsynced = unsynced();
        let chunk = vec![1; 1 << 20];
        for index in 0..40 {
            assert!(unsynced.note(1, INO, index << 20, &chunk, index));
        }
        assert!(unsynced.state.lock().cost <= MAX_KEPT_BYTES);
        let (kept, not_kept) = unsynced.changes_of(INO);
        assert_eq!((kept.len(), not_kept), (31, Some(39)));
        assert_eq!(unsynced.changes(), UnsyncedChanges { files: 1, bytes: 31 << 20, has_more: true });
        unsynced.synced(Some(INO), unsynced.mark());
        assert_eq!(unsynced.changes_of(INO), (Vec::new(), None));
    }

    #[test]
    fn while_a_recovery_is_under_way_nothing_is_taken() {
        let unsynced = unsynced();
        unsynced.begin_recovery();
        assert!(!unsynced.note(1, INO, 0, b"recovery may have passed it", 1));
        unsynced.begin_recovery();
        unsynced.begin_session(2, true);
        assert!(unsynced.note(2, INO, 0, b"its server cannot lose it", 2));
        unsynced.begin_recovery();
        assert!(unsynced.note(2, INO, 0, b"nor this", 3), "its server cannot lose it");
        unsynced.begin_session(3, false);
        assert!(unsynced.note(2, INO, 0, b"nor this", 4) && unsynced.is_empty());
    }
}
