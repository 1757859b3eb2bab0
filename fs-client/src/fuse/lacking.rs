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
//! An open shows all changes of mounts that have closed the file (close-to-open), its length too, and so does a granted lock for those that the holder
//! before made. So an opened or locked file has a change counter, and the kernel must forget attributes that may be older.
//!
//! The kernel asks for attributes in many threads, and throws an answer away if the attributes have changed since it asked: by another answer, by a
//! write, or because it was made to forget them. The read that asked goes on with the length that is there. So:
//!
//! * **Of several answers it may have any.** It has attributes of a counter for certain only if all answers since it was last made to forget were of it.
//! * **It must not forget without need**, or a read under a lock is short. Attributes that it has asked for since it was made to forget are not older
//!   than that: so the counter at which that was is kept, and for this or an earlier one it is not made to forget again.
//!
//! What is left is a read that asks while another client changes the file and a further program opens it, or writes it: not under a lock of the whole
//! file.

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
    told: Option<Instant>,
    age: Age,
    /// The change counter of the file when the kernel was last made to forget its attributes: those that it has since are not older.
    forgot: Option<u64>,
}

/// The change counters of the attributes that the kernel was told since it was made to forget them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Age {
    Untold,
    All(u64),
    Several,
}

impl Known {
    const NOTHING: Self = Self { lacks: 0, told: None, age: Age::Untold, forgot: None };
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
        known.is_some_and(|known| {
            known.lacks & lack as u8 != 0 && known.told.is_some_and(|told| told.elapsed() < self.keep)
        })
    }

    /// An opened or locked file has this change counter: has the kernel `forget` its attributes, if they may be older. Who comes at the same time waits
    /// until it has.
    pub(super) fn forget_older(&self, ino: InodeNo, change: u64, forget: impl FnOnce()) {
        if self.keep.is_zero() {
            // The kernel keeps none.
            return;
        }
        let mut known = self.known.lock();
        let before = known.get(&ino).copied().unwrap_or(Known::NOTHING);
        // Counters only grow, and requests are answered in any order: one of before needs nothing.
        let is_told = matches!(before.age, Age::All(told) if told >= change);
        if !is_told && before.forgot.is_none_or(|forgot| forgot < change) {
            forget();
            Self::insert(&mut known, ino, Known { age: Age::Untold, forgot: Some(change), ..before });
        }
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
        self.remember(attr.ino, |known, age| {
            *known = lacks;
            *age = match *age {
                Age::Untold => Age::All(attr.change),
                Age::All(change) if change == attr.change => *age,
                Age::All(_) | Age::Several => Age::Several,
            };
        });
    }

    /// The server has taken the file's set-id bits and capabilities.
    pub(super) fn dropped(&self, ino: InodeNo) {
        self.remember(ino, |known, _| *known |= Lack::Privileges as u8 | Lack::Capability as u8);
    }

    /// A program of this mount may have given the file such attributes.
    pub(super) fn forget(&self, ino: InodeNo) {
        if let Some(known) = self.known.lock().get_mut(&ino) {
            known.lacks = 0;
        }
    }

    fn remember(&self, ino: InodeNo, edit: impl FnOnce(&mut u8, &mut Age)) {
        if self.keep.is_zero() {
            return;
        }
        let mut known = self.known.lock();
        let Known { mut lacks, told, mut age, forgot } = known.get(&ino).copied().unwrap_or(Known::NOTHING);
        if told.is_none_or(|told| told.elapsed() >= self.keep) {
            lacks = 0;
        }
        edit(&mut lacks, &mut age);
        Self::insert(&mut known, ino, Known { lacks, told: Some(Instant::now()), age, forgot });
    }

    fn insert(known: &mut HashMap<InodeNo, Known>, ino: InodeNo, what: Known) {
        if known.len() >= MAX_REMEMBERED {
            known.clear();
        }
        known.insert(ino, what);
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
    fn the_kernel_forgets_only_what_is_older() {
        let files = Lacking::new(Duration::from_secs(60));
        let forgets = |change| {
            let mut forgets = false;
            files.forget_older(InodeNo(1), change, || forgets = true);
            forgets
        };
        let told = |change| files.told(&Attr { change, ..attr(1, 0o644, InodeFlags::default()) });
        assert!(forgets(5), "nothing is known");
        assert!(!forgets(5), "a read may have asked for the attributes since, and not have taken them yet");
        told(5);
        assert!(!forgets(5));
        told(6);
        assert!(forgets(6), "the kernel may have taken the answer before, and none since");
        told(6);
        assert!(!forgets(6));
        assert!(forgets(7));
        told(8);
        assert!(!forgets(8), "the kernel has these, or none");
        told(8);
        assert!(!forgets(8));
        assert!(!forgets(7), "it has none from before");
        assert!(forgets(9));
        assert!(!forgets(8), "an open of before that is answered late");
        told(9);
        told(10);
        assert!(!forgets(9));
        files.forget(InodeNo(1));
        assert!(!forgets(8), "that was about what the file lacks");
        let never = Lacking::new(Duration::ZERO);
        never.forget_older(InodeNo(1), 5, || panic!("the kernel keeps none"));
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
