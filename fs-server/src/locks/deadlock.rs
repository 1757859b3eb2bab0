//! Who waits for whom: whether one more wait would close a circle (EDEADLK of fcntl(2)).
//!
//! A holder that is a process with several threads, or an open file description, may have a thread that is free to give
//! the lock up; like the kernel's, this detection does not know, and calls that a deadlock, too.

use super::Holder;
use super::table::FileId;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::locks::{Lock, LockMode, LockRange, LockSpace};
use std::collections::{HashMap, HashSet};

/// Holders one look goes through; longer chains count as no deadlock. The kernel stops after ten.
const HOLDERS_MAX: usize = 1000;

/// What each holder waits for. flock's waits are not here.
#[derive(Default)]
pub(super) struct Waiting {
    by_holder: HashMap<Holder, Vec<(InodeNo, LockRange, LockMode)>>,
}

impl Waiting {
    pub(super) fn add(&mut self, (ino, space): FileId, holder: Holder, lock: &Lock) {
        if space == LockSpace::Ranges {
            self.by_holder.entry(holder).or_default().push((ino, lock.range, lock.mode));
        }
    }

    pub(super) fn remove(&mut self, (ino, space): FileId, holder: Holder, lock: &Lock) {
        if space != LockSpace::Ranges {
            return;
        }
        if let Some(waits) = self.by_holder.get_mut(&holder) {
            if let Some(at) = waits.iter().position(|wait| *wait == (ino, lock.range, lock.mode)) {
                waits.swap_remove(at);
            }
            if waits.is_empty() {
                self.by_holder.remove(&holder);
            }
        }
    }

    /// Whether one of `from` waits, be it over others, for what `target` holds. `conflicts` says who is in the way of a
    /// holder's lock.
    pub(super) fn reaches(
        &self,
        from: Vec<Holder>,
        target: Holder,
        conflicts: impl Fn(InodeNo, Holder, LockRange, LockMode) -> Vec<Holder>,
    ) -> bool {
        let mut next = from;
        let mut seen = HashSet::new();
        while let Some(holder) = next.pop() {
            if holder == target {
                return true;
            }
            if seen.len() >= HOLDERS_MAX || !seen.insert(holder) {
                continue;
            }
            for &(ino, range, mode) in self.by_holder.get(&holder).into_iter().flatten() {
                next.extend(conflicts(ino, holder, range, mode));
            }
        }
        false
    }
}
