//! The graph of waiters and holders: whether one more wait would close a circle (EDEADLK of fcntl(2)).
//!
//! A holder that is a process with several threads, or an open file description, may have a thread that is free to give
//! the lock up; like the kernel's, this detection does not know, and calls that a deadlock, too.

use super::Holder;
use super::table::{File, FileId};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::locks::{Lock, LockMode, LockRange, LockSpace};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Locks one look goes through; where more are in the way, one behind the other, that is no deadlock. The kernel stops after ten
/// holders.
const LOCKS_LOOKED_AT_MAX: usize = 10_000;

type Wanted = (InodeNo, LockRange, LockMode);

/// What each holder waits for, by the number of the wait. flock's waits are not here.
#[derive(Default)]
pub(super) struct Waiting {
    by_holder: HashMap<Holder, BTreeMap<u64, Wanted>>,
}

impl Waiting {
    pub(super) fn add(&mut self, (ino, space): FileId, holder: Holder, arrival: u64, lock: &Lock) {
        if space == LockSpace::Ranges {
            self.by_holder.entry(holder).or_default().insert(arrival, (ino, lock.range, lock.mode));
        }
    }

    pub(super) fn remove(&mut self, holder: Holder, arrival: u64) {
        if let Some(waits) = self.by_holder.get_mut(&holder) {
            waits.remove(&arrival);
            if waits.is_empty() {
                self.by_holder.remove(&holder);
            }
        }
    }

    /// Whether somebody who is in the way of a lock that `holder` wants waits, be it over others, for what `holder` has.
    pub(super) fn closes_circle(
        &self,
        holder: Holder,
        wanted: Wanted,
        files: &BTreeMap<FileId, File>,
    ) -> bool {
        let mut next = vec![(holder, wanted)];
        let mut seen = HashSet::from([holder]);
        let mut left = LOCKS_LOOKED_AT_MAX;
        while let Some((waiter, (ino, range, mode))) = next.pop() {
            let Some(file) = files.get(&(ino, LockSpace::Ranges)) else {
                continue;
            };
            for held in file.held.conflicts(waiter, range, mode) {
                if held.holder == holder {
                    return true;
                }
                if left == 0 {
                    return false;
                }
                left -= 1;
                if seen.insert(held.holder) {
                    let waits = self.by_holder.get(&held.holder).into_iter().flat_map(BTreeMap::values);
                    next.extend(waits.map(|wanted| (held.holder, *wanted)));
                }
            }
        }
        false
    }
}
