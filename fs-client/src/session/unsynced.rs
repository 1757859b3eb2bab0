//! Changes of contents the server may still lose: kept until a sync covers them, and made again if it was killed.
//!
//! A write is answered when the server's memory has it. Should that server be killed, an application that goes on
//! and calls fsync must not be told that bytes are safe which are nowhere. So copies are kept, as NFS clients
//! keep unstable writes until a COMMIT (RFC 8881 section 18.3), and recovery has the next server restore them. Each names the
//! file's change counter when it was answered: by that the server knows what came later, of this mount's and of others'.
//!
//! What makes a file longer or puts zeros into it without bytes of ours (ftruncate, fallocate) is kept as the operation.
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
//! * Entries go away only by a sync that began after they were noted, or by a change of the same range. A recovery ends with
//!   such a sync: there are only entries of the server's present life.

use cuttlefs_common::ids::{InodeNo, PAGE_SIZE_U64};
use cuttlefs_common::rpc::Allocate;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashSet};

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

    /// What is left of it once the file was cut to `size`.
    fn cut_to(mut self, size: u64) -> Option<Self> {
        let room = size.checked_sub(self.offset)?;
        match &mut self.what {
            // Nothing written past the new end is there any more; at the end itself there is nothing.
            What::Bytes(_) | What::Allocate { .. } if room == 0 => return None,
            What::Bytes(bytes) => bytes.truncate(usize::try_from(room).unwrap_or(usize::MAX)),
            What::Allocate { len, .. } => *len = (*len).min(room),
            What::End => {}
        }
        Some(self)
    }

    /// From where to where it goes.
    fn span(&self) -> (u64, u64) {
        let len = match &self.what {
            What::Bytes(bytes) => bytes.len() as u64,
            What::Allocate { len, .. } => *len,
            What::End => 0,
        };
        (self.offset, self.offset.saturating_add(len))
    }

    /// The range it gives contents to.
    fn range(&self) -> Option<(u64, u64)> {
        use Allocate::{PunchHole, ZeroRange};
        let gives =
            matches!(self.what, What::Bytes(_) | What::Allocate { how: PunchHole | ZeroRange { .. }, .. });
        gives.then(|| self.span())
    }

    /// Where the file ends at least once it was made.
    fn ends(&self) -> Option<u64> {
        use Allocate::{Reserve, ZeroRange};
        let grows = match &self.what {
            What::Bytes(_) => true,
            What::Allocate { how: Reserve { keep_size } | ZeroRange { keep_size }, .. } => !keep_size,
            What::Allocate { how: Allocate::PunchHole, .. } | What::End => false,
        };
        grows.then(|| self.span().1)
    }

    /// What is left of space kept once `[start, end)` was punched. Kept again as it was it would take pages that the punch gave
    /// back, and that it does not give back again where the file has grown over them since. What is behind the hole in its last
    /// page goes, too: that page was given back if the file ended there.
    fn unpunched(self, start: u64, end: u64) -> Vec<Self> {
        let end = end.checked_next_multiple_of(PAGE_SIZE_U64).unwrap_or(u64::MAX);
        match self.what {
            What::Allocate { how: how @ Allocate::Reserve { .. }, .. } => self.beside(how, start, end),
            _ => vec![self],
        }
    }

    /// Its pieces before and behind `[start, end)`, as allocations.
    fn beside(&self, how: Allocate, start: u64, end: u64) -> Vec<Self> {
        let (own_start, own_end) = self.span();
        let piece = |from: u64, to: u64| {
            let what = |len| What::Allocate { len, how };
            let Self { number, change, .. } = *self;
            (from < to).then(|| Kept { number, change, offset: from, what: what(to - from) })
        };
        let (before, behind) = (own_end.min(start), own_start.max(end));
        piece(own_start, before).into_iter().chain(piece(behind, own_end)).collect()
    }

    /// What is left of zeros once `[start, end)` was given other contents; `Err`: it has bytes, or gives none.
    fn zeros_without(self, start: u64, end: u64) -> Result<Vec<Self>, Self> {
        match self.what {
            What::Allocate { how, .. } if self.range().is_some() => Ok(self.beside(how, start, end)),
            _ => Err(self),
        }
    }

    /// What is left of it once `[start, end)` was given other contents.
    fn without(self, start: u64, end: u64) -> Vec<Self> {
        let Kept { number, change, offset, what } = self;
        let What::Bytes(mut bytes) = what else {
            return vec![Kept { number, change, offset, what }];
        };
        let own_end = offset + bytes.len() as u64;
        if own_end <= start || offset >= end {
            return vec![Kept { number, change, offset, what: What::Bytes(bytes) }];
        }
        let mut rest = Vec::new();
        if own_end > end {
            let behind = bytes[(end - offset) as usize..].to_vec();
            rest.push(Kept { number, change, offset: end, what: What::Bytes(behind) });
        }
        if offset < start {
            bytes.truncate((start - offset) as usize);
            rest.push(Kept { number, change, offset, what: What::Bytes(bytes) });
        }
        rest
    }
}

