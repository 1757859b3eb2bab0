//! The graph of waiters and holders: it tells whether one more wait would close a circle (EDEADLK of fcntl(2)).
//!
//! A holder that is a process with several threads, or an open file description, may have another thread that can give the lock up. This detection
//! does not know that, like the kernel's, and calls it a deadlock, too.

use super::Holder;
use super::table::{File, FileId};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::locks::{Lock, LockMode, LockRange, LockSpace};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Locks that one search goes through. If more locks are in the way, it finds no deadlock. The kernel stops after ten holders.
const LOCKS_LOOKED_AT_MAX: usize = 10_000;

type Wanted = (InodeNo, LockRange, LockMode);

/// The range locks that each holder waits for, by the number of the wait. flock has no deadlock detection.
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

    /// Whether a holder in the way of a lock that `holder` wants waits, directly or over other holders, for a lock of `holder`.
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
