//! What the kernel was told of files: which attributes they lack, and the age of the attributes that the kernel has.
//!
//! # Absent attributes
//! Most files have no ACLs, capabilities and set-id bits, and the kernel asks for them again and again: for `security.capability` before it permits a
//! write, and for ACLs at each access by a user who does not own the file. With every write of an unprivileged user it says that the file must not
//! keep its privileges (`FUSE_HANDLE_KILLPRIV_V2`), and the server takes them. A file's attributes tell which of these it has. So the absent ones are
//! remembered for as long as attributes may be cached, and the kernel is answered without a round trip. For that time a file may seem to lack an ACL,
//! capability or set-id bit that another client gave it, as with the kernel's own cached attributes.
//!
//! # The age of attributes
//! An open shows all changes of mounts that have closed the file (close-to-open), its length too. So for each file the change counter of the
//! attributes is kept that the kernel was told last. If an opened file has another counter, the kernel must forget its attributes.

use cuttlefs_common::attr::{Attr, InodeFlags};
use cuttlefs_common::ids::InodeNo;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The most files that are remembered. Beyond that all are forgotten, which costs one request for each.
const MAX_REMEMBERED: usize = 16 * 1024;

/// Attributes that a file may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lack {
    /// An access and a default ACL.
    Acls = 1,
    /// Capabilities.
    Capability = 2,
    /// Set-id bits and capabilities.
    Privileges = 4,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    lacks: u8,
    told: Instant,
    /// The change counter of the attributes that the kernel has. `None`: it was told several, and it is not known which came last.
    change: Option<u64>,
}

/// What the kernel was last told of files.
#[derive(Debug)]
pub(super) struct Lacking {
    keep: Duration,
    known: Mutex<HashMap<InodeNo, Known>>,
}

impl Lacking {
    /// Nothing is known yet. Remembers for `keep`; zero remembers nothing.
    pub(super) fn new(keep: Duration) -> Self {
        Self { keep, known: Mutex::new(HashMap::new()) }
    }

    /// Whether the file is known to lack these attributes.
    pub(super) fn is_known(&self, ino: InodeNo, lack: Lack) -> bool {
        if self.keep.is_zero() {
            return false;
        }
        let known = self.known.lock().get(&ino).copied();
        known.is_some_and(|known| known.lacks & lack as u8 != 0 && known.told.elapsed() < self.keep)
    }

    /// Whether the kernel's attributes of a file have this change counter. Also true if the kernel keeps no attributes.
    pub(super) fn has_told(&self, ino: InodeNo, change: u64) -> bool {
        self.keep.is_zero() || self.known.lock().get(&ino).is_some_and(|known| known.change == Some(change))
    }

    /// Notes attributes that the kernel is going to be told.
    pub(super) fn told(&self, attr: &Attr) {
        let has_acl = attr.flags.has_any(InodeFlags::ACCESS_ACL.with(InodeFlags::DEFAULT_ACL, true));
        let lacks = [
            (Lack::Acls, !has_acl),
            (Lack::Capability, !attr.flags.has(InodeFlags::CAPABILITY)),
            (Lack::Privileges, !attr.has_privileges()),
        ];
        let lacks = lacks.into_iter().filter(|(_, lacks)| *lacks).fold(0, |all, (lack, _)| all | lack as u8);
        self.remember(attr.ino, |known, change| {
            *known = lacks;
            // Of two answers at the same time it is not known which the kernel takes last.
            *change = Some(attr.change).filter(|told| change.is_none_or(|before| before <= *told));
        });
    }

    /// The server has taken the file's set-id bits and capabilities.
    pub(super) fn dropped(&self, ino: InodeNo) {
        self.remember(ino, |known, _| *known |= Lack::Privileges as u8 | Lack::Capability as u8);
    }

    /// A program of this mount may have given the file such attributes.
    pub(super) fn forget(&self, ino: InodeNo) {
        self.known.lock().remove(&ino);
    }

    fn remember(&self, ino: InodeNo, edit: impl FnOnce(&mut u8, &mut Option<u64>)) {
        if self.keep.is_zero() {
            return;
        }
        let mut known = self.known.lock();
        let before = known.get(&ino);
        let mut change = before.and_then(|known| known.change);
        let mut lacks =
            before.filter(|known| known.told.elapsed() < self.keep).map_or(0, |known| known.lacks);
        edit(&mut lacks, &mut change);
        if known.len() >= MAX_REMEMBERED {
            known.clear();
        }
        known.insert(ino, Known { lacks, told: Instant::now(), change });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attr(ino: u64, mode: u16, flags: InodeFlags) -> Attr {
        Attr { mode, flags, ..Attr::empty_file(InodeNo(ino)) }
    }

    #[test]
    fn a_file_lacks_what_its_attributes_do_not_tell() {
        let files = Lacking::new(Duration::from_secs(60));
        let of = |ino| {
            [Lack::Acls, Lack::Capability, Lack::Privileges].map(|lack| files.is_known(InodeNo(ino), lack))
        };
        assert_eq!(of(1), [false; 3]);
        files.told(&attr(1, 0o755, InodeFlags::default()));
        assert_eq!(of(1), [true; 3]);
        files.told(&attr(1, 0o2644, InodeFlags::ACCESS_ACL));
        assert_eq!(of(1), [false, true, false]);
        files.told(&attr(1, 0o644, InodeFlags::CAPABILITY));
        assert_eq!(of(1), [true, false, false]);
        files.dropped(InodeNo(1));
        assert_eq!(of(1), [true; 3]);
        files.forget(InodeNo(1));
        files.dropped(InodeNo(1));
        assert_eq!(of(1), [false, true, true]);
    }

    #[test]
    fn remembers_for_a_while_and_not_too_many() {
        let files = Lacking::new(Duration::from_secs(60));
        for ino in 0..MAX_REMEMBERED as u64 * 2 {
            files.dropped(InodeNo(ino));
            assert!(files.known.lock().len() <= MAX_REMEMBERED);
        }
        let never = Lacking::new(Duration::ZERO);
        never.dropped(InodeNo(1));
        assert!(!never.is_known(InodeNo(1), Lack::Privileges));
    }
}
