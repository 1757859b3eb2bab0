//! What the server enforces whatever a client's kernel thinks: a read-only export, root squash, the exported
//! subtree. Ordinary permission bits are the client kernel's business (`default_permissions`).

use crate::meta::RequestId;
use cuttlefs_common::attr::{Attr, FileKind, SetAttr, SetTime};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::status::Status;

/// Rules of the export, from `cuttlefs.toml`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Export {
    /// Nobody may change anything.
    pub read_only: bool,
    /// Whom root becomes: (uid, gid).
    pub root_squash: Option<(u32, u32)>,
    /// Directory that is exported, as path components from the pool's root.
    pub subtree: Vec<Vec<u8>>,
}

/// The identity a request runs under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Root was squashed: this side checks permission bits, because the client's kernel let root pass.
    pub squashed: bool,
    /// Permission bits that what is made does not get, where no default ACL says otherwise.
    pub umask: u16,
    /// A change of contents takes set-id bits and capabilities from the file.
    pub drops_privileges: bool,
    /// The request this is done for, if a client may send it again.
    pub request: Option<RequestId>,
}

/// A permission a squashed caller needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Read bits.
    Read,
    /// Write bits.
    Write,
    /// The search bit of a directory.
    Search,
    /// Write and search bits of a directory.
    ChangeEntries,
    /// To be the owner.
    Own,
}

impl Export {
    /// Whether a client may not do everything everywhere.
    pub fn is_restricted(&self) -> bool {
        self.read_only || self.root_squash.is_some() || !self.subtree.is_empty()
    }

    /// Whom a caller is here.
    pub fn identify(&self, uid: u32, gid: u32, request: Option<RequestId>) -> Identity {
        match self.root_squash {
            Some((squash_uid, squash_gid)) if uid == 0 => {
                Identity { uid: squash_uid, gid: squash_gid, squashed: true, request, ..Identity::ROOT }
            }
            _ => Identity { uid, gid, request, ..Identity::ROOT },
        }
    }
}

impl Identity {
    /// The server itself.
    pub const ROOT: Self =
        Self { uid: 0, gid: 0, squashed: false, umask: 0, drops_privileges: false, request: None };

    /// Checks a squashed caller against an inode's permission bits; others passed their own kernel.
    ///
    /// # Errors
    /// `Denied`, or `NotPermitted` where ownership is needed.
    pub fn check(&self, attr: &Attr, need: Need) -> Result<(), Status> {
        if !self.squashed {
            return Ok(());
        }
        let shift = if attr.uid == self.uid {
            6
        } else if attr.gid == self.gid {
            3
        } else {
            0
        };
        let bits = attr.mode >> shift & 7;
        let granted = match need {
            Need::Own => return if attr.uid == self.uid { Ok(()) } else { Err(Status::NotPermitted) },
            Need::Read => bits & 4 != 0,
            Need::Write => bits & 2 != 0,
            Need::Search => bits & 1 != 0,
            Need::ChangeEntries => bits & 3 == 3 && attr.kind == FileKind::Directory,
        };
        if granted { Ok(()) } else { Err(Status::Denied) }
    }

    /// Checks a change of attributes, as chmod(2), chown(2), truncate(2) and utimensat(2) want it of a plain user
    /// who is in one group.
    ///
    /// # Errors
    /// `Denied`, or `NotPermitted` where ownership or privilege is needed.
    pub fn check_change(&self, attr: &Attr, set: &SetAttr) -> Result<(), Status> {
        let explicit = |time: Option<SetTime>| matches!(time, Some(SetTime::At(_)));
        let times = explicit(set.atime) || explicit(set.mtime) || set.ctime.is_some();
        let by_owner = set.mode.is_some() || set.uid.is_some() || set.gid.is_some() || times;
        if by_owner {
            self.check(attr, Need::Own)?;
        }
        // An owner is let through whatever the bits say: a file made read-only is still written by who made it, and
        // ftruncate(2) looks like truncate(2) from here.
        if attr.uid != self.uid {
            self.check(attr, Need::Write)?;
        }
        let gives_away = set.uid.is_some_and(|uid| uid != self.uid)
            || set.gid.is_some_and(|gid| gid != self.gid && gid != attr.gid);
        if self.squashed && gives_away {
            return Err(Status::NotPermitted);
        }
        Ok(())
    }

    /// Checks the making of a node: devices need privilege, which a squashed caller has not.
    ///
    /// # Errors
    /// `NotPermitted`.
    pub fn check_kind(&self, kind: FileKind) -> Result<(), Status> {
        match kind {
            FileKind::BlockDevice | FileKind::CharDevice if self.squashed => Err(Status::NotPermitted),
            _ => Ok(()),
        }
    }

    /// Checks the sticky bit: a squashed caller may remove an entry of a sticky directory only if it owns either.
    ///
    /// # Errors
    /// `NotPermitted`.
    pub fn check_sticky(&self, directory: &Attr, entry: &Attr) -> Result<(), Status> {
        let sticky = directory.mode & 0o1000 != 0;
        if self.squashed && sticky && directory.uid != self.uid && entry.uid != self.uid {
            return Err(Status::NotPermitted);
        }
        Ok(())
    }
}