/// Changes in their order, without what later ones among them gave other contents. The file must not go through what it
/// was before: that may be older than what another client's sync has made durable, and power may fail in between.
fn last_only(kept: Vec<Kept>) -> Vec<Kept> {
    let mut newer: Vec<(u64, u64)> = Vec::new();
    let mut last = Vec::new();
    for change in kept.into_iter().rev() {
        let range = change.range();
        let Some((start, end)) = range else {
            last.push(change);
            continue;
        };
        let mut pieces = vec![change];
        for (from, to) in newer.iter().copied().filter(|(from, to)| *from < end && start < *to) {
            let cut =
                |piece: Kept| piece.zeros_without(from, to).unwrap_or_else(|kept| kept.without(from, to));
            pieces = pieces.into_iter().flat_map(cut).collect();
        }
        last.extend(pieces);
        newer.push((start, end));
    }
    last.reverse();
    // As the server did them: what it has restored of a client is known by the last counter.
    last.sort_by_key(|kept| kept.change);
    last
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
    /// Truncations under way, with their new lengths.
    cutting: Vec<(InodeNo, u64)>,
    failed: HashSet<InodeNo>,
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

    fn note_operation(&mut self, session: u64, ino: InodeNo, offset: u64, what: What, change: u64) {
        if self.durable_answers {
            return;
        }
        if self.session != session {
            // The server that answered is gone and recovery has passed this file: it may be lost, and nobody can tell.
            self.failed.insert(ino);
            return;
        }
        let fits = self.cost + ENTRY_BYTES <= MAX_KEPT_BYTES;
        self.keep(ino, offset, fits.then_some(what), change);
    }

    /// Puts something else in the place of each change of a file.
    fn rewrite(&mut self, ino: InodeNo, change: impl Fn(Kept) -> Vec<Kept>) {
        let Some(file) = self.files.get_mut(&ino) else {
            return;
        };
        let before: usize = file.kept.iter().map(Kept::cost).sum();
        file.kept = std::mem::take(&mut file.kept).into_iter().flat_map(change).collect();
        let after: usize = file.kept.iter().map(Kept::cost).sum();
        self.cost = self.cost - before + after;
    }
}

/// What a sync that begins now covers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark(u64);

/// All unsynced writes of a mount.
#[derive(Debug, Default)]
pub(crate) struct Unsynced {
    state: Mutex<State>,
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

