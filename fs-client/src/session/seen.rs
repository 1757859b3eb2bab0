//! The last change counters that this mount saw of files. They tell whether the kernel's cached pages are good at the
//! next open (close-to-open consistency).

use cuttlefs_common::ids::InodeNo;
use parking_lot::Mutex;
use std::collections::HashMap;

/// The most inodes that are remembered. Beyond that all are forgotten, which costs cached pages, not correctness.
const CAPACITY: usize = 65_536;

/// Change counters by inode.
#[derive(Debug, Default)]
pub(crate) struct SeenChanges {
    seen: Mutex<HashMap<InodeNo, u64>>,
}

impl SeenChanges {
    /// A file was opened at this counter. Returns whether only this mount has changed it since the counter was last seen.
    pub(crate) fn opened(&self, ino: InodeNo, change: u64) -> bool {
        let mut seen = self.seen.lock();
        if seen.len() >= CAPACITY {
            seen.clear();
        }
        seen.insert(ino, change) == Some(change)
    }

    /// This mount's own change moved the counter. If another client's change fell in between, the cached pages are not good any more.
    pub(crate) fn changed_by_us(&self, ino: InodeNo, change: u64) {
        let mut seen = self.seen.lock();
        if let Some(last) = seen.get_mut(&ino) {
            if *last + 1 == change {
                *last = change;
            } else {
                seen.remove(&ino);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_changes_keep_the_cache_and_others_drop_it() {
        let seen = SeenChanges::default();
        let ino = InodeNo(7);
        assert!(!seen.opened(ino, 5), "never seen");
        assert!(seen.opened(ino, 5));
        seen.changed_by_us(ino, 6);
        assert!(seen.opened(ino, 6));
        assert!(!seen.opened(ino, 8), "somebody else wrote");
        seen.changed_by_us(ino, 10);
        assert!(!seen.opened(ino, 10), "somebody else's change fell between");
    }
}