/// Splits a path into components, refusing what could leave the tree.
///
/// # Errors
/// `Invalid` for `..`.
pub fn components(path: &[u8]) -> Result<Vec<Vec<u8>>, Status> {
    let parts = path.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".");
    parts.map(|part| if part == b".." { Err(Status::Invalid) } else { Ok(part.to_vec()) }).collect()
}

/// Walks components from a directory.
///
/// # Errors
/// `NotFound` or `NotDirectory`.
pub fn walk(
    from: InodeNo,
    components: &[Vec<u8>],
    lookup: impl Fn(InodeNo, &[u8]) -> Result<Attr, Status>,
) -> Result<InodeNo, Status> {
    components.iter().try_fold(from, |at, name| {
        let attr = lookup(at, name)?;
        if attr.kind == FileKind::Directory { Ok(attr.ino) } else { Err(Status::NotDirectory) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuttlefs_common::attr::{InodeFlags, Timestamp};

    fn attr(uid: u32, mode: u16) -> Attr {
        let t = Timestamp::default();
        Attr {
            ino: InodeNo(9),
            kind: FileKind::Directory,
            mode,
            nlink: 2,
            uid,
            gid: 0,
            rdev: 0,
            size: 0,
            allocated_bytes: 0,
            atime: t,
            mtime: t,
            ctime: t,
            btime: t,
            change: 0,
            flags: InodeFlags::default(),
        }
    }

    #[test]
    fn root_is_squashed_and_then_checked() {
        let export = Export { root_squash: Some((65534, 65534)), ..Export::default() };
        let root = export.identify(0, 0, None);
        assert_eq!((root.uid, root.gid, root.squashed), (65534, 65534, true));
        assert_eq!(root.check(&attr(0, 0o755), Need::ChangeEntries), Err(Status::Denied));
        assert_eq!(root.check(&attr(0, 0o777), Need::ChangeEntries), Ok(()));
        assert_eq!(root.check(&attr(0, 0o777), Need::Own), Err(Status::NotPermitted));
        assert_eq!(root.check_sticky(&attr(0, 0o1777), &attr(0, 0o644)), Err(Status::NotPermitted));
        let user = export.identify(1000, 1000, None);
        assert_eq!(user.check(&attr(0, 0o700), Need::Write), Ok(()), "the client's kernel checks users");
        assert!(!Export::default().identify(0, 0, None).squashed);
    }

    #[test]
    fn a_squashed_root_is_a_plain_user() {
        let root = Export { root_squash: Some((65534, 65534)), ..Export::default() }.identify(0, 0, None);
        let (own, others) = (attr(65534, 0o000), attr(7, 0o666));
        assert_eq!(root.check(&attr(7, 0o744), Need::Search), Err(Status::Denied));
        assert_eq!(root.check(&attr(7, 0o711), Need::Search), Ok(()));
        assert_eq!(root.check_kind(FileKind::CharDevice), Err(Status::NotPermitted));
        assert_eq!(root.check_kind(FileKind::Fifo), Ok(()));

        let set = SetAttr::default();
        let mode = SetAttr { mode: Some(0o600), ..set };
        let give = SetAttr { uid: Some(7), ..set };
        let group = SetAttr { gid: Some(0), ..set };
        let own_group = SetAttr { gid: Some(65534), ..set };
        let now = SetAttr { mtime: Some(SetTime::Now), ..set };
        let then = SetAttr { mtime: Some(SetTime::At(Timestamp::default())), ..set };
        let size = SetAttr { size: Some(0), ..set };
        for (change, of_own, of_others) in [
            (mode, Ok(()), Err(Status::NotPermitted)),
            (give, Err(Status::NotPermitted), Err(Status::NotPermitted)),
            (group, Ok(()), Err(Status::NotPermitted)),
            (own_group, Ok(()), Err(Status::NotPermitted)),
            (now, Ok(()), Ok(())),
            (then, Ok(()), Err(Status::NotPermitted)),
            (size, Ok(()), Ok(())),
        ] {
            assert_eq!(root.check_change(&own, &change), of_own, "{change:?} of its own");
            assert_eq!(root.check_change(&others, &change), of_others, "{change:?} of another's");
        }
        let group_of_root = SetAttr { gid: Some(1), ..set };
        assert_eq!(root.check_change(&own, &group_of_root), Err(Status::NotPermitted));
        let user = Export::default().identify(0, 0, None);
        assert_eq!(user.check_change(&own, &give), Ok(()), "the client's kernel has checked");
        assert_eq!(user.check_kind(FileKind::BlockDevice), Ok(()));
    }

    #[test]
    fn paths_do_not_leave_the_tree() {
        assert_eq!(components(b"/a//./b/"), Ok(vec![b"a".to_vec(), b"b".to_vec()]));
        assert_eq!(components(b""), Ok(vec![]));
        assert_eq!(components(b"a/../b"), Err(Status::Invalid));
    }
}
