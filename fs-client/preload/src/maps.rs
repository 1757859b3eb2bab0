//! The files that this process maps, or has mapped, for shared writing. What it stores there is the kernel's until it is written back, and a read(2) of
//! the process sees it at once: so their reads stay with the kernel for good.
//!
//! # Bound
//! [`MAPPED_MAX`] files; with one more, every file counts as mapped.

use crate::descriptor::FileId;
use parking_lot::RwLock;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};

/// The most files that are remembered.
const MAPPED_MAX: usize = 4096;

/// The files; see the module.
#[derive(Default)]
pub(crate) struct Mapped {
    files: RwLock<HashSet<FileId>>,
    /// Whether any file is mapped (release; acquire).
    any: AtomicBool,
    /// Whether there were too many (release; acquire).
    all: AtomicBool,
}

impl Mapped {
    /// The file is about to be mapped.
    pub(crate) fn add(&self, id: FileId) {
        let mut files = self.files.write();
        if files.len() >= MAPPED_MAX {
            self.all.store(true, Ordering::Release);
        } else {
            files.insert(id);
        }
        self.any.store(true, Ordering::Release);
    }

    /// Whether a thread is in the middle of a look or a change.
    pub(crate) fn is_locked(&self) -> bool {
        self.files.is_locked()
    }

    /// Whether the file counts as mapped.
    pub(crate) fn has(&self, id: FileId) -> bool {
        self.any.load(Ordering::Acquire)
            && (self.all.load(Ordering::Acquire) || self.files.read().contains(&id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beyond_the_bound_every_file_counts_as_mapped() {
        let mapped = Mapped::default();
        let id = |ino| FileId { device: (0, 1), ino };
        assert!(!mapped.has(id(0)));
        (0..MAPPED_MAX as u64).for_each(|ino| mapped.add(id(ino)));
        assert!(mapped.has(id(5)) && !mapped.has(id(1 << 40)));
        mapped.add(id(1 << 41));
        assert!(mapped.has(id(1 << 40)));
    }
}
