//! Listings as FUSE wants them: the volume's entries after `.` and `..`, whose cookies are 1 and 2.
//!
//! A cookie names the place *after* an entry; the volume's are greater than 2, and 0 asks it for the start. `..`
//! carries the directory's own number: the kernel never uses it, it resolves `..` by itself.

use crate::file::volume::{Caller, FsError, Volume};
use cuttlefs_common::attr::FileKind;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rpc::DirEntry;

/// Cookie of `.`.
const DOT_COOKIE: u64 = 1;
/// Cookie of `..`; the volume's are greater.
const DOT_DOT_COOKIE: u64 = 2;

/// Whether a name is one that is added here.
pub(super) fn is_dot(name: &[u8]) -> bool {
    name == b"." || name == b".."
}

/// Lists a directory from `cookie` on with `.` and `..`, until `take` returns `false` or the end.
pub(super) fn list<V: Volume + ?Sized>(
    volume: &V,
    caller: &Caller,
    ino: InodeNo,
    cookie: u64,
    plus: bool,
    take: &mut dyn FnMut(&DirEntry<'_>) -> bool,
) -> Result<(), FsError> {
    for (own, name) in [(DOT_COOKIE, &b"."[..]), (DOT_DOT_COOKIE, b"..")] {
        let dot = DirEntry { cookie: own, ino, kind: FileKind::Directory, name, attr: None };
        if cookie < own && !take(&dot) {
            return Ok(());
        }
    }
    let from = if cookie <= DOT_DOT_COOKIE { 0 } else { cookie };
    volume.read_dir(caller, ino, from, plus, take)
}
