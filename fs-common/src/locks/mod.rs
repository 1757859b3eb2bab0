//! Advisory locks: the locked bytes of a file, and the mode of each lock. Server and client have lists of the same type: the server one of all
//! clients' locks, a client one of its own, so that it can reclaim them after a restart of the server.
//!
//! There are two spaces of locks, which do not see each other, as on Linux's local file systems: ranges of bytes (fcntl(2),
//! traditional and of open file descriptions) and whole files (flock(2)). A list holds those of one file in one space.
//!
//! # Invariants of a list
//! * Locks of two holders that overlap are both shared: the setter of a lock looks for a conflict first.
//! * Locks of one holder do not overlap, and those of one mode do not touch: they are one lock.

mod intervals;

pub use intervals::{Intervals, Overlapping};

use crate::ids::MAX_FILE_SIZE;
use serde::{Deserialize, Serialize};

/// The last byte a lock can cover: `OFFSET_MAX` of the kernel, which stands for "to the end, wherever that will be".
pub const LOCK_END: u64 = MAX_FILE_SIZE;

/// Who holds a lock within a client: the kernel's number for a process (fcntl) or an open file description (flock, and
/// fcntl's `F_OFD_SETLK`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LockOwner(pub u64);

/// A client's name for one request for a lock, by which the client is told how the wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct WaitId(pub u64);

/// The kinds of locks that do not see each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum LockSpace {
    /// fcntl(2): ranges of bytes.
    Ranges,
    /// flock(2): the whole file.
    Whole,
}

/// How a lock excludes others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum LockMode {
    /// Others may hold shared locks.
    Shared,
    /// No other holder has any lock.
    Exclusive,
}

/// Bytes of a file, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LockRange {
    /// The first byte.
    pub first: u64,
    /// The last byte; [`LOCK_END`]: to the end, wherever that will be.
    pub last: u64,
}

impl LockRange {
    /// All bytes that a lock can cover.
    pub const WHOLE: Self = Self { first: 0, last: LOCK_END };

    /// Whether the range is not empty, and ends at `LOCK_END` or before.
    pub fn is_valid(&self) -> bool {
        self.first <= self.last && self.last <= LOCK_END
    }

    /// Whether the two overlap, or one begins where the other ends. Neither ends past `LOCK_END`, so adding one does not overflow.
    #[cfg(test)]
    fn touches(&self, other: &Self) -> bool {
        self.first <= other.last + 1 && other.first <= self.last + 1
    }

    fn contains(&self, other: &Self) -> bool {
        self.first <= other.first && other.last <= self.last
    }
}

/// A lock that somebody in a client holds or asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lock {
    /// Its space.
    pub space: LockSpace,
    /// Who holds it or asks for it.
    pub owner: LockOwner,
    /// Its bytes.
    pub range: LockRange,
    /// Its mode.
    pub mode: LockMode,
    /// The process that asked, for `F_GETLK`.
    pub pid: u32,
}

/// A lock in a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldLock<H> {
    /// Its holder.
    pub holder: H,
    /// Its bytes.
    pub range: LockRange,
    /// Its mode.
    pub mode: LockMode,
    /// The process that asked last for a part of the lock.
    pub pid: u32,
}

/// The locks on one file in one space, in the order of their first bytes.
#[derive(Clone, Debug)]
pub struct LockList<H> {
    held: Intervals<H, HeldLock<H>>,
}

impl<H> Default for LockList<H> {
    fn default() -> Self {
        Self { held: Intervals::default() }
    }
}

impl<H: Copy + Ord> LockList<H> {
    /// The number of locks.
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether there is no lock.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// All locks.
    pub fn iter(&self) -> impl Iterator<Item = &HeldLock<H>> {
        self.held.iter()
    }

    /// The locks that conflict with one that `holder` asks for.
    pub fn conflicts(
        &self,
        holder: H,
        range: LockRange,
        mode: LockMode,
    ) -> impl Iterator<Item = &HeldLock<H>> {
        self.held.overlapping(range).filter(move |held| {
            held.holder != holder && (mode == LockMode::Exclusive || held.mode == LockMode::Exclusive)
        })
    }

    /// The locks of this holder that overlap a range.
    pub fn own(&self, holder: H, range: LockRange) -> impl Iterator<Item = &HeldLock<H>> {
        self.held.overlapping(range).filter(move |held| held.holder == holder)
    }

    /// Whether `holder` has the whole range locked in exactly this mode.
    pub fn holds(&self, holder: H, range: LockRange, mode: LockMode) -> bool {
        self.own(holder, range).any(|held| held.mode == mode && held.range.contains(&range))
    }

    /// Whether unlocking the range would split a lock of the holder in two.
    pub fn would_split(&self, holder: H, range: LockRange) -> bool {
        self.own(holder, range).any(|held| held.range.first < range.first && range.last < held.range.last)
    }

    /// Unlocks a range for a holder; returns whether it had locks there.
    pub fn clear(&mut self, holder: H, range: LockRange) -> bool {
        let given_up: Vec<HeldLock<H>> = self.own(holder, range).copied().collect();
        for held in &given_up {
            self.remove(held);
            if held.range.first < range.first {
                self.insert(HeldLock { range: LockRange { last: range.first - 1, ..held.range }, ..*held });
            }
            if held.range.last > range.last {
                self.insert(HeldLock { range: LockRange { first: range.last + 1, ..held.range }, ..*held });
            }
        }
        !given_up.is_empty()
    }

