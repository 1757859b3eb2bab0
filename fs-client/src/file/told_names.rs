//! How old the names are that the kernel remembers: of each file the change counter it had when a name was last looked up.
//!
//! The kernel opens by number what a name meant up to a second ago. Others may have moved the file since: then that open would read, cut
//! or write what has another name by now. So an open says what the kernel was told, and the server refuses it (`Stale`) if the file has lost
//! a name since. The kernel looks the name up again then.
//!
//! Directories are not noted: names below them are asked for in them, wherever they are by now.

use cuttlefs_common::attr::{Attr, FileKind};
use cuttlefs_common::ids::InodeNo;
use parking_lot::Mutex;
use std::collections::HashMap;

/// Files remembered; beyond that all are forgotten, and opened as they were before somebody moved them, for a second.
const CAPACITY: usize = 65_536;

/// Change counters by inode.
#[derive(Debug, Default)]
pub(crate) struct ToldNames {
    told: Mutex<HashMap<InodeNo, u64>>,
}

impl ToldNames {
    /// A name was looked up, and this is what it means.
    pub(crate) fn told(&self, attr: &Attr) {
        if attr.kind != FileKind::File {
            return;
        }
        let mut told = self.told.lock();
        if told.len() >= CAPACITY {
            told.clear();
        }
        told.insert(attr.ino, attr.change);
    }

    /// What was told last; 0: nothing is known.
    pub(crate) fn of(&self, ino: InodeNo) -> u64 {
        self.told.lock().get(&ino).copied().unwrap_or(0)
    }

    /// Whatever becomes of its names now, the next open is of what was looked up.
    pub(crate) fn forget(&self, ino: InodeNo) {
        self.told.lock().remove(&ino);
    }
}
