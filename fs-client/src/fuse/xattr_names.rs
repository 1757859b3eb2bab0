//! Which extended attributes exist on a mount.
//!
//! `user.`, `trusted.` and `security.` are kept as they come; the kernel checks who may touch them. `system.` is
//! refused: its only names in use are POSIX ACLs, and keeping an ACL that nobody enforces would be worse than
//! saying that there are none.

/// The attribute that holds a file's capabilities.
pub(super) const CAPABILITY: &[u8] = b"security.capability";

/// Whether an attribute of this name can exist here.
pub(super) fn is_supported(name: &[u8]) -> bool {
    [&b"user."[..], b"trusted.", b"security."]
        .into_iter()
        .any(|prefix| name.len() > prefix.len() && name.starts_with(prefix))
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
}
