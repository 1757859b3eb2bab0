//! Which files have early writes that were acknowledged and are not known to be executed.

use cuttlefs_common::ids::InodeNo;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts by file. Bounded by what the rings take.
#[derive(Debug, Default)]
pub(super) struct Unexecuted {
    /// All of them. A write is added before it is acknowledged, so whoever knows of it reads no older count. Taken off with
    /// release and read with acquire: who finds none sees what their answers said.
    total: AtomicU64,
    files: Mutex<HashMap<InodeNo, u32>>,
}

impl Unexecuted {
    /// Whether there are any: one load, which every request pays.
    pub(super) fn any(&self) -> bool {
        self.total.load(Ordering::Acquire) > 0
    }

    /// Whether this file has any.
    pub(super) fn has(&self, ino: InodeNo) -> bool {
        self.files.lock().contains_key(&ino)
    }

    /// A write is going to be acknowledged.
    pub(super) fn add(&self, ino: InodeNo) {
        *self.files.lock().entry(ino).or_default() += 1;
        self.total.fetch_add(1, Ordering::Relaxed);
    }

    /// A write was executed, or is given up; what that means for its file has been noted.
    pub(super) fn remove(&self, ino: InodeNo) {
        let mut files = self.files.lock();
        let count = files.get_mut(&ino).expect("it was added");
        *count -= 1;
        if *count == 0 {
            files.remove(&ino);
        }
        drop(files);
        self.total.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_write_counts_for_its_file() {
        let unexecuted = Unexecuted::default();
        let (one, other) = (InodeNo(5), InodeNo(6));
        assert!(!unexecuted.any());
        unexecuted.add(one);
        unexecuted.add(other);
        unexecuted.add(one);
        unexecuted.remove(one);
        assert!(unexecuted.has(one) && unexecuted.has(other) && !unexecuted.has(InodeNo(7)));
        unexecuted.remove(one);
        assert!(!unexecuted.has(one) && unexecuted.has(other) && unexecuted.any());
        unexecuted.remove(other);
        assert!(!unexecuted.has(other) && !unexecuted.any());
        assert!(unexecuted.files.lock().is_empty(), "nothing is remembered of files without any");
    }
}
