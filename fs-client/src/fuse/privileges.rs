//! What a write takes from a file: set-id bits and capabilities.
//!
//! The kernel sees to both where it writes through its page cache: it asks for `security.capability` before *every* write,
//! without remembering the answer, and sends a setattr where there are set-id bits. A write past its cache
//! (`FOPEN_DIRECT_IO`) it leaves to us: it says with `FUSE_WRITE_KILL_SUIDGID` that the writer must not keep them.
//!
//! So what files lack is remembered for as long as attributes may be cached: a write would cost a second round trip to the server
//! otherwise. That long a file that another client gave one of these to may keep it past a write here, as with the kernel's
//! own cached attributes.

use super::xattr_names::CAPABILITY;
use crate::file::volume::{Caller, FsError, Volume};
use cuttlefs_common::attr::{FileKind, SetAttr};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::status::Status;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Files remembered; when there are more, all are forgotten, which costs one question each.
const MAX_REMEMBERED: usize = 16 * 1024;
/// Run as the owner.
const SET_UID: u16 = 0o4000;
/// Run with the group, if the group may run it; without that it has meant mandatory locks.
const SET_GID: u16 = 0o2000;
const GROUP_MAY_RUN: u16 = 0o010;

/// Files known to have no privileges to lose.
#[derive(Debug)]
pub(super) struct Unprivileged {
    /// Without capabilities.
    pub(super) no_capabilities: Lacking,
    /// Without set-id bits.
    pub(super) no_set_ids: Lacking,
}

impl Unprivileged {
    /// Remembers for `keep`; zero remembers nothing.
    pub(super) fn new(keep: Duration) -> Self {
        Self { no_capabilities: Lacking::new(keep), no_set_ids: Lacking::new(keep) }
    }

    /// Takes from a file what somebody who is not privileged himself must not leave on it when he writes; whether its mode
    /// is another one now.
    ///
    /// # Errors
    /// As of the requests; then nothing may be written.
    pub(super) fn take<V: Volume + ?Sized>(
        &self,
        volume: &V,
        caller: &Caller,
        ino: InodeNo,
    ) -> Result<bool, FsError> {
        let mut is_changed = false;
        if !self.no_set_ids.contains(ino) {
            let attr = volume.get_attr(caller, ino)?;
            let mode = without_set_ids(attr.mode);
            if attr.kind == FileKind::File && mode != attr.mode {
                volume.set_attr(caller, ino, SetAttr { mode: Some(mode), ..SetAttr::default() })?;
                is_changed = true;
            }
            self.no_set_ids.insert(ino);
        }
        if !self.no_capabilities.contains(ino) {
            match volume.remove_xattr(caller, ino, CAPABILITY) {
                Ok(()) | Err(FsError::Server(Status::NoAttribute)) => self.no_capabilities.insert(ino),
                Err(error) => return Err(error),
            }
        }
        Ok(is_changed)
    }
}

/// Permission bits after a write of somebody unprivileged, as Linux's `setattr_should_drop_suidgid`.
fn without_set_ids(mode: u16) -> u16 {
    let mode = mode & !SET_UID;
    if mode & GROUP_MAY_RUN == 0 { mode } else { mode & !SET_GID }
}

/// Files that lacked something when last asked.
#[derive(Debug)]
pub(super) struct Lacking {
    keep: Duration,
    asked: Mutex<HashMap<InodeNo, Instant>>,
}

impl Lacking {
    /// Remembers for `keep`; zero remembers nothing.
    pub(super) fn new(keep: Duration) -> Self {
        Self { keep, asked: Mutex::new(HashMap::new()) }
    }

    /// Whether the file is known to lack it.
    pub(super) fn contains(&self, ino: InodeNo) -> bool {
        if self.keep.is_zero() {
            return false;
        }
        let mut asked = self.asked.lock();
        match asked.get(&ino) {
            Some(when) if when.elapsed() < self.keep => true,
            Some(_) => {
                asked.remove(&ino);
                false
            }
            None => false,
        }
    }

    /// The server said that the file has none of it.
    pub(super) fn insert(&self, ino: InodeNo) {
        if self.keep.is_zero() {
            return;
        }
        let mut asked = self.asked.lock();
        if asked.len() >= MAX_REMEMBERED {
            asked.clear();
        }
        asked.insert(ino, Instant::now());
    }

    /// Someone here may have given it to the file.
    pub(super) fn remove(&self, ino: InodeNo) {
        self.asked.lock().remove(&ino);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_of_a_mode() {
        for (before, after) in
            [(0o6644, 0o2644), (0o6744, 0o2744), (0o6654, 0o654), (0o6754, 0o754), (0o1777, 0o1777)]
        {
            assert_eq!(without_set_ids(before), after, "{before:o}");
        }
    }

    #[test]
    fn remembers_for_a_while_and_not_too_many() {
        let known = Lacking::new(Duration::from_secs(60));
        known.insert(InodeNo(1));
        assert!(known.contains(InodeNo(1)));
        known.remove(InodeNo(1));
        assert!(!known.contains(InodeNo(1)));
        for ino in 0..MAX_REMEMBERED as u64 * 2 {
            known.insert(InodeNo(ino));
            assert!(known.asked.lock().len() <= MAX_REMEMBERED);
        }
        let never = Lacking::new(Duration::ZERO);
        never.insert(InodeNo(1));
        assert!(!never.contains(InodeNo(1)));
    }
}
