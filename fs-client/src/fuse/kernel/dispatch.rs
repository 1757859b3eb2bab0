//! The handling of a message from the kernel: parses it, and calls the method for it.

use super::abi::{
    CopyFileRangeFlags, Errno, FSYNC_FDATASYNC, FileHandle, GETATTR_FH, IN_HEADER_LEN, INodeNo, IoctlFlags,
    LK_FLOCK, LockKind, LockOwner, OpenFlags, READ_LOCKOWNER, RenameFlags, TimeOrNow, WriteFlags, fattr,
    opcode,
};
use super::fields::{Fields, Malformed};
use super::filesystem::{Filesystem, Request};
use super::reply::{
    ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry,
    ReplyIoctl, ReplyLock, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr,
};
use super::requests::{Answer, Connection};
use crate::transport::interrupt;
use cuttlefs_common::attr::Timestamp;
use std::path::Path;
use std::sync::Arc;

/// `fuse_in_header`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Header {
    pub(super) opcode: u32,
    pub(super) unique: u64,
    node: INodeNo,
    uid: u32,
    gid: u32,
    pid: u32,
}

impl Header {
    /// Parses the header; returns it with the rest of the message.
    pub(super) fn parse(message: &[u8]) -> Result<(Self, Fields<'_>), Malformed> {
        let mut fields = Fields::new(message);
        let len = fields.u32()?;
        let opcode = fields.u32()?;
        let unique = fields.u64()?;
        let node = INodeNo(fields.u64()?);
        let (uid, gid, pid) = (fields.u32()?, fields.u32()?, fields.u32()?);
        fields.skip(4)?;
        if len as usize != message.len() {
            return Err(Malformed);
        }
        Ok((Self { opcode, unique, node, uid, gid, pid }, fields))
    }
}

/// The kind of a message, by its opcode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A request that is answered.
    Request,
    /// A message that needs neither action nor answer.
    Nothing,
    /// The caller of another request was interrupted.
    Interrupt,
    /// The mount ends.
    Destroy,
}

pub(super) fn kind_of(header: &Header) -> Kind {
    match header.opcode {
        opcode::FORGET | opcode::BATCH_FORGET => Kind::Nothing,
        opcode::INTERRUPT => Kind::Interrupt,
        opcode::DESTROY => Kind::Destroy,
        _ => Kind::Request,
    }
}

/// Handles a message. `false`: it was the last one.
pub(super) fn handle<F: Filesystem>(connection: &Arc<Connection>, file_system: &F, message: &[u8]) -> bool {
    let Ok((header, mut fields)) = Header::parse(message) else {
        // Without the number of the request it cannot be answered.
        tracing::error!(len = message.len(), "malformed message from the kernel");
        return true;
    };
    match kind_of(&header) {
        Kind::Nothing => {}
        Kind::Interrupt => match fields.u64() {
            Ok(unique) => connection.note_interrupt(unique),
            Err(error) => tracing::error!(%error, "an interrupt"),
        },
        Kind::Destroy => {
            let pending = connection.note(header.unique, header.opcode, 0);
            Answer::new(connection.clone(), pending).ok(&[]);
            return false;
        }
        Kind::Request => {
            let pending = connection.note(header.unique, header.opcode, header.pid);
            let answer = Answer::new(connection.clone(), pending.clone());
            interrupt::handling(pending, || {
                if let Err(error) = call(file_system, &header, fields, answer) {
                    tracing::error!(%error, opcode = header.opcode);
                }
            });
        }
    }
    true
}

