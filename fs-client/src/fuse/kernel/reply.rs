//! Answers, each in the form that the kernel expects for its request. Most return whether the caller still wants the answer: if not, a file or lock
//! that the answer hands over must be given back.

use super::abi::{Errno, FileAttr, FileHandle, FileType, FopenFlags, Generation, INodeNo};
use super::requests::{Answer, Claimed};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

/// The lengths of `fuse_attr`, `fuse_entry_out`, and `fuse_dirent` without its name.
const ATTR_LEN: usize = 88;
const ENTRY_LEN: usize = 40 + ATTR_LEN;
const DIRENT_LEN: usize = 24;

/// Builds a structure of the kernel.
#[derive(Debug, Default)]
struct Out(Vec<u8>);

impl Out {
    fn u16(mut self, value: u16) -> Self {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }

    fn u32(mut self, value: u32) -> Self {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }

    fn u64(mut self, value: u64) -> Self {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }

    fn zeros(mut self, len: usize) -> Self {
        self.0.resize(self.0.len() + len, 0);
        self
    }

    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// `fuse_attr`.
    fn attr(self, attr: &FileAttr) -> Self {
        self.u64(attr.ino.0)
            .u64(attr.size)
            .u64(attr.blocks)
            .u64(attr.atime.secs.cast_unsigned())
            .u64(attr.mtime.secs.cast_unsigned())
            .u64(attr.ctime.secs.cast_unsigned())
            .u32(attr.atime.nanos)
            .u32(attr.mtime.nanos)
            .u32(attr.ctime.nanos)
            .u32(attr.kind.mode_bits() | u32::from(attr.perm))
            .u32(attr.nlink)
            .u32(attr.uid)
            .u32(attr.gid)
            .u32(attr.rdev)
            .u32(attr.blksize)
            .u32(attr.flags)
    }

    /// `fuse_entry_out`.
    fn entry(
        self,
        attr_ttl: &Duration,
        entry_ttl: &Duration,
        attr: &FileAttr,
        generation: Generation,
    ) -> Self {
        self.u64(attr.ino.0)
            .u64(generation.0)
            .u64(entry_ttl.as_secs())
            .u64(attr_ttl.as_secs())
            .u32(entry_ttl.subsec_nanos())
            .u32(attr_ttl.subsec_nanos())
            .attr(attr)
    }

    /// `fuse_open_out`.
    fn open(self, handle: FileHandle, flags: FopenFlags) -> Self {
        self.u64(handle.0).u32(flags.bits()).u32(0)
    }

    /// `fuse_dirent`, with its name and its padding.
    fn dirent(self, ino: INodeNo, next: u64, kind: FileType, name: &OsStr) -> Self {
        let name = name.as_bytes();
        self.u64(ino.0)
            .u64(next)
            .u32(name.len() as u32)
            .u32(kind.mode_bits() >> 12)
            .bytes(name)
            .zeros(name.len().next_multiple_of(8) - name.len())
    }
}

