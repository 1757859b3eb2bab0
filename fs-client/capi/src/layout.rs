//! Structs that both sides know. The header has the same fields; `tests/program.c` compares sizes and places.

use cuttlefs_client::native::{Attr, FileKind};
use libc::c_char;
use std::mem::offset_of;

/// `struct cuttlefs_options`.
#[repr(C)]
pub(crate) struct Options {
    pub(crate) key: *const c_char,
    pub(crate) label: *const c_char,
    pub(crate) subtree: *const c_char,
    pub(crate) server_user: i64,
    pub(crate) threads: u32,
    pub(crate) deadline_ms: u32,
}
const _: () = assert!(size_of::<Options>() == 40 && offset_of!(Options, threads) == 32);

/// `struct cuttlefs_stat`.
#[repr(C)]
pub(crate) struct Stat {
    ino: u64,
    size: u64,
    allocated_bytes: u64,
    mtime_seconds: i64,
    ctime_seconds: i64,
    mtime_nanoseconds: u32,
    ctime_nanoseconds: u32,
    mode: u32,
    nlink: u32,
    uid: u32,
    gid: u32,
}
const _: () = assert!(size_of::<Stat>() == 64 && offset_of!(Stat, mode) == 48);

/// `struct cuttlefs_completion`.
#[repr(C)]
pub(crate) struct Completion {
    pub(crate) token: u64,
    pub(crate) result: i64,
    pub(crate) offset: u64,
}
const _: () = assert!(size_of::<Completion>() == 24);

impl Stat {
    pub(crate) fn of(attr: &Attr) -> Self {
        let kind = match attr.kind {
            FileKind::File => libc::S_IFREG,
            FileKind::Directory => libc::S_IFDIR,
            FileKind::Symlink => libc::S_IFLNK,
            FileKind::BlockDevice => libc::S_IFBLK,
            FileKind::CharDevice => libc::S_IFCHR,
            FileKind::Fifo => libc::S_IFIFO,
            FileKind::Socket => libc::S_IFSOCK,
        };
        Self {
            ino: attr.ino.0,
            size: attr.size,
            allocated_bytes: attr.allocated_bytes,
            mtime_seconds: attr.mtime.secs,
            ctime_seconds: attr.ctime.secs,
            mtime_nanoseconds: attr.mtime.nanos,
            ctime_nanoseconds: attr.ctime.nanos,
            mode: kind | u32::from(attr.mode),
            nlink: attr.nlink,
            uid: attr.uid,
            gid: attr.gid,
        }
    }
}
