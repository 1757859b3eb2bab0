//! Changes of files since the start of the server, while clients of the server before it may still restore changes that it lost.
//!
//! A change that a client asks for is newer than any restored one; restored changes are ordered as the server before this one answered
//! them. So of each file the state stored at the start is known (`Written`), and for each range the counter of the last change since.
//!
//! # Until when
//! New changes are noted as long as the grace period lasts. A client that comes back later restores a file only if no client has asked
//! for a change of it since the start: that follows from its counters. Restored changes are always noted.
//!
//! # Bound
//! [`NEWER_MAX`] files and ranges. At the bound the rule is that after the grace period: new changes are forgotten, so they take room
//! from no peer. Each peer has a share of the room for restored changes: half of the room that others leave. A peer that has used it up
//! restores nothing more and is told so; the others go on.
//!
//! # Order
//! A change of contents for a client holds `FileRegion::changes` shared from before `begin` until it is noted here. A restore holds it
//! alone, from its look at newer changes until its bytes are in place.

use crate::meta::{ClientChange, Verdict, Written};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rdma::PeerKey;
use cuttlefs_common::status::Status;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};

/// Files and ranges at most: some 40 MiB. A mount keeps 8,192 changes at most to restore, and everybody who has a key is one peer.
pub const NEWER_MAX: usize = 262_144;
/// Counter of what a client asked this server for: later than all that can be restored.
const OF_THIS_LIFE: u64 = u64::MAX;

/// A part of a file and what is to be done there.
pub(super) type Part = (u64, u64, Verdict);

#[derive(Debug, Default)]
struct OfFile {
    /// As it was stored before anything changed.
    before: Written,
    /// By its first byte, the end of a range and the counter of what stands there. They do not overlap.
    ranges: BTreeMap<u64, (u64, u64)>,
}

#[derive(Debug, Default)]
struct State {
    files: HashMap<InodeNo, OfFile>,
    ranges: usize,
    /// Of these, what peers have restored. As many peers as files and ranges at most.
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

    /// From now on what clients ask for is not noted.
    fn forget_asked(&mut self) {
        self.files.retain(|_, file| file.ranges.values().all(|(_, change)| *change != OF_THIS_LIFE));
        self.ranges = self.files.values().map(|file| file.ranges.len()).sum();
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct Newer {
    /// Whether changes are noted. Set before the first request, cleared for good under the mutex. Relaxed: who reads an old `true`
    /// looks again under the mutex.
    is_noting: AtomicBool,
    state: Mutex<State>,
}

impl OfFile {
    /// Puts a counter over a range; gives by how many ranges there are more.
    fn put(&mut self, start: u64, end: u64, change: u64) -> isize {
        let before = self.ranges.len() as isize;
        self.split(start);
        self.split(end);
        let covered: Vec<u64> = self.ranges.range(start..end).map(|(first, _)| *first).collect();
        for first in covered {
            self.ranges.remove(&first);
        }
        let mut start = start;
        // What is written from front to back is one range.
        if let Some((&first, &(last, same))) = self.ranges.range(..start).next_back()
            && (last, same) == (start, change)
        {
            self.ranges.remove(&first);
            start = first;
        }
        self.ranges.insert(start, (end, change));
        self.ranges.len() as isize - before
    }

    /// No range goes over this place.
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
        // What was there before is told first: it was no loss then, whatever came over it since.
        match self.before.verdict(by, at) {
            Verdict::Restore => since,
            before => before,
        }
    }

    /// `[start, end)` in parts that are all one.
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
    /// From now on changes are noted: there are clients that may have something to restore.
    pub fn start(&self) {
        self.is_noting.store(true, Ordering::Relaxed);
    }

    /// All have come back, or the grace period is over.
    pub fn stop(&self) {
        let mut state = self.state.lock();
        if self.is_noting.swap(false, Ordering::Relaxed) {
            state.forget_asked();
        }
    }

    /// A client asks for a change of a file; `written` is what is stored of it.
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

    /// That change gave these bytes other contents.
    pub fn changed(&self, ino: InodeNo, start: u64, end: u64) {
        if self.is_noting.load(Ordering::Relaxed) {
            let mut state = self.state.lock();
            Self::put(&mut state, ino, (start, end), OF_THIS_LIFE);
            self.bound(&mut state);
        }
    }

    /// By how many ranges there are more.
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

    /// What is to be done about a client's change of `[start, end)`. `now`: what is stored of the file, with what clients have asked
    /// this server for.
    ///
    /// # Errors
    /// Those of `now`.
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

    /// A client's change was made again.
    pub fn restored(&self, ino: InodeNo, (by, peer): (ClientChange, &PeerKey), start: u64, end: u64) {
        let mut state = self.state.lock();
        let more = Self::put(&mut state, ino, (start, end), by.change);
        state.charge(peer, more.max(0) as usize);
        self.bound(&mut state);
    }

    /// Files and ranges that are noted.
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
