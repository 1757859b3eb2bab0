//! Changes of contents that the server may still lose: kept until a sync covers them, and restored if the server was killed.
//!
//! A write is answered when the server's memory has it. If that server is killed, an application that goes on and calls fsync must
//! not be told that lost bytes are safe. So copies are kept, as NFS clients keep unstable writes until a COMMIT (RFC 8881 section
//! 18.3), and recovery has the next server restore them. Each names the file's change counter when it was answered: by that the
//! server knows later changes, of this mount and of others.
//!
//! A change of the length, or to zeros, without bytes of the caller (ftruncate, fallocate) is kept as the operation. Each change is
//! kept whole, also where a later one has overtaken a part of it, and restored whole. So in recovery a file only has states that it
//! had before, and a crash in the midst of recovery leaves one of them. If the server's answers are durable
//! (`Attached::durable_answers`) nothing is kept.
//!
//! # Bounds
//! Copies take at most the mount's bound, including the cost of entries and files beside bytes, and are [`CHANGES_MAX`] changes at
//! most. A caller takes room for the copy before it asks the server for the change (`room`), and waits for a sync where there is none
//! (`syncer`): so every answered change is kept.
//!
//! # Invariants
//! * A write is noted with the session that answered it. If recovery to a newer one has begun meanwhile, it is not taken, and the
//!   caller restores it itself.
//! * Entries are dropped only by a sync that began after they were noted, or with a loss that is told ([`Unsynced::give_up`]). A
//!   recovery ends with such a sync: there are only entries of the server's present life.
//! * Copies and room taken for copies are at most the bound; a larger change has all of it alone.

mod kept;
mod one_sided;
mod room;

use super::losses::Losses;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rpc::Allocate;
pub(super) use kept::in_message;
use kept::{Kept, What};
pub(crate) use one_sided::Life;
use one_sided::OneSided;
use parking_lot::{Condvar, Mutex};
pub(crate) use room::Room;
pub use room::{UNSYNCED_BYTES_LEAST, unsynced_bytes};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The most changes that are kept. In a recovery each one is a request, for which other clients wait. Each also counts towards the mount's share of
/// the restored ranges and files that a server notes (`files/newer.rs`; 131,072 for one user or key).
const CHANGES_MAX: usize = 8192;
/// The approximate cost of an entry beside its bytes: the entry itself, the room that its list has grown ahead, and malloc's share.
const ENTRY_BYTES: usize = 2 * size_of::<Kept>() + 32;
/// The approximate cost of a file beside its entries: its place among the files, and its list's first room.
const FILE_BYTES: usize = 4 * size_of::<Kept>() + 64;

/// Changes of contents that no sync has covered: the server may still lose them, and the mount has the copy that survives it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnsyncedChanges {
    /// The number of files with such changes.
    pub files: u64,
    /// The number of written bytes in such changes.
    pub bytes: u64,
}

impl std::fmt::Display for UnsyncedChanges {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (bytes, files) = (self.bytes, self.files);
        let plural = |number, word: &str| format!("{number} {word}{}", if number == 1 { "" } else { "s" });
        write!(f, "{} in {}", plural(bytes, "unsynced byte"), plural(files, "file"))
    }
}

/// The kept changes of one file, in the order of their numbers.
#[derive(Debug, Default)]
struct FileWrites {
    kept: Vec<Kept>,
    /// The cost of these changes.
    cost: usize,
}

impl FileWrites {
    /// Takes out the changes before `number`.
    fn take_before(&mut self, number: u64) -> Vec<Kept> {
        let stay = self.kept.partition_point(|kept| kept.number < number);
        let stay = self.kept.split_off(stay);
        let taken = std::mem::replace(&mut self.kept, stay);
        self.cost -= taken.iter().map(|kept| kept.cost).sum::<usize>();
        taken
    }
}