/// Calls the method of a request. If the message is malformed, the answer is dropped, which is EIO.
#[allow(clippy::too_many_lines)]
fn call<F: Filesystem>(
    file_system: &F,
    header: &Header,
    mut fields: Fields<'_>,
    answer: Answer,
) -> Result<(), Malformed> {
    let node = header.node;
    let req = &Request { unique: header.unique, uid: header.uid, gid: header.gid, pid: header.pid };
    let f = &mut fields;
    match header.opcode {
        opcode::LOOKUP => file_system.lookup(req, node, f.name()?, ReplyEntry::new(answer)),
        opcode::GETATTR => {
            let flags = f.u32()?;
            f.skip(4)?;
            let fh = FileHandle(f.u64()?);
            let fh = (flags & GETATTR_FH != 0).then_some(fh);
            file_system.getattr(req, node, fh, ReplyAttr::new(answer));
        }
        opcode::SETATTR => set_attr(file_system, req, node, f, answer)?,
        opcode::READLINK => file_system.readlink(req, node, ReplyData::new(answer)),
        opcode::SYMLINK => {
            let (name, target) = (f.name()?, f.name()?);
            file_system.symlink(req, node, name, Path::new(target), ReplyEntry::new(answer));
        }
        opcode::MKNOD => {
            let (mode, rdev, umask) = (f.u32()?, f.u32()?, f.u32()?);
            f.skip(4)?;
            file_system.mknod(req, node, f.name()?, mode, umask, rdev, ReplyEntry::new(answer));
        }
        opcode::MKDIR => {
            let (mode, umask) = (f.u32()?, f.u32()?);
            file_system.mkdir(req, node, f.name()?, mode, umask, ReplyEntry::new(answer));
        }
        opcode::UNLINK => file_system.unlink(req, node, f.name()?, ReplyEmpty::new(answer)),
        opcode::RMDIR => file_system.rmdir(req, node, f.name()?, ReplyEmpty::new(answer)),
        opcode::RENAME | opcode::RENAME2 => {
            let new_parent = INodeNo(f.u64()?);
            let mut flags = 0;
            if header.opcode == opcode::RENAME2 {
                flags = f.u32()?;
                f.skip(4)?;
            }
            let (name, new_name) = (f.name()?, f.name()?);
            let (flags, reply) = (RenameFlags::from_bits_retain(flags), ReplyEmpty::new(answer));
            file_system.rename(req, node, name, new_parent, new_name, flags, reply);
        }
        opcode::LINK => {
            let ino = INodeNo(f.u64()?);
            file_system.link(req, ino, node, f.name()?, ReplyEntry::new(answer));
        }
        opcode::OPEN => {
            let flags = OpenFlags(f.i32()?);
            file_system.open(req, node, flags, ReplyOpen::new(answer));
        }
        opcode::CREATE => {
            let (flags, mode, umask) = (f.i32()?, f.u32()?, f.u32()?);
            f.skip(4)?;
            file_system.create(req, node, f.name()?, mode, umask, flags, ReplyCreate::new(answer));
        }
        opcode::TMPFILE => {
            let (flags, mode, umask) = (f.i32()?, f.u32()?, f.u32()?);
            // The name after it has no meaning.
            file_system.tmpfile(req, node, mode, umask, flags, ReplyCreate::new(answer));
        }
        opcode::READ | opcode::READDIR | opcode::READDIRPLUS => {
            let (fh, offset, size) = (FileHandle(f.u64()?), f.u64()?, f.u32()?);
            let (read_flags, owner, flags) = (f.u32()?, LockOwner(f.u64()?), OpenFlags(f.i32()?));
            let owner = (read_flags & READ_LOCKOWNER != 0).then_some(owner);
            match header.opcode {
                opcode::READ => {
                    file_system.read(req, node, fh, offset, size, flags, owner, ReplyData::new(answer));
                }
                opcode::READDIR => {
                    file_system.readdir(req, node, fh, offset, ReplyDirectory::new(answer, size));
                }
                _ => file_system.readdirplus(req, node, fh, offset, ReplyDirectoryPlus::new(answer, size)),
            }
        }
        opcode::WRITE => {
            let (fh, offset, size) = (FileHandle(f.u64()?), f.u64()?, f.u32()?);
            let write_flags = WriteFlags::from_bits_retain(f.u32()?);
            let (owner, flags) = (LockOwner(f.u64()?), OpenFlags(f.i32()?));
            f.skip(4)?;
            let owner = write_flags.contains(WriteFlags::FUSE_WRITE_LOCKOWNER).then_some(owner);
            let data = f.bytes(size as usize)?;
            let reply = ReplyWrite::new(answer);
            file_system.write(req, node, fh, offset, data, write_flags, flags, owner, reply);
        }
        opcode::STATFS => file_system.statfs(req, node, ReplyStatfs::new(answer)),
        opcode::RELEASE | opcode::RELEASEDIR => {
            const FLUSH: u32 = 1;
            const FLOCK_UNLOCK: u32 = 2;
            let (fh, flags, release_flags) = (FileHandle(f.u64()?), OpenFlags(f.i32()?), f.u32()?);
            let owner = LockOwner(f.u64()?);
            let reply = ReplyEmpty::new(answer);
            if header.opcode == opcode::RELEASEDIR {
                file_system.releasedir(req, node, fh, flags, reply);
            } else {
                let owner = (release_flags & FLOCK_UNLOCK != 0).then_some(owner);
                file_system.release(req, node, fh, flags, owner, release_flags & FLUSH != 0, reply);
            }
        }
        opcode::FSYNC | opcode::FSYNCDIR => {
            let (fh, flags) = (FileHandle(f.u64()?), f.u32()?);
            let (datasync, reply) = (flags & FSYNC_FDATASYNC != 0, ReplyEmpty::new(answer));
            if header.opcode == opcode::FSYNC {
                file_system.fsync(req, node, fh, datasync, reply);
            } else {
                file_system.fsyncdir(req, node, fh, datasync, reply);
            }
        }
        opcode::FLUSH => {
            let fh = FileHandle(f.u64()?);
            f.skip(8)?;
            let owner = LockOwner(f.u64()?);
            file_system.flush(req, node, fh, owner, ReplyEmpty::new(answer));
        }
        opcode::SETXATTR => {
            let (size, flags) = (f.u32()?, f.i32()?);
            let name = f.name()?;
            let value = f.bytes(size as usize)?;
            file_system.setxattr(req, node, name, value, flags, 0, ReplyEmpty::new(answer));
        }
        opcode::GETXATTR => {
            let size = f.u32()?;
            f.skip(4)?;
            file_system.getxattr(req, node, f.name()?, size, ReplyXattr::new(answer));
        }
        opcode::LISTXATTR => file_system.listxattr(req, node, f.u32()?, ReplyXattr::new(answer)),
        opcode::REMOVEXATTR => file_system.removexattr(req, node, f.name()?, ReplyEmpty::new(answer)),
        opcode::OPENDIR => {
            let flags = OpenFlags(f.i32()?);
            file_system.opendir(req, node, flags, ReplyOpen::new(answer));
        }
        opcode::GETLK | opcode::SETLK | opcode::SETLKW => {
            let (fh, owner) = (FileHandle(f.u64()?), LockOwner(f.u64()?));
            let (start, end, typ, pid) = (f.u64()?, f.u64()?, f.i32()?, f.u32()?);
            let kind = if f.u32()? & LK_FLOCK != 0 { LockKind::Flock } else { LockKind::Posix };
            if header.opcode == opcode::GETLK {
                file_system.getlk(req, node, fh, owner, start, end, typ, pid, ReplyLock::new(answer));
            } else {
                let (sleep, reply) = (header.opcode == opcode::SETLKW, ReplyEmpty::new(answer));
                file_system.setlk(req, node, fh, kind, owner, start, end, typ, pid, sleep, reply);
            }
        }
        opcode::IOCTL => {
            let (fh, flags, cmd) = (FileHandle(f.u64()?), f.u32()?, f.u32()?);
            f.skip(8)?;
            let (in_size, out_size) = (f.u32()?, f.u32()?);
            let (flags, data) = (IoctlFlags::from_bits_retain(flags), f.bytes(in_size as usize)?);
            file_system.ioctl(req, node, fh, flags, cmd, data, out_size, ReplyIoctl::new(answer));
        }
        opcode::FALLOCATE => {
            let (fh, offset, len, mode) = (FileHandle(f.u64()?), f.u64()?, f.u64()?, f.i32()?);
            file_system.fallocate(req, node, fh, offset, len, mode, ReplyEmpty::new(answer));
        }
        opcode::LSEEK => {
            let (fh, offset, whence) = (FileHandle(f.u64()?), f.i64()?, f.i32()?);
            file_system.lseek(req, node, fh, offset, whence, ReplyLseek::new(answer));
        }
        opcode::COPY_FILE_RANGE => {
            let (from, from_offset) = (FileHandle(f.u64()?), f.u64()?);
            let (to_node, to, to_offset) = (INodeNo(f.u64()?), FileHandle(f.u64()?), f.u64()?);
            let (len, flags) = (f.u64()?, CopyFileRangeFlags::from_bits_retain(f.u64()?));
            let reply = ReplyWrite::new(answer);
            file_system.copy_file_range(
                req,
                node,
                from,
                from_offset,
                to_node,
                to,
                to_offset,
                len,
                flags,
                reply,
            );
        }
        // Among others ACCESS: the kernel checks permissions itself, and goes on without it.
        _ => answer.error(Errno::ENOSYS.code()),
    }
    Ok(())
}

