//! Paths of exported directories: parsed and looked up.

use cuttlefs_common::attr::{Attr, FileKind};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::status::Status;

/// Longest path, as Linux's `PATH_MAX`.
const PATH_BYTES_MAX: usize = 4096;

/// Splits a path into components, and refuses those that could leave the exported tree. A path is as long as Linux allows at most, so that a walk
/// along it does not delay other clients.
///
/// # Errors
/// `Invalid` for `..`, `NameTooLong`.
pub(crate) fn components(path: &[u8]) -> Result<Vec<Vec<u8>>, Status> {
    if path.len() > PATH_BYTES_MAX {
        return Err(Status::NameTooLong);
    }
    let parts = path.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".");
    parts.map(|part| if part == b".." { Err(Status::Invalid) } else { Ok(part.to_vec()) }).collect()
}

/// Looks up a path's components one by one, from a directory.
///
/// # Errors
/// `NotFound` or `NotDirectory`.
pub(crate) fn walk(
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

    #[test]
    fn paths_do_not_leave_the_tree() {
        assert_eq!(components(b"/a//./b/"), Ok(vec![b"a".to_vec(), b"b".to_vec()]));
        assert_eq!(components(b""), Ok(vec![]));
        assert_eq!(components(b"a/../b"), Err(Status::Invalid));
        assert_eq!(components(&[b'/'; 4096]), Ok(vec![]));
        assert_eq!(components(&[b'/'; 4097]), Err(Status::NameTooLong));
    }
}
