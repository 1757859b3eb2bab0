//! The names that a directory entry may have: one rule for the client, which refuses early, the server, which must not
//! trust the client, and the metadata records.

use crate::ids::NAME_MAX;
use crate::status::Status;

/// Whether a directory entry may have this name.
///
/// # Errors
/// `NotFound` (empty, as POSIX wants of a path that ends in nothing), `NameTooLong`, `Invalid`.
pub fn check(name: &[u8]) -> Result<(), Status> {
    match name {
        b"" => Err(Status::NotFound),
        _ if name.len() > NAME_MAX => Err(Status::NameTooLong),
        b"." | b".." => Err(Status::Invalid),
        _ if name.contains(&b'/') || name.contains(&0) => Err(Status::Invalid),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        assert_eq!(check(b"a"), Ok(()));
        assert_eq!(check(&[b'x'; 255]), Ok(()));
        assert_eq!(check(b"\xff..."), Ok(()));
        assert_eq!(check(b""), Err(Status::NotFound));
        assert_eq!(check(&[b'x'; 256]), Err(Status::NameTooLong));
        for bad in [&b"."[..], b"..", b"a/b", b"a\0"] {
            assert_eq!(check(bad), Err(Status::Invalid), "{bad:?}");
        }
    }
}
