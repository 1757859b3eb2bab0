//! Changes of files since the start of the server, while clients of the server before it may still restore changes that it lost.
//!
//! A change that a client asks for is newer than any restored change. Restored changes are ordered as the server before this one answered them. So
//! for each file this has the state that was stored at the start (`Written`), and for each range the counter of its last change since.
//!
//! # Until when
//! New changes are noted during the grace period. A client that comes back later restores a file only if no client has asked for a change of it since
//! the start, which the file's counters tell. Restored changes are always noted.
//!
//! # Bound
//! [`NEWER_MAX`] files and ranges. When it is reached, the rule for later clients applies at once: new changes are forgotten, so they take room from
//! no peer. Each peer has a share of the room for restored changes: half of what other peers leave. A peer that has used up its share restores
//! nothing more and is told so; the others go on.
//!
//! # Order
//! A client's change of contents holds `FileRegion::changes` shared from before `begin` until it is noted here. A restore holds it exclusively, from
//! its look at newer changes until its bytes are in place.

use crate::meta::{ClientChange, Verdict, Written};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rdma::PeerKey;
use cuttlefs_common::status::Status;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};

/// Most files and ranges: some 40 MiB. A mount keeps at most 8,192 changes to restore, and all mounts with the same key are one peer.
pub const NEWER_MAX: usize = 262_144;
/// The counter of changes that clients asked this server for: higher than that of any change to restore.
const OF_THIS_LIFE: u64 = u64::MAX;

/// A part of a file, and the verdict on a restore there.
pub(super) type Part = (u64, u64, Verdict);

#[derive(Debug, Default)]
struct OfFile {
    /// The file's stored state before anything changed.
    before: Written,
    /// The changed ranges: for each first byte the end of the range and the counter of its last change. They do not overlap.
    ranges: BTreeMap<u64, (u64, u64)>,
}

#[derive(Debug, Default)]
struct State {
    files: HashMap<InodeNo, OfFile>,
    ranges: usize,
    /// The number of ranges and files that each peer has restored. There are at most as many peers as files and ranges.
    of_peer: HashMap<PeerKey, usize>,
}

impl State {
    fn used(&self) -> usize {
        self.ranges + self.files.len()
    }

    /// Whether a peer has used up its share.
    fn is_beyond_share(&self, peer: &PeerKey) -> bool {
        let own = self.of_peer.get(peer).copied().unwrap_or(0);
        let others = self.of_peer.values().sum::<usize>() - own;
        2 * own >= NEWER_MAX.saturating_sub(others)
    }

    fn charge(&mut self, peer: &PeerKey, more: usize) {
        *self.of_peer.entry(peer.clone()).or_default() += more;
    }

    /// Forgets the changes that clients asked this server for.
    fn forget_asked(&mut self) {
        self.files.retain(|_, file| file.ranges.values().all(|(_, change)| *change != OF_THIS_LIFE));
        self.ranges = self.files.values().map(|file| file.ranges.len()).sum();
    }
}

/// The changes since the start of the server (see the module).
#[derive(Debug, Default)]
pub struct Newer {
    /// Whether changes are noted. Set before the first request, cleared for good under the mutex. Relaxed: a reader of an old `true` reads again
    /// under the mutex.
    is_noting: AtomicBool,
    state: Mutex<State>,
}

impl OfFile {
    /// Gives a range the counter of a change. Returns how many more ranges there are.
    fn put(&mut self, start: u64, end: u64, change: u64) -> isize {
        let before = self.ranges.len() as isize;
        self.split(start);
        self.split(end);
        let covered: Vec<u64> = self.ranges.range(start..end).map(|(first, _)| *first).collect();
        for first in covered {
            self.ranges.remove(&first);
        }
        let mut start = start;
        // A file that is written from front to back has one range.
        if let Some((&first, &(last, same))) = self.ranges.range(..start).next_back()
            && (last, same) == (start, change)
        {
            self.ranges.remove(&first);
            start = first;
        }
        self.ranges.insert(start, (end, change));
        self.ranges.len() as isize - before
    }