/// `fuse_setattr_in`.
fn set_attr<F: Filesystem>(
    file_system: &F,
    req: &Request,
    node: INodeNo,
    f: &mut Fields<'_>,
    answer: Answer,
) -> Result<(), Malformed> {
    let valid = f.u32()?;
    f.skip(4)?;
    let (fh, size) = (FileHandle(f.u64()?), f.u64()?);
    f.skip(8)?;
    let secs = [f.i64()?, f.i64()?, f.i64()?];
    let nanos = [f.u32()?, f.u32()?, f.u32()?];
    let mode = f.u32()?;
    f.skip(4)?;
    let (uid, gid) = (f.u32()?, f.u32()?);
    let has = |bit: u32| valid & bit != 0;
    let time = |which: usize| Timestamp { secs: secs[which], nanos: nanos[which] };
    let time_or_now = |which: usize, set: u32, now: u32| {
        has(set).then(|| if has(now) { TimeOrNow::Now } else { TimeOrNow::SpecificTime(time(which)) })
    };
    file_system.setattr(
        req,
        node,
        has(fattr::MODE).then_some(mode),
        has(fattr::UID).then_some(uid),
        has(fattr::GID).then_some(gid),
        has(fattr::SIZE).then_some(size),
        time_or_now(0, fattr::ATIME, fattr::ATIME_NOW),
        time_or_now(1, fattr::MTIME, fattr::MTIME_NOW),
        has(fattr::CTIME).then(|| time(2)),
        has(fattr::FH).then_some(fh),
        has(fattr::KILL_SUIDGID),
        ReplyAttr::new(answer),
    );
    Ok(())
}

