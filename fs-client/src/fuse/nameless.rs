//! Opens of files that no name leads to any more.
//!
//! The kernel keeps names for as long as entries may be cached, and opens what a name led to by its inode. If somebody else removed
//! that name, or put another file in its place, the inode may still be there, for whoever has it open: to open it
//! would read, or roll back, what others have done away with. So such an open is refused with `ESTALE`, upon which the kernel looks the name up
//! afresh, once, and opens what it finds.
//!
//! A file can be opened without a name, too, through `/proc/PID/fd`. The kernel then has no name to look up, and the same thread asks to
//! open the same inode again at once. That is how the two are told apart: who was refused, and asks again, gets it.
//!
//! # Bound
//! [`MOST`] threads; beyond that all are forgotten, which refuses opens through `/proc` that were under way.

use cuttlefs_common::ids::InodeNo;
use parking_lot::Mutex;
use std::collections::HashMap;

/// Threads remembered.
const MOST: usize = 1024;
/// What the kernel says of threads of a container that this process cannot see into. They cannot be told apart, so none of them gets a file
/// without a name.
const UNKNOWN: u32 = 0;

/// By thread, the inode that it was refused last.
#[derive(Debug, Default)]
pub(super) struct NamelessOpens {
    refused: Mutex<HashMap<u32, InodeNo>>,
}

impl NamelessOpens {
    /// A thread asks to open an inode. `true`: it was refused that just now, and asks again without looking a name up.
    pub(super) fn is_asked_again(&self, thread: u32, ino: InodeNo) -> bool {
        let mut refused = self.refused.lock();
        !refused.is_empty() && refused.remove(&thread) == Some(ino)
    }

    /// It was refused.
    pub(super) fn note_refused(&self, thread: u32, ino: InodeNo) {
        if thread == UNKNOWN {
            return;
        }
        let mut refused = self.refused.lock();
        if refused.len() >= MOST {
            refused.clear();
        }
        refused.insert(thread, ino);
    }

    /// The thread looks a name up: what it opens next is what that leads to.
    pub(super) fn note_lookup(&self, thread: u32) {
        let mut refused = self.refused.lock();
        if !refused.is_empty() {
            refused.remove(&thread);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_inode_is_asked_again_at_once_by_the_same_thread() {
        let opens = NamelessOpens::default();
        let (one, other) = (InodeNo(7), InodeNo(8));
        assert!(!opens.is_asked_again(1, one));
        opens.note_refused(1, one);
        assert!(!opens.is_asked_again(2, one), "another thread");
        assert!(opens.is_asked_again(1, one));
        assert!(!opens.is_asked_again(1, one), "that was answered");
        opens.note_refused(1, one);
        assert!(!opens.is_asked_again(1, other), "another file");
        assert!(!opens.is_asked_again(1, one), "not at once");
        opens.note_refused(1, one);
        opens.note_lookup(1);
        assert!(!opens.is_asked_again(1, one), "it came by a name");
        opens.note_refused(UNKNOWN, one);
        assert!(!opens.is_asked_again(UNKNOWN, one), "it may be another thread");
        for thread in 1..=1 + MOST as u32 {
            opens.note_refused(thread, one);
        }
        assert_eq!(opens.refused.lock().len(), 1);
    }
}