    /// Notes that `session` has cut or grown a file to `size`. Of a file that was cut, this is what recovery must not
    /// write past; of one that has grown, the server may forget it.
    fn note_end(&self, session: u64, ino: InodeNo, size: u64, change: u64) {
        let mut state = self.state.lock();
        state.rewrite(ino, |kept| kept.cut_to(size).into_iter().collect());
        state.note_operation(session, ino, size, What::End, change);
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
        let mut state = self.state.lock();
        if !matches!(how, Allocate::Reserve { .. }) {
            let end = offset.saturating_add(len);
            // Bytes that go from the file's end leave its length behind, which zeroing does not give back.
            let kept = state.files.get(&ino).into_iter().flat_map(|file| &file.kept);
            let left_behind =
                kept.filter_map(Kept::ends).filter(|own| (offset + 1..=end).contains(own)).max();
            state.rewrite(ino, |kept| kept.without(offset, end));
            if how == Allocate::PunchHole {
                state.rewrite(ino, |kept| kept.unpunched(offset, end));
            }
            if let Some(left_behind) = left_behind {
                state.note_operation(session, ino, left_behind, What::End, change);
            }
        }
        state.note_operation(session, ino, offset, What::Allocate { len, how }, change);
    }

    /// Notes that `session` has written to this file by itself: there are no bytes to keep here, nor to write again.
    pub(crate) fn note_elsewhere(&self, session: u64, ino: InodeNo, change: u64) {
        let mut state = self.state.lock();
        if state.durable_answers {
            return;
        }
        if state.session != session {
            state.failed.insert(ino);
            return;
        }
        state.keep(ino, 0, None, change);
    }

    /// Whether recovery might write again, or zero again, what is in this range.
    pub(crate) fn has_some_in(&self, ino: InodeNo, offset: u64, len: u64) -> bool {
        let end = offset.saturating_add(len);
        let state = self.state.lock();
        let kept = state.files.get(&ino).into_iter().flat_map(|file| &file.kept);
        len > 0 && kept.filter_map(Kept::range).any(|(from, to)| from < end && offset < to)
    }

    /// A truncation is going to be sent. Until what this gives is dropped, nothing past `size` is written again: the
    /// server that was lost may have cut the file already, and another one does not cut it twice.
    pub(crate) fn cutting(&self, ino: InodeNo, size: u64) -> Cutting<'_> {
        self.state.lock().cutting.push((ino, size));
        Cutting { unsynced: self, ino, size }
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

    /// Written bytes of this file were lost, or nobody knows.
    pub(super) fn fail(&self, ino: InodeNo) {
        self.state.lock().failed.insert(ino);
    }

    /// Whether written bytes of this file were lost; says so once.
    pub(crate) fn take_failed(&self, ino: InodeNo) -> bool {
        let mut state = self.state.lock();
        !state.failed.is_empty() && state.failed.remove(&ino)
    }

    /// Files with writes that recovery has to look at.
    pub(crate) fn files(&self) -> Vec<InodeNo> {
        self.state.lock().files.keys().copied().collect()
    }

    /// What to restore of a file, in order, no byte twice, and the counter of the last change that was not kept.
    pub(super) fn changes_of(&self, ino: InodeNo) -> (Vec<Kept>, Option<u64>) {
        let state = self.state.lock();
        let Some(file) = state.files.get(&ino) else {
            return (Vec::new(), None);
        };
        let not_kept = file.dropped.map(|(_, change)| change);
        let mut kept = file.kept.clone();
        for (_, size) in state.cutting.iter().filter(|(cut, _)| *cut == ino) {
            kept = kept.into_iter().filter_map(|kept| kept.cut_to(*size)).collect();
        }
        (last_only(kept), not_kept)
    }