const _: () = assert!(IN_HEADER_LEN == 40);

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;
    use proptest::prelude::*;
    use std::ffi::OsStr;
    use std::os::unix::net::UnixDatagram;

    /// Notes the calls that it gets.
    #[derive(Default)]
    struct Recorder(Mutex<Vec<String>>);

    impl Recorder {
        fn note(&self, what: String) {
            self.0.lock().push(what);
        }
    }

    impl Filesystem for Recorder {
        fn lookup(&self, req: &Request, parent: INodeNo, name: &OsStr, _reply: ReplyEntry) {
            self.note(format!("lookup {} {} {} {} {name:?}", req.uid, req.gid, req.pid, parent.0));
        }

        fn setattr(
            &self,
            _req: &Request,
            ino: INodeNo,
            mode: Option<u32>,
            uid: Option<u32>,
            gid: Option<u32>,
            size: Option<u64>,
            atime: Option<TimeOrNow>,
            mtime: Option<TimeOrNow>,
            ctime: Option<Timestamp>,
            fh: Option<FileHandle>,
            takes_set_ids: bool,
            _reply: ReplyAttr,
        ) {
            self.note(format!(
                "setattr {} {mode:?} {uid:?} {gid:?} {size:?} {atime:?} {mtime:?} {ctime:?} {fh:?} {takes_set_ids}",
                ino.0
            ));
        }

        fn tmpfile(
            &self,
            _req: &Request,
            parent: INodeNo,
            mode: u32,
            umask: u32,
            flags: i32,
            _reply: ReplyCreate,
        ) {
            self.note(format!("tmpfile {} {mode:o} {umask:o} {flags:o}", parent.0));
        }

        fn rename(
            &self,
            _req: &Request,
            parent: INodeNo,
            name: &OsStr,
            newparent: INodeNo,
            newname: &OsStr,
            flags: RenameFlags,
            _reply: ReplyEmpty,
        ) {
            self.note(format!("rename {} {name:?} {} {newname:?} {}", parent.0, newparent.0, flags.bits()));
        }

        fn write(
            &self,
            _req: &Request,
            ino: INodeNo,
            fh: FileHandle,
            offset: u64,
            data: &[u8],
            write_flags: WriteFlags,
            flags: OpenFlags,
            lock_owner: Option<LockOwner>,
            _reply: ReplyWrite,
        ) {
            let (flags, write_flags) = (flags.0, write_flags.bits());
            self.note(format!(
                "write {} {} {offset} {data:?} {write_flags} {flags} {lock_owner:?}",
                ino.0, fh.0
            ));
        }

        fn setlk(
            &self,
            _req: &Request,
            ino: INodeNo,
            fh: FileHandle,
            kind: LockKind,
            lock_owner: LockOwner,
            start: u64,
            end: u64,
            typ: i32,
            pid: u32,
            sleep: bool,
            _reply: ReplyEmpty,
        ) {
            let owner = lock_owner.0;
            self.note(format!("setlk {} {} {kind:?} {owner} {start} {end} {typ} {pid} {sleep}", ino.0, fh.0));
        }
    }

    fn message(opcode: u32, body: &[u8]) -> Vec<u8> {
        let mut message = Vec::new();
        message.extend_from_slice(&(40 + body.len() as u32).to_ne_bytes());
        message.extend_from_slice(&opcode.to_ne_bytes());
        message.extend_from_slice(&10u64.to_ne_bytes());
        message.extend_from_slice(&3u64.to_ne_bytes());
        for word in [100u32, 200, 300, 0] {
            message.extend_from_slice(&word.to_ne_bytes());
        }
        message.extend_from_slice(body);
        message
    }

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    /// A connection, and a socket in the place of the kernel's end.
    fn connection() -> (Arc<Connection>, UnixDatagram) {
        let (ours, kernels) = UnixDatagram::pair().expect("sockets");
        kernels.set_nonblocking(true).expect("nonblocking");
        (Connection::new(ours.into()), kernels)
    }

    fn asked(opcode: u32, body: &[u8]) -> Vec<String> {
        let (connection, _kernel) = connection();
        let recorder = Recorder::default();
        assert!(handle(&connection, &recorder, &message(opcode, body)));
        recorder.0.into_inner()
    }

    #[test]
    fn messages_are_as_the_kernel_sends_them() {
        assert_eq!(asked(opcode::LOOKUP, b"name\0"), [r#"lookup 100 200 300 3 "name""#]);
        let [low, high] = if cfg!(target_endian = "little") { [7, 0] } else { [0, 7] };
        let mut rename = words(&[low, high, 1, 0]);
        rename.extend_from_slice(b"a\0bc\0");
        assert_eq!(asked(opcode::RENAME2, &rename), [r#"rename 3 "a" 7 "bc" 1"#]);
        let mut rename = words(&[low, high]);
        rename.extend_from_slice(b"a\0bc\0");
        assert_eq!(asked(opcode::RENAME, &rename), [r#"rename 3 "a" 7 "bc" 0"#]);
        let mut tmpfile = words(&[0o20_200_002, 0o100_644, 0o22, 0]);
        tmpfile.extend_from_slice(b"/\0");
        assert_eq!(asked(opcode::TMPFILE, &tmpfile), ["tmpfile 3 100644 22 20200002"]);
        if cfg!(target_endian = "little") {
            let mut write = words(&[4, 0, 5, 0, 2, 2, 9, 0, 0o2001, 0]);
            write.extend_from_slice(b"xy");
            let expected = "write 3 4 5 [120, 121] 2 1025 Some(LockOwner(9))";
            assert_eq!(asked(opcode::WRITE, &write), [expected]);
            let lock = words(&[4, 0, 8, 0, 1, 0, 2, 0, 1, 77, 1, 0]);
            assert_eq!(asked(opcode::SETLK, &lock), ["setlk 3 4 Flock 8 1 2 1 77 false"]);
            let lock = words(&[4, 0, 8, 0, 1, 0, 2, 0, 1, 77, 0, 0]);
            assert_eq!(asked(opcode::SETLKW, &lock), ["setlk 3 4 Posix 8 1 2 1 77 true"]);
            // valid, -; fh; size; owner; atime, mtime, ctime; their nanoseconds; mode; -; uid, gid; -.
            let all = 1 | 2 | 4 | 8 | 16 | 32 | 64 | 256 | 1024 | 2048;
            let set =
                words(&[all, 0, 4, 0, 5, 0, 0, 0, 6, 0, 7, 0, u32::MAX, u32::MAX, 1, 2, 3, 8, 0, 9, 10, 0]);
            assert_eq!(
                asked(opcode::SETATTR, &set),
                ["setattr 3 Some(8) Some(9) Some(10) Some(5) \
                  Some(SpecificTime(Timestamp { secs: 6, nanos: 1 })) Some(Now) \
                  Some(Timestamp { secs: -1, nanos: 3 }) Some(FileHandle(4)) true"]
            );
            let none = [vec![0; 4], set[4..].to_vec()].concat();
            assert_eq!(
                asked(opcode::SETATTR, &none),
                ["setattr 3 None None None None None None None None false"]
            );
        }
    }

    #[test]
    fn the_end_is_answered_and_an_interrupt_and_a_forget_are_not() {
        let (connection, kernel) = connection();
        let recorder = Recorder::default();
        let number = words(&[1, 0]);
        assert!(handle(&connection, &recorder, &message(opcode::INTERRUPT, &number)));
        assert!(handle(&connection, &recorder, &message(opcode::FORGET, &number)));
        assert!(handle(&connection, &recorder, b"short"));
        let mut answer = [0; 100];
        assert!(kernel.recv(&mut answer).is_err());
        assert!(!handle(&connection, &recorder, &message(opcode::DESTROY, &[])));
        assert_eq!(kernel.recv(&mut answer).expect("an answer"), 16);
    }

    proptest! {
        /// Whatever follows the header, there is an answer, at least an error.
        #[test]
        fn every_request_is_answered(opcode in 0u32..60, body in proptest::collection::vec(0u8..4, 0..120)) {
            struct Nothing;
            impl Filesystem for Nothing {}
            let (connection, kernel) = connection();
            let message = message(opcode, &body);
            handle(&connection, &Nothing, &message);
            let mut answer = [0; 200];
            let answered = kernel.recv(&mut answer).is_ok();
            let wants_none = matches!(opcode, opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT);
            prop_assert_eq!(answered, !wants_none);
        }
    }
}