macro_rules! replies {
    ($($(#[$doc:meta])* $name:ident)+) => {$(
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name(Answer);

        impl $name {
            pub(super) fn new(answer: Answer) -> Self {
                Self(answer)
            }

            /// Answers with an errno.
            pub fn error(self, errno: Errno) {
                self.0.error(errno.code());
            }
        }
    )+};
}

replies! {
    /// The answer that a request was done.
    ReplyEmpty
    /// Bytes.
    ReplyData
    /// A name and its inode.
    ReplyEntry
    /// Attributes.
    ReplyAttr
    /// An open file.
    ReplyOpen
    /// An open file.
    ReplyCreate
    /// The number of bytes written.
    ReplyWrite
    /// The space of the file system.
    ReplyStatfs
    /// A value, or its length.
    ReplyXattr
    /// A lock that blocks another one.
    ReplyLock
    /// An offset in a file.
    ReplyLseek
    /// The result of an ioctl.
    ReplyIoctl
}

impl ReplyEmpty {
    /// Answers that it was done. `false`: nobody wants the answer any more.
    pub fn ok(self) -> bool {
        self.0.ok(&[])
    }

    /// Takes the right to answer, so that nobody else can end the request. `None`: it was ended.
    pub fn claim(self) -> Option<ReplyClaimed> {
        self.0.claim().map(ReplyClaimed)
    }

    /// Whether the caller does not want to wait any more.
    pub fn is_interrupted(&self) -> bool {
        self.0.is_interrupted()
    }
}

/// An answer that must be given whatever becomes of the caller. If it is dropped without `ok`, the answer is EIO.
#[derive(Debug)]
pub struct ReplyClaimed(Claimed);

impl ReplyClaimed {
    /// Answers that it was done.
    pub fn ok(self) {
        self.0.ok();
    }
}

impl ReplyData {
    /// Answers with these bytes.
    pub fn data(self, bytes: &[u8]) {
        self.0.ok(&[bytes]);
    }
}

impl ReplyEntry {
    /// Answers with one lifetime for the name and the attributes.
    pub fn entry(self, ttl: &Duration, attr: &FileAttr, generation: Generation) {
        self.entry_with_ttls(ttl, ttl, attr, generation);
    }

    /// Answers with a lifetime for the attributes and one for the name.
    pub fn entry_with_ttls(
        self,
        attr_ttl: &Duration,
        entry_ttl: &Duration,
        attr: &FileAttr,
        generation: Generation,
    ) {
        self.0.ok(&[&Out::default().entry(attr_ttl, entry_ttl, attr, generation).0]);
    }
}

impl ReplyAttr {
    /// Answers with these attributes and their lifetime.
    pub fn attr(self, ttl: &Duration, attr: &FileAttr) {
        self.0.ok(&[&Out::default().u64(ttl.as_secs()).u32(ttl.subsec_nanos()).u32(0).attr(attr).0]);
    }
}

impl ReplyOpen {
    /// Answers with this handle. `false`: nobody has taken the handle, and nobody will close it.
    #[must_use]
    pub fn opened(self, handle: FileHandle, flags: FopenFlags) -> bool {
        self.0.ok(&[&Out::default().open(handle, flags).0])
    }
}

impl ReplyCreate {
    /// Answers with this handle. `false`: nobody has taken the handle, and nobody will close it.
    #[must_use]
    pub fn created(
        self,
        ttl: &Duration,
        attr: &FileAttr,
        generation: Generation,
        handle: FileHandle,
        flags: FopenFlags,
    ) -> bool {
        self.0.ok(&[&Out::default().entry(ttl, ttl, attr, generation).open(handle, flags).0])
    }
}

impl ReplyWrite {
    /// Answers with the number of bytes written.
    pub fn written(self, len: u32) {
        self.0.ok(&[&Out::default().u32(len).u32(0).0]);
    }
}

impl ReplyStatfs {
    /// Answers with a `fuse_kstatfs`.
    #[allow(clippy::too_many_arguments)]
    pub fn statfs(
        self,
        blocks: u64,
        bfree: u64,
        bavail: u64,
        files: u64,
        ffree: u64,
        bsize: u32,
        namelen: u32,
        frsize: u32,
    ) {
        let counts = Out::default().u64(blocks).u64(bfree).u64(bavail).u64(files).u64(ffree);
        self.0.ok(&[&counts.u32(bsize).u32(namelen).u32(frsize).u32(0).zeros(24).0]);
    }
}

impl ReplyXattr {
    /// Answers with the length of the value.
    pub fn size(self, len: u32) {
        self.0.ok(&[&Out::default().u32(len).u32(0).0]);
    }

    /// Answers with the value.
    pub fn data(self, value: &[u8]) {
        self.0.ok(&[value]);
    }
}

impl ReplyLock {
    /// Answers with this lock; `F_UNLCK` for none.
    pub fn locked(self, start: u64, end: u64, typ: i32, pid: u32) {
        self.0.ok(&[&Out::default().u64(start).u64(end).u32(typ.cast_unsigned()).u32(pid).0]);
    }
}

impl ReplyLseek {
    /// Answers with this offset.
    pub fn offset(self, offset: i64) {
        self.0.ok(&[&Out::default().u64(offset.cast_unsigned()).0]);
    }
}

impl ReplyIoctl {
    /// Answers with the result of the system call, and bytes for the caller.
    pub fn ioctl(self, result: i32, data: &[u8]) {
        let head = Out::default().u32(result.cast_unsigned()).u32(0).u32(0).u32(0);
        self.0.ok(&[&head.0, data]);
    }
}

/// The answer of a directory's listing: as many entries as there is room for.
#[derive(Debug)]
pub struct ReplyDirectory {
    answer: Answer,
    room: usize,
    entries: Out,
}

impl ReplyDirectory {
    pub(super) fn new(answer: Answer, room: u32) -> Self {
        Self { answer, room: room as usize, entries: Out::default() }
    }

    /// Adds an entry; `next` is the cookie for the rest of the listing. `true`: the entry does not fit.
    #[must_use]
    pub fn add(&mut self, ino: INodeNo, next: u64, kind: FileType, name: impl AsRef<OsStr>) -> bool {
        let name = name.as_ref();
        if self.entries.0.len() + DIRENT_LEN + name.len().next_multiple_of(8) > self.room {
            return true;
        }
        self.entries = std::mem::take(&mut self.entries).dirent(ino, next, kind, name);
        false
    }

    /// Answers with the entries.
    pub fn ok(self) {
        self.answer.ok(&[&self.entries.0]);
    }

    /// Answers with an errno.
    pub fn error(self, errno: Errno) {
        self.answer.error(errno.code());
    }
}

/// As [`ReplyDirectory`], with attributes.
#[derive(Debug)]
pub struct ReplyDirectoryPlus(ReplyDirectory);

impl ReplyDirectoryPlus {
    pub(super) fn new(answer: Answer, room: u32) -> Self {
        Self(ReplyDirectory::new(answer, room))
    }

    /// Adds an entry. `true`: it does not fit.
    #[must_use]
    pub fn add(
        &mut self,
        ino: INodeNo,
        next: u64,
        name: impl AsRef<OsStr>,
        ttl: &Duration,
        attr: &FileAttr,
        generation: Generation,
    ) -> bool {
        let name = name.as_ref();
        let entries = &mut self.0.entries;
        if entries.0.len() + ENTRY_LEN + DIRENT_LEN + name.len().next_multiple_of(8) > self.0.room {
            return true;
        }
        let with_attr = std::mem::take(entries).entry(ttl, ttl, attr, generation);
        *entries = with_attr.dirent(ino, next, attr.kind, name);
        false
    }

    /// Answers with the entries.
    pub fn ok(self) {
        self.0.ok();
    }

    /// Answers with an errno.
    pub fn error(self, errno: Errno) {
        self.0.error(errno);
    }
}

/// The agreement with the kernel, as `fuse_init_out`.
#[derive(Clone, Copy, Debug)]
pub(super) struct InitOut {
    pub(super) major: u32,
    pub(super) minor: u32,
    pub(super) max_readahead: u32,
    pub(super) flags: u64,
    pub(super) max_background: u16,
    pub(super) congestion_threshold: u16,
    pub(super) max_write: u32,
    pub(super) time_gran: u32,
    pub(super) max_pages: u16,
}

impl InitOut {
    /// The 64 bytes of this structure.
    pub(super) fn encode(&self) -> Vec<u8> {
        Out::default()
            .u32(self.major)
            .u32(self.minor)
            .u32(self.max_readahead)
            .u32(self.flags as u32)
            .u16(self.max_background)
            .u16(self.congestion_threshold)
            .u32(self.max_write)
            .u32(self.time_gran)
            .u16(self.max_pages)
            .u16(0)
            .u32((self.flags >> 32) as u32)
            .zeros(28)
            .0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuttlefs_common::attr::Timestamp;

    fn words(bytes: &[u8]) -> Vec<u32> {
        bytes.chunks(4).map(|word| u32::from_ne_bytes(word.try_into().expect("whole words"))).collect()
    }

    #[test]
    fn structures_are_as_the_kernel_has_them() {
        let time = |secs, nanos| Timestamp { secs, nanos };
        let attr = FileAttr {
            ino: INodeNo(2),
            size: 3,
            blocks: 4,
            atime: time(5, 8),
            mtime: time(-1, 9),
            ctime: time(7, 10),
            kind: FileType::RegularFile,
            perm: 0o644,
            nlink: 12,
            uid: 13,
            gid: 14,
            rdev: 15,
            blksize: 16,
            flags: 17,
        };
        let encoded = Out::default().attr(&attr).0;
        assert_eq!(encoded.len(), ATTR_LEN);
        if cfg!(target_endian = "little") {
            let all = u32::MAX;
            let expected =
                [2, 0, 3, 0, 4, 0, 5, 0, all, all, 7, 0, 8, 9, 10, 0o100_644, 12, 13, 14, 15, 16, 17];
            assert_eq!(words(&encoded), expected);
            let (a, e) = (Duration::new(20, 21), Duration::new(22, 23));
            let entry = Out::default().entry(&a, &e, &attr, Generation(24)).0;
            assert_eq!(entry.len(), ENTRY_LEN);
            assert_eq!(words(&entry)[..10], [2, 0, 24, 0, 22, 0, 20, 0, 23, 21]);
            let open = Out::default().open(FileHandle(9), FopenFlags::FOPEN_KEEP_CACHE).0;
            assert_eq!(words(&open), [9, 0, 2, 0]);
            let init = InitOut {
                major: 7,
                minor: 45,
                max_readahead: 1,
                flags: 2 | 3 << 32,
                max_background: 4,
                congestion_threshold: 5,
                max_write: 6,
                time_gran: 7,
                max_pages: 8,
            };
            let expected = [7, 45, 1, 2, 4 | 5 << 16, 6, 7, 8, 3, 0, 0, 0, 0, 0, 0, 0];
            assert_eq!(words(&init.encode()), expected);
        }
        let entry = Out::default().dirent(INodeNo(1), 2, FileType::Directory, OsStr::new("abc")).0;
        assert_eq!(entry.len(), DIRENT_LEN + 8);
        assert_eq!((&entry[24..27], &entry[27..]), (&b"abc"[..], &[0; 5][..]));
        assert_eq!(words(&entry[16..24]), [3, 4]);
    }
}
