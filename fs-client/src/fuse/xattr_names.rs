//! Which extended attributes exist on a mount.
//!
//! `user.`, `trusted.` and `security.` are kept as they come; the kernel checks who may touch them. Of `system.` there are the
//! access control lists, where the kernel checks those.

use super::lacking::Lack;
use cuttlefs_common::attr::{ACCESS_ACL_XATTR, CAPABILITY_XATTR, DEFAULT_ACL_XATTR};

/// Whether an attribute of this name can exist on any mount.
pub(super) fn is_supported(name: &[u8]) -> bool {
    [&b"user."[..], b"trusted.", b"security."]
        .into_iter()
        .any(|prefix| name.len() > prefix.len() && name.starts_with(prefix))
}

/// Whether it is an access control list.
pub(super) fn is_acl(name: &[u8]) -> bool {
    name == ACCESS_ACL_XATTR || name == DEFAULT_ACL_XATTR
}

/// What a file lacks that has no such attribute, if that is remembered.
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