#[derive(Debug, Default)]
struct State {
    /// The session whose answers are noted; 0 while a recovery is under way.
    session: u64,
    /// Whether this session's server cannot lose its answers, so that nothing is kept.
    durable_answers: bool,
    /// The session before this one, if its server's answers were durable.
    durable_before: Option<u64>,
    /// The number of the next change.
    next: u64,
    /// The cost of everything kept.
    cost: usize,
    /// The cost of changes under way that may have to be kept.
    reserved: usize,
    /// Whether somebody has found no room since room was last freed.
    is_wanted: bool,
    /// The session ends: nobody may wait.
    has_ended: bool,
    /// Sorted, so that recoveries restore in the same order each time.
    files: BTreeMap<InodeNo, FileWrites>,
    one_sided: OneSided,
}

impl State {
    fn keep(&mut self, cost: usize, ino: InodeNo, offset: u64, what: What, change: u64) {
        let kept = Kept { number: self.next, change, offset, what, cost };
        self.next += 1;
        let mut is_new = false;
        let file = self.files.entry(ino).or_insert_with(|| {
            is_new = true;
            FileWrites::default()
        });
        file.cost += cost;
        file.kept.push(kept);
        self.cost += cost + if is_new { FILE_BYTES } else { 0 };
    }

    /// Takes out the changes of a file before `number`.
    fn take_before(&mut self, ino: InodeNo, number: u64) -> Vec<Kept> {
        let Some(file) = self.files.get_mut(&ino) else {
            return Vec::new();
        };
        let before = file.cost;
        let taken = file.take_before(number);
        self.cost -= before - file.cost;
        if file.kept.is_empty() {
            self.files.remove(&ino);
            self.cost -= FILE_BYTES;
        }
        taken
    }
}

/// The changes that a sync covers that begins now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark(u64);

/// All unsynced writes of a mount.
#[derive(Debug)]
pub(crate) struct Unsynced {
    /// The most that is kept, in bytes of cost.
    bound: usize,
    state: Mutex<State>,
    /// Notified when there may be room for a waiter.
    has_room: Condvar,
    /// Notified when somebody waits for room, or half of it is taken.
    is_due: Condvar,
    losses: Losses,
}

impl Unsynced {
    /// The cost of a change with this many bytes.
    fn cost_of(&self, bytes: usize) -> usize {
        (bytes + ENTRY_BYTES).max(self.bound / CHANGES_MAX)
    }

    /// No changes yet; keeps at most `bound` bytes of cost.
    pub(super) fn new(bound: usize) -> Self {
        Self {
            bound,
            state: Mutex::default(),
            has_room: Condvar::new(),
            is_due: Condvar::new(),
            losses: Losses::default(),
        }
    }

    /// Notes a write that `session` answered. `false`: the server that answered is gone and recovery did not see this write; the caller must restore
    /// it.
    pub(crate) fn note(
        &self,
        room: Room<'_>,
        session: u64,
        ino: InodeNo,
        offset: u64,
        bytes: &[u8],
        change: u64,
    ) -> bool {
        // Copied before the lock is taken, because that is most of the work.
        let what = What::Bytes(Arc::from(bytes));
        let mut state = self.state.lock();
        room.end(&mut state);
        if state.session != session || state.durable_answers {
            // All of the write's room becomes free.
            self.has_room.notify_all();
            return state.session == session || state.durable_before == Some(session);
        }
        state.keep(self.cost_of(bytes.len()), ino, offset, what, change);
        self.tell_if_due(&state);
        true
    }

    fn note_operation(
        &self,
        room: Room<'_>,
        session: u64,
        ino: InodeNo,
        offset: u64,
        what: What,
        change: u64,
    ) {
        let mut state = self.state.lock();
        room.end(&mut state);
        if state.durable_answers {
            self.has_room.notify_all();
            return;
        }
        if state.session != session {
            // The server that answered is gone and recovery has passed this file. The change may be lost, and there is no way to know.
            self.losses.note(ino);
            return;
        }
        state.keep(self.cost_of(0), ino, offset, what, change);
        self.tell_if_due(&state);
    }

    /// Notes that `session` has made a file end at `size`; `change` is the file's counter then.
    pub(crate) fn note_end(&self, room: Room<'_>, session: u64, ino: InodeNo, size: u64, change: u64) {
        self.note_operation(room, session, ino, size, What::End, change);
    }