    /// Sets a lock, which must conflict with none, in place of its holder's locks there. The list grows by two at most. Returns whether others may
    /// get a lock now that they could not get before: the holder now shares bytes that it had exclusively.
    pub fn set(&mut self, lock: HeldLock<H>) -> bool {
        let had_alone = |held: &HeldLock<H>| held.mode == LockMode::Exclusive;
        let shares = lock.mode == LockMode::Shared && self.own(lock.holder, lock.range).any(had_alone);
        self.clear(lock.holder, lock.range);
        let mut lock = lock;
        let beside = LockRange { first: lock.range.first.saturating_sub(1), last: lock.range.last + 1 };
        let joins = |held: &&HeldLock<H>| held.mode == lock.mode;
        let joined: Vec<HeldLock<H>> = self.own(lock.holder, beside).filter(joins).copied().collect();
        for held in joined {
            self.remove(&held);
            lock.range.first = lock.range.first.min(held.range.first);
            lock.range.last = lock.range.last.max(held.range.last);
        }
        self.insert(lock);
        shares
    }

    /// Removes all locks of these holders, and returns how many.
    pub fn clear_of(&mut self, whose: impl Fn(H) -> bool) -> usize {
        let given_up: Vec<HeldLock<H>> = self.iter().filter(|held| whose(held.holder)).copied().collect();
        given_up.iter().for_each(|held| self.remove(held));
        given_up.len()
    }

    fn insert(&mut self, lock: HeldLock<H>) {
        self.held.insert(lock.range, lock.holder, lock);
    }

    fn remove(&mut self, lock: &HeldLock<H>) {
        self.held.remove(lock.range.first, &lock.holder).expect("it was found in the list");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Bytes of the model's file. The last one stands for all bytes from there to the end.
    const BYTES: u64 = 12;

    /// For each of four holders, the mode in which it has each byte locked.
    type Model = [[Option<LockMode>; BYTES as usize]; 4];

    fn range(first: u64, last: u64) -> LockRange {
        LockRange { first, last: if last == BYTES - 1 { LOCK_END } else { last } }
    }

    fn bytes(range: LockRange) -> std::ops::RangeInclusive<usize> {
        range.first as usize..=range.last.min(BYTES - 1) as usize
    }

    fn mode() -> impl Strategy<Value = LockMode> {
        prop_oneof![Just(LockMode::Shared), Just(LockMode::Exclusive)]
    }

    fn steps() -> impl Strategy<Value = Vec<(usize, LockRange, Option<LockMode>)>> {
        let ends = (0..BYTES, 0..BYTES).prop_map(|(a, b)| range(a.min(b), a.max(b)));
        proptest::collection::vec((0..4usize, ends, proptest::option::of(mode())), 1..60)
    }

    /// Checks the invariants of the list, and that it agrees with the model for each byte.
    fn compare(list: &LockList<usize>, model: &Model) -> Result<(), TestCaseError> {
        let mut seen: Model = Default::default();
        for held in list.iter() {
            prop_assert!(held.range.is_valid());
            for byte in bytes(held.range) {
                prop_assert_eq!(seen[held.holder][byte], None, "locks of one holder overlap");
                seen[held.holder][byte] = Some(held.mode);
            }
            for other in list.iter().filter(|other| *other != held) {
                let alike = other.holder == held.holder && other.mode == held.mode;
                prop_assert!(!(alike && other.range.touches(&held.range)), "two that are one");
            }
        }
        prop_assert_eq!(&seen, model);
        Ok(())
    }

    proptest! {
        /// Sets locks without a conflict, upgrades, downgrades and unlocks parts, in a list and in an array of bytes, which must agree.
        #[test]
        fn a_list_is_what_an_array_of_bytes_says(steps in steps()) {
            let (mut list, mut model) = (LockList::default(), Model::default());
            for (holder, range, mode) in steps {
                let before = list.len();
                let Some(mode) = mode else {
                    let splits = list.would_split(holder, range);
                    let had = bytes(range).any(|byte| model[holder][byte].is_some());
                    prop_assert_eq!(list.clear(holder, range), had);
                    prop_assert!(list.len() <= before + usize::from(splits));
                    bytes(range).for_each(|byte| model[holder][byte] = None);
                    compare(&list, &model)?;
                    continue;
                };
                let in_the_way = (0..4).filter(|other| *other != holder).any(|other| {
                    bytes(range).any(|byte| match model[other][byte] {
                        Some(LockMode::Exclusive) => true,
                        Some(LockMode::Shared) => mode == LockMode::Exclusive,
                        None => false,
                    })
                });
                prop_assert_eq!(list.conflicts(holder, range, mode).next().is_some(), in_the_way);
                let held = bytes(range).all(|byte| model[holder][byte] == Some(mode));
                prop_assert_eq!(list.holds(holder, range, mode), held);
                if !in_the_way {
                    list.set(HeldLock { holder, range, mode, pid: 1 });
                    prop_assert!(list.len() <= before + 2);
                    bytes(range).for_each(|byte| model[holder][byte] = Some(mode));
                    compare(&list, &model)?;
                }
            }
        }
    }

    #[test]
    fn ranges_at_the_edges() {
        assert!(LockRange::WHOLE.is_valid());
        for (first, last) in [(1, 0), (0, LOCK_END + 1), (u64::MAX, u64::MAX), (LOCK_END + 1, LOCK_END + 1)] {
            assert!(!LockRange { first, last }.is_valid());
        }
        let end = LockRange { first: LOCK_END, last: LOCK_END };
        let mut list = LockList::default();
        list.set(HeldLock { holder: 1, range: end, mode: LockMode::Shared, pid: 1 });
        let before = LockRange { first: 0, last: LOCK_END - 1 };
        list.set(HeldLock { holder: 1, range: before, mode: LockMode::Shared, pid: 2 });
        assert_eq!(list.len(), 1);
        assert!(list.holds(1, LockRange::WHOLE, LockMode::Shared));
    }
}