    /// The file's writes cannot be written again; `gone`: because there is no such file any more.
    pub(super) fn give_up(&self, ino: InodeNo, gone: bool) {
        let mut state = self.state.lock();
        if let Some(file) = state.files.remove(&ino) {
            state.cost -= file.kept.iter().map(Kept::cost).sum::<usize>();
        }
        if !gone {
            state.failed.insert(ino);
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

/// A truncation under way.
pub(crate) struct Cutting<'u> {
    unsynced: &'u Unsynced,
    ino: InodeNo,
    size: u64,
}

impl Cutting<'_> {
    /// `session` has done it; `change` is the file's counter now.
    pub(crate) fn done(self, session: u64, change: u64) {
        self.unsynced.note_end(session, self.ino, self.size, change);
    }
}

impl Drop for Cutting<'_> {
    fn drop(&mut self) {
        let mut state = self.unsynced.state.lock();
        if let Some(at) = state.cutting.iter().position(|cut| *cut == (self.ino, self.size)) {
            state.cutting.swap_remove(at);
        }
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
    fn the_file_does_not_go_through_what_it_was_before() {
        let unsynced = unsynced();
        assert!(unsynced.note(1, INO, 0, b"first", 1));
        unsynced.note_allocate(1, INO, (10, 20), Allocate::PunchHole, 100);
        assert!(unsynced.note(1, INO, 12, b"over zeros", 2));
        assert!(unsynced.note(1, INO, 1, b"ver", 3));
        let kept = unsynced.changes_of(INO).0;
        let made: Vec<_> = kept.into_iter().map(|kept| (kept.offset, kept.what)).collect();
        let zeros = |len| What::Allocate { len, how: Allocate::PunchHole };
        let mut bytes: Vec<_> =
            made.iter().filter(|(_, what)| matches!(what, What::Bytes(_))).cloned().collect();
        bytes.sort_by_key(|(offset, _)| *offset);
        let expected = [(0, &b"f"[..]), (1, b"ver"), (4, b"t"), (12, b"over zeros")];
        assert_eq!(bytes, expected.map(|(offset, bytes)| (offset, What::Bytes(bytes.to_vec()))));
        assert!(made.contains(&(10, zeros(2))) && made.contains(&(22, zeros(8))) && made.len() == 6);
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
        unsynced.synced(None, unsynced.mark());
        assert!(unsynced.is_empty());
        assert_eq!(unsynced.state.lock().cost, 0);
    }

    #[test]
    fn changed_ranges_are_cut_out() {
        let unsynced = unsynced();
        unsynced.note(1, INO, 10, b"0123456789", 1);
        unsynced.note_allocate(1, INO, (13, 2), Allocate::PunchHole, 100);
        assert_eq!(ranges(&unsynced), [(15, b"56789".to_vec()), (10, b"012".to_vec())]);
        unsynced.cutting(INO, 16).done(1, 2);
        assert_eq!(ranges(&unsynced), [(15, b"5".to_vec()), (10, b"012".to_vec())]);
        unsynced.cutting(INO, 0).done(1, 3);
        assert_eq!(ranges(&unsynced), []);
        unsynced.synced(None, unsynced.mark());
        assert_eq!(unsynced.state.lock().cost, 0);
    }

    #[test]
    fn what_keeps_the_length_leaves_none_behind() {
        let unsynced = unsynced();
        let ends = || {
            let kept = unsynced.changes_of(INO).0;
            kept.iter().filter(|kept| kept.what == What::End).map(|kept| kept.offset).collect::<Vec<_>>()
        };
        unsynced.note_allocate(1, INO, (10, 20), Allocate::ZeroRange { keep_size: true }, 100);
        unsynced.note_allocate(1, INO, (0, 100), Allocate::PunchHole, 100);
        unsynced.note_allocate(1, INO, (0, 200), Allocate::PunchHole, 100);
        assert_eq!(ends(), [0; 0]);
        unsynced.note_allocate(1, INO, (5, 20), Allocate::ZeroRange { keep_size: false }, 100);
        unsynced.note_allocate(1, INO, (0, 100), Allocate::PunchHole, 100);
        assert_eq!(ends(), [25], "that has grown the file");
    }

    #[test]
    fn space_that_was_punched_is_not_kept_again() {
        let unsynced = unsynced();
        let reserve = Allocate::Reserve { keep_size: false };
        unsynced.note_allocate(1, INO, (0, 16_385), reserve, 100);
        unsynced.note_allocate(1, INO, (16_384, 1), Allocate::PunchHole, 100);
        unsynced.note_allocate(1, INO, (4096, 4000), Allocate::PunchHole, 100);
        let kept = unsynced.changes_of(INO).0;
        let kept: Vec<_> = kept.into_iter().map(|kept| (kept.offset, kept.what)).collect();
        let allocated = |len, how| What::Allocate { len, how };
        assert_eq!(
            kept,
            [
                (0, allocated(4096, reserve)),
                (8192, allocated(8192, reserve)),
                (16_385, What::End),
                (16_384, allocated(1, Allocate::PunchHole)),
                (4096, allocated(4000, Allocate::PunchHole)),
            ]
        );
    }

    #[test]
    fn operations_are_kept_in_order_and_cut_with_the_file() {
        let unsynced = unsynced();
        let punch = |len| What::Allocate { len, how: Allocate::PunchHole };
        unsynced.cutting(INO, 100).done(1, 1);
        unsynced.note(1, INO, 0, b"written", 2);
        unsynced.note_allocate(1, INO, (2, 90), Allocate::PunchHole, 100);
        let all = |size| {
            let cutting = unsynced.cutting(INO, size);
            let kept = unsynced.changes_of(INO).0.into_iter().map(|kept| (kept.offset, kept.what)).collect();
            drop(cutting);
            kept
        };
        let kept: Vec<_> = all(1000);
        let written = (0, What::Bytes(b"wr".to_vec()));
        let reached = (7, What::End);
        assert_eq!(kept, [(100, What::End), written.clone(), reached.clone(), (2, punch(90))]);
        let kept: Vec<_> = all(50);
        assert_eq!(kept, [written, reached, (2, punch(48))], "it never was longer");
        let kept: Vec<_> = all(0);
        assert_eq!(kept, []);
        // A lost server's answer cannot be made good any more.
        unsynced.begin_session(2, false);
        unsynced.note_allocate(1, INO, (0, 1), Allocate::PunchHole, 100);
        assert!(unsynced.take_failed(INO));
    }

    #[test]
    fn what_is_being_cut_is_not_written_again() {
        let unsynced = unsynced();
        unsynced.note(1, INO, 0, b"0123456789", 1);
        unsynced.note(1, INO, 20, b"past", 2);
        let cutting = unsynced.cutting(INO, 4);
        assert_eq!(ranges(&unsynced), [(0, b"0123".to_vec())]);
        drop(cutting);
        assert_eq!(ranges(&unsynced).len(), 2, "it failed");
        unsynced.cutting(INO, 4).done(1, 3);
        assert_eq!(ranges(&unsynced), [(0, b"0123".to_vec())]);
        assert!(unsynced.state.lock().cutting.is_empty());
    }

    #[test]
    fn ranges_are_known_of_what_has_contents() {
        let unsynced = unsynced();
        unsynced.note(1, INO, 10, b"0123456789", 1);
        unsynced.note_allocate(1, INO, (30, 10), Allocate::ZeroRange { keep_size: false }, 100);
        unsynced.note_allocate(1, INO, (100, 10), Allocate::Reserve { keep_size: false }, 100);
        unsynced.cutting(INO, 200).done(1, 2);
        for (offset, len, has) in [
            (0, 10, false),
            (0, 11, true),
            (19, 1, true),
            (20, 10, false),
            (20, 11, true),
            (12, 2, true),
            (15, 0, false),
            (40, u64::MAX, false),
            (0, u64::MAX, true),
        ] {
            assert_eq!(unsynced.has_some_in(INO, offset, len), has, "{offset}, {len}");
        }
        assert!(!unsynced.has_some_in(InodeNo(8), 0, u64::MAX));
        unsynced.synced(Some(INO), unsynced.mark());
        assert!(!unsynced.has_some_in(INO, 0, u64::MAX));
    }

    #[test]
    fn another_session_s_answer_is_not_taken() {
        let unsynced = unsynced();
        unsynced.begin_session(2, false);
        assert!(!unsynced.note(1, INO, 0, b"late", 1));
        assert!(unsynced.is_empty());
        // There are no bytes to send again: what the lost server copied may be lost.
        unsynced.note_elsewhere(1, INO, 100);
        assert!(unsynced.take_failed(INO));
        unsynced.note_elsewhere(2, INO, 100);
        assert!(!unsynced.take_failed(INO));
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