    /// Splits the range across this offset, if there is one.
    fn split(&mut self, at: u64) {
        if let Some((_, range)) = self.ranges.range_mut(..at).next_back()
            && range.0 > at
        {
            let (end, change) = *range;
            range.0 = at;
            self.ranges.insert(at, (end, change));
        }
    }

    fn verdict(&self, by: ClientChange, at: u64) -> Verdict {
        let newer = self.ranges.range(..=at).next_back().filter(|(_, (end, _))| *end > at);
        let since = newer.map_or(Verdict::Restore, |(_, (_, change))| Verdict::on(by.change, *change));
        // The verdict by the state at the start comes first: a change that was overtaken then was no loss, whatever has overwritten it since.
        match self.before.verdict(by, at) {
            Verdict::Restore => since,
            before => before,
        }
    }

    /// `[start, end)` in parts, each with one verdict.
    fn parts(&self, by: ClientChange, start: u64, end: u64) -> Vec<Part> {
        let mut cuts: Vec<u64> = vec![start];
        cuts.extend(self.before.cut.map(|cut| cut.size));
        let near = self.ranges.range(..start).next_back().into_iter().chain(self.ranges.range(start..end));
        cuts.extend(near.flat_map(|(first, (last, _))| [*first, *last]));
        cuts.retain(|at| (start..end).contains(at));
        cuts.sort_unstable();
        cuts.dedup();
        let ends = cuts.iter().skip(1).copied().chain([end]);
        let mut parts: Vec<Part> = Vec::new();
        for (from, to) in cuts.iter().copied().zip(ends) {
            let verdict = self.verdict(by, from);
            match parts.last_mut() {
                Some(last) if last.2 == verdict => last.1 = to,
                _ => parts.push((from, to, verdict)),
            }
        }
        parts
    }
}

impl Newer {
    /// Begins to note changes, because clients may have something to restore.
    pub fn start(&self) {
        self.is_noting.store(true, Ordering::Relaxed);
    }

    /// Ends that: all clients have come back, or the grace period is over.
    pub fn stop(&self) {
        let mut state = self.state.lock();
        if self.is_noting.swap(false, Ordering::Relaxed) {
            state.forget_asked();
        }
    }

    /// Whether changes are noted by range, at about this moment. Once they are not, they never are again.
    pub(super) fn is_noting(&self) -> bool {
        self.is_noting.load(Ordering::Relaxed)
    }

    /// Begins a client's change of a file; `written` is the file's stored state.
    pub fn begin(
        &self,
        ino: InodeNo,
        written: impl FnOnce() -> Result<Written, Status>,
    ) -> Result<(), Status> {
        if !self.is_noting.load(Ordering::Relaxed) || self.state.lock().files.contains_key(&ino) {
            return Ok(());
        }
        let before = written()?;
        let mut state = self.state.lock();
        if self.is_noting.load(Ordering::Relaxed) {
            state.files.entry(ino).or_insert_with(|| OfFile { before, ..OfFile::default() });
        }
        Ok(())
    }

    /// Notes that the change has given these bytes other contents.
    pub fn changed(&self, ino: InodeNo, start: u64, end: u64) {
        if self.is_noting.load(Ordering::Relaxed) {
            let mut state = self.state.lock();
            Self::put(&mut state, ino, (start, end), OF_THIS_LIFE);
            self.bound(&mut state);
        }
    }

    /// Like `OfFile::put`, and counts the ranges.
    fn put(state: &mut State, ino: InodeNo, (start, end): (u64, u64), change: u64) -> isize {
        let Some(file) = state.files.get_mut(&ino).filter(|_| start < end) else { return 0 };
        let more = file.put(start, end, change);
        state.ranges = state.ranges.saturating_add_signed(more);
        more
    }

    fn bound(&self, state: &mut State) {
        if state.used() > NEWER_MAX && self.is_noting.swap(false, Ordering::Relaxed) {
            tracing::warn!(
                NEWER_MAX,
                "so much changes that it is not known by range; clients that come back may lose what they had not synced in files that others change"
            );
            state.forget_asked();
        }
    }