    /// Notes what `session` has allocated, zeroed or punched; `change` is the file's counter then.
    pub(crate) fn note_allocate(
        &self,
        room: Room<'_>,
        session: u64,
        ino: InodeNo,
        (offset, len): (u64, u64),
        how: Allocate,
        change: u64,
    ) {
        self.note_operation(room, session, ino, offset, What::Allocate { len, how }, change);
    }

    /// A sync that begins now covers the changes before this mark.
    pub(crate) fn mark(&self) -> Mark {
        Mark(self.state.lock().next)
    }

    /// A sync of a file, or of everything (`None`), that began at `mark` has succeeded.
    pub(crate) fn synced(&self, ino: Option<InodeNo>, mark: Mark) {
        self.state.lock().one_sided.synced(ino, mark.0);
        self.take_before(ino, mark);
    }

    /// Drops the changes of a file before `mark` that cannot be synced, and notes a loss if there were any.
    pub(super) fn give_up(&self, ino: InodeNo, mark: Mark) {
        if self.take_before(Some(ino), mark) > 0 {
            self.losses.note(ino);
        }
    }

    /// Takes out the changes before `mark` of a file, or of all files. Returns their number.
    fn take_before(&self, ino: Option<InodeNo>, mark: Mark) -> usize {
        let mut state = self.state.lock();
        let files = ino.map_or_else(|| state.files.keys().copied().collect(), |ino| vec![ino]);
        let taken: Vec<_> = files.into_iter().map(|ino| state.take_before(ino, mark.0)).collect();
        state.is_wanted = false;
        self.has_room.notify_all();
        // Frees the copies after the unlock, so that others can note theirs meanwhile.
        drop(state);
        taken.iter().map(Vec::len).sum()
    }

    /// Whether the server has promised to lose nothing that it answered.
    pub(crate) fn answers_are_durable(&self) -> bool {
        self.state.lock().durable_answers
    }

    /// Whether nothing is kept.
    pub(crate) fn is_empty(&self) -> bool {
        self.state.lock().files.is_empty()
    }

    /// The number of kept files and bytes, for people.
    pub(crate) fn changes(&self) -> UnsyncedChanges {
        let state = self.state.lock();
        let kept = state.files.values().flat_map(|file| &file.kept);
        UnsyncedChanges { files: state.files.len() as u64, bytes: kept.map(|kept| kept.bytes() as u64).sum() }
    }

    /// The file with more than half of everything kept, if there is one.
    pub(super) fn heaviest(&self) -> Option<InodeNo> {
        let state = self.state.lock();
        let is_most = |file: &FileWrites| file.cost > state.cost / 2;
        state.files.iter().find(|(_, file)| is_most(file)).map(|(ino, _)| *ino)
    }

    /// Files whose written bytes were lost, or may have been.
    pub(crate) fn losses(&self) -> &Losses {
        &self.losses
    }

    /// The files with changes that recovery must restore.
    pub(crate) fn files(&self) -> Vec<InodeNo> {
        self.state.lock().files.keys().copied().collect()
    }

    /// The changes to restore of a file, in the order in which the server made them. The server tells by the last counter what it has restored for a
    /// client.
    pub(super) fn changes_of(&self, ino: InodeNo) -> Vec<Kept> {
        let state = self.state.lock();
        let mut kept = state.files.get(&ino).map_or_else(Vec::new, |file| file.kept.clone());
        drop(state);
        kept.sort_by_key(|kept| kept.change);
        kept
    }

    /// A recovery has begun: until its end no change is noted.
    pub(super) fn begin_recovery(&self) {
        let mut state = self.state.lock();
        if state.session != 0 {
            state.durable_before = state.durable_answers.then_some(state.session);
            state.session = 0;
        }
    }

    /// From now on only changes that this session answers are noted.
    pub(super) fn begin_session(&self, session: u64, durable_answers: bool) {
        let mut state = self.state.lock();
        (state.session, state.durable_answers) = (session, durable_answers);
    }
}

#[cfg(test)]
mod tests;
