//! Which extended attributes exist on a mount, and which files are known to have no capabilities.
//!
//! `user.`, `trusted.` and `security.` are kept as they come; the kernel checks who may touch them. `system.` is
//! refused: its only names in use are POSIX ACLs, and keeping an ACL that nobody enforces would be worse than
//! saying that there are none.
//!
//! The kernel asks for `security.capability` before *every* write (it must drop capabilities from a file that is
//! written), and does not remember the answer. So the edge does, for as long as attributes may be cached: a write
//! would cost a second round trip to the server otherwise.

use cuttlefs_common::ids::InodeNo;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The attribute that holds a file's capabilities.
pub(super) const CAPABILITY: &[u8] = b"security.capability";
/// Files remembered; when there are more, all are forgotten, which costs one question each.
const MAX_REMEMBERED: usize = 16 * 1024;

/// Whether an attribute of this name can exist here.
pub(super) fn is_supported(name: &[u8]) -> bool {
    [&b"user."[..], b"trusted.", b"security."]
        .into_iter()
        .any(|prefix| name.len() > prefix.len() && name.starts_with(prefix))
}

/// Files that had no capabilities when last asked.
#[derive(Debug)]
pub(super) struct NoCapabilities {
    keep: Duration,
    asked: Mutex<HashMap<InodeNo, Instant>>,
}

impl NoCapabilities {
    /// Remembers for `keep`; zero remembers nothing.
    pub(super) fn new(keep: Duration) -> Self {
        Self { keep, asked: Mutex::new(HashMap::new()) }
    }

    /// Whether the file is known to have none.
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

    /// The server said that the file has none.
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

    /// Someone here sets the file's attributes.
    pub(super) fn remove(&self, ino: InodeNo) {
        self.asked.lock().remove(&ino);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaces() {
        for name in [&b"user.a"[..], b"trusted.x", b"security.capability"] {
            assert!(is_supported(name));
        }
        for name in [&b"system.posix_acl_access"[..], b"user.", b"user", b"", b"bogus.x"] {
            assert!(!is_supported(name));
        }
    }

    #[test]
    fn remembers_for_a_while_and_not_too_many() {
        let known = NoCapabilities::new(Duration::from_secs(60));
        known.insert(InodeNo(1));
        assert!(known.contains(InodeNo(1)));
        known.remove(InodeNo(1));
        assert!(!known.contains(InodeNo(1)));
        for ino in 0..MAX_REMEMBERED as u64 * 2 {
            known.insert(InodeNo(ino));
            assert!(known.asked.lock().len() <= MAX_REMEMBERED);
        }
        let never = NoCapabilities::new(Duration::ZERO);
        never.insert(InodeNo(1));
        assert!(!never.contains(InodeNo(1)));
    }
}