    /// The verdicts on a client's change of `[start, end)` that it wants to restore. `now`: the file's stored state, with the changes that clients
    /// have asked this server for.
    ///
    /// # Errors
    /// As `now`.
    pub fn judge(
        &self,
        ino: InodeNo,
        (by, peer): (ClientChange, &PeerKey),
        (start, end): (u64, u64),
        now: impl FnOnce() -> Result<Written, Status>,
    ) -> Result<Vec<Part>, Status> {
        let now = now()?;
        let mut state = self.state.lock();
        let is_noting = self.is_noting.load(Ordering::Relaxed);
        let (is_new, is_beyond) = (!state.files.contains_key(&ino), state.is_beyond_share(peer));
        if is_new && is_beyond {
            return Ok(vec![(start, end, Verdict::Lost)]);
        }
        if is_new {
            state.charge(peer, 1);
        }
        let file = state.files.entry(ino).or_insert_with(|| OfFile { before: now, ..OfFile::default() });
        let was_changed = !is_noting && now.until > file.before.until;
        let mut parts = file.parts(by, start, end);
        if was_changed || is_beyond {
            let of_unknown = parts.iter_mut().filter(|(_, _, verdict)| *verdict == Verdict::Restore);
            of_unknown.for_each(|(_, _, verdict)| *verdict = Verdict::Lost);
        }
        self.bound(&mut state);
        Ok(parts)
    }

    /// Notes that a client has restored its change of a range.
    pub fn restored(&self, ino: InodeNo, (by, peer): (ClientChange, &PeerKey), start: u64, end: u64) {
        let mut state = self.state.lock();
        let more = Self::put(&mut state, ino, (start, end), by.change);
        state.charge(peer, more.max(0) as usize);
        self.bound(&mut state);
    }

