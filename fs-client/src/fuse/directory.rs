//! Listings as FUSE expects them: `.` and `..`, whose cookies are 1 and 2, and then the volume's entries.
//!
//! A cookie names the place *after* an entry. The volume's cookies are greater than 2, and cookie 0 is the beginning of its listing. `..` carries the
//! directory's own number: the kernel never uses it, because it resolves `..` by itself.

use crate::file::volume::{Caller, FsError, Volume};
use cuttlefs_common::attr::FileKind;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rpc::DirEntry;

/// The cookie of `.`.
const DOT_COOKIE: u64 = 1;
/// The cookie of `..`; those of the volume are greater.
const DOT_DOT_COOKIE: u64 = 2;

/// Whether this is one of the names that are added here.
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
