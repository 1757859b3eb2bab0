//! The extended attributes that exist on a mount.
//!
//! Attributes of `user.`, `trusted.` and `security.` are kept as they are; the kernel checks permissions for them. Of `system.` only the access
//! control lists exist, and only where the kernel checks them.

use super::lacking::Lack;
use cuttlefs_common::attr::{ACCESS_ACL_XATTR, CAPABILITY_XATTR, DEFAULT_ACL_XATTR};

/// Whether an attribute of this name can exist on any mount.
pub(super) fn is_supported(name: &[u8]) -> bool {
    [&b"user."[..], b"trusted.", b"security."]
        .into_iter()
        .any(|prefix| name.len() > prefix.len() && name.starts_with(prefix))
}

/// The names (each ended by NUL) that a user is shown. `trusted.` names are shown to root only, as in the kernel's own file systems; of a FUSE file
/// system the kernel shows all that it is told.
pub(super) fn shown_to(uid: u32, names: Vec<u8>) -> Vec<u8> {
    if uid == 0 {
        return names;
    }
    let shown = names.split_inclusive(|byte| *byte == 0).filter(|name| !name.starts_with(b"trusted."));
    shown.flatten().copied().collect()
}

/// Whether this is the name of an access control list.
pub(super) fn is_acl(name: &[u8]) -> bool {
    name == ACCESS_ACL_XATTR || name == DEFAULT_ACL_XATTR
}

/// The lack that means that a file does not have this attribute, if that is remembered.
pub(super) fn lack_of(name: &[u8]) -> Option<Lack> {
    match name {
        CAPABILITY_XATTR => Some(Lack::Capability),
        _ => is_acl(name).then_some(Lack::Acls),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_alone_is_shown_what_is_trusted() {
        let all = b"user.a\0trusted.b\0user.trusted.c\0";
        assert_eq!(shown_to(0, all.to_vec()), all);
        assert_eq!(shown_to(1, all.to_vec()), b"user.a\0user.trusted.c\0");
        assert_eq!(shown_to(1, Vec::new()), b"");
    }

    #[test]
    fn namespaces() {
        for name in [&b"user.a"[..], b"trusted.x", b"security.capability"] {
            assert!(is_supported(name) && !is_acl(name));
        }
        for name in [&b"system.posix_acl_access"[..], b"user.", b"user", b"", b"bogus.x"] {
            assert!(!is_supported(name));
        }
        assert!(is_acl(b"system.posix_acl_access") && is_acl(b"system.posix_acl_default"));
        assert!(!is_acl(b"system.nfs4_acl"));
        assert_eq!(lack_of(b"security.capability"), Some(Lack::Capability));
        assert_eq!(lack_of(b"user.a"), None);
    }
}