    /// The number of files and ranges that are noted.
    pub fn noted(&self) -> usize {
        let state = self.state.lock();
        state.files.len() + state.ranges
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Verdict::{Lost, Overtaken, Restore};
    use cuttlefs_common::ids::ClientId;

    const INO: InodeNo = InodeNo(7);
    const LIFE: u64 = 1 << 32;
    const PEER: PeerKey = PeerKey::User(0);

    fn by(client: u128, number: u64) -> ClientChange {
        ClientChange { client: ClientId(client), change: LIFE + number }
    }

    fn stored() -> Result<Written, Status> {
        let mut written = Written::default();
        written.cover(LIFE + 10);
        Ok(written)
    }

    fn noting() -> Newer {
        let newer = Newer::default();
        newer.start();
        newer.begin(INO, stored).expect("it is stored");
        newer
    }

    #[test]
    fn what_was_asked_for_stays_and_what_was_restored_stands_in_its_order() {
        let newer = noting();
        let judge =
            |by, start, end| newer.judge(INO, (by, &PEER), (start, end), stored).expect("it is stored");
        newer.changed(INO, 100, 150);
        newer.changed(INO, 150, 200);
        assert_eq!(newer.noted(), 2);
        assert_eq!(judge(by(1, 11), 90, 210), [(90, 100, Restore), (100, 200, Lost), (200, 210, Restore)]);
        assert_eq!(judge(by(1, 10), 90, 210), [(90, 210, Overtaken)]);
        newer.restored(INO, (by(1, 12), &PEER), 90, 95);
        assert_eq!(judge(by(2, 11), 80, 100), [(80, 90, Restore), (90, 95, Overtaken), (95, 100, Restore)]);
        assert_eq!(judge(by(1, 12), 90, 95), [(90, 95, Overtaken)], "once");
        assert_eq!(judge(by(2, 13), 90, 95), [(90, 95, Restore)]);
        newer.changed(INO, 92, u64::MAX);
        assert_eq!(judge(by(2, 13), 90, 95), [(90, 92, Restore), (92, 95, Lost)]);
    }

    fn changed() -> Result<Written, Status> {
        stored().map(|mut written| {
            written.cover(2 * LIFE);
            written
        })
    }

    #[test]
    fn behind_the_grace_period_a_file_that_was_changed_is_not_restored() {
        const OTHER: InodeNo = InodeNo(8);
        let newer = noting();
        newer.changed(INO, 0, 1);
        assert_eq!(newer.judge(OTHER, (by(1, 12), &PEER), (0, 10), stored), Ok(vec![(0, 10, Restore)]));
        newer.restored(OTHER, (by(1, 12), &PEER), 0, 10);
        newer.stop();
        assert_eq!(newer.noted(), 2, "the other's");
        assert_eq!(newer.judge(INO, (by(1, 11), &PEER), (0, 10), changed), Ok(vec![(0, 10, Lost)]));
        assert_eq!(newer.judge(OTHER, (by(2, 11), &PEER), (0, 10), stored), Ok(vec![(0, 10, Overtaken)]));
        assert_eq!(newer.judge(OTHER, (by(2, 13), &PEER), (0, 10), stored), Ok(vec![(0, 10, Restore)]));
        assert_eq!(newer.judge(OTHER, (by(2, 13), &PEER), (0, 20), changed), Ok(vec![(0, 20, Lost)]));
    }

    #[test]
    fn too_many_ranges_are_forgotten_and_nothing_is_restored_over_them() {
        let newer = noting();
        for index in 0..NEWER_MAX as u64 {
            newer.changed(INO, 10 * index, 10 * index + 1);
        }
        assert_eq!(newer.noted(), 0);
        assert_eq!(newer.judge(INO, (by(1, 11), &PEER), (0, 10), changed), Ok(vec![(0, 10, Lost)]));
    }

    #[test]
    fn what_others_ask_for_takes_nothing_of_what_may_be_restored() {
        let newer = noting();
        for index in 0..NEWER_MAX as u64 - 8 {
            newer.changed(INO, 10 * index, 10 * index + 1);
        }
        for number in 0..1000 {
            let ino = InodeNo(1000 + number);
            let judged = newer.judge(ino, (by(2, 12), &PEER), (0, 10), stored);
            assert_eq!(judged, Ok(vec![(0, 10, Restore)]), "{number}");
            newer.restored(ino, (by(2, 12), &PEER), 0, 10);
        }
        assert_eq!(newer.noted(), 2000, "what was asked for gave way");
        assert_eq!(newer.judge(INO, (by(1, 11), &PEER), (0, 10), changed), Ok(vec![(0, 10, Lost)]));
    }

    #[test]
    fn who_restores_without_end_takes_nobody_elses_share() {
        let newer = noting();
        let hostile = [PeerKey::User(1), PeerKey::User(2)];
        for (peer, ino) in hostile.iter().zip([InodeNo(8), InodeNo(9)]) {
            for index in 0..NEWER_MAX as u64 {
                let parts = newer.judge(ino, (by(1, 12), peer), (2 * index, 2 * index + 1), stored);
                if parts.expect("it is stored")[0].2 == Restore {
                    newer.restored(ino, (by(1, 12), peer), 2 * index, 2 * index + 1);
                }
            }
            assert_eq!(
                newer.judge(InodeNo(100 + ino.0), (by(1, 12), peer), (0, 10), stored),
                Ok(vec![(0, 10, Lost)])
            );
        }
        assert!(newer.noted() < NEWER_MAX);
        for number in 0..1000 {
            let ino = InodeNo(1000 + number);
            let judged = newer.judge(ino, (by(2, 12), &PEER), (0, 10), stored);
            assert_eq!(judged, Ok(vec![(0, 10, Restore)]), "{number}");
            newer.restored(ino, (by(2, 12), &PEER), 0, 10);
        }
        newer.changed(INO, 0, 10);
        assert_eq!(
            newer.judge(INO, (by(2, 12), &PEER), (0, 20), stored),
            Ok(vec![(0, 10, Lost), (10, 20, Restore)])
        );
    }
}
