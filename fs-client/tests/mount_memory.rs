//! Real mounts of the in-memory volume: the results of system calls through the kernel and the FUSE edge.
//!
//! The tests need root and `/dev/fuse`. Where these are missing, the tests print that they tested nothing, and pass; with `CUTTLEFS_REQUIRE_FUSE=1`
//! (scripts/test.sh sets it) they fail instead.

// Each test program uses a part of this module.
#[allow(dead_code)]
mod memory_volume;

use cuttlefs_client::file::volume::{Caller, OpenHow, Volume};
use cuttlefs_client::fuse::{FuseSettings, MountTable, mount};
use cuttlefs_common::attr::SetAttr;
use cuttlefs_common::ids::TraceId;
use memory_volume::MemoryVolume;
use memory_volume::mount::{Mount, ROOT};
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, Mode, OFlags, RenameFlags, SeekFrom, Timespec, Timestamps, XattrFlags,
};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

const ROOT_CALLER: Caller = Caller::new(0, 0, TraceId(0));

fn errno(result: std::io::Result<impl std::fmt::Debug>) -> i32 {
    result.expect_err("an error").raw_os_error().expect("an errno")
}

#[test]
fn names_and_attributes() {
    let Some(m) = Mount::new(FuseSettings::default()) else {
        return;
    };
    let table = MountTable::read().expect("mounts");
    let entry = table.at(&m.dir.path().canonicalize().expect("canonical")).expect("in the table");
    assert_eq!((entry.source.as_str(), entry.fs_type.as_str()), ("shm:///test.sock", "fuse.cuttlefs"));

    assert_eq!(fs::metadata(m.dir.path()).expect("root").ino(), 1);
    fs::create_dir(m.path("d")).expect("mkdir");
    fs::write(m.path("d/f"), b"hello").expect("write");
    assert_eq!(fs::read(m.path("d/f")).expect("read"), b"hello");
    symlink("d/f", m.path("s")).expect("symlink");
    for _ in 0..3 {
        assert_eq!(fs::read_link(m.path("s")).expect("readlink"), Path::new("d/f"));
    }
    assert_eq!(m.volume.calls("read_link"), 1, "the kernel keeps targets");
    fs::hard_link(m.path("d/f"), m.path("h")).expect("link");
    assert_eq!(fs::metadata(m.path("h")).expect("stat").nlink(), 2);
    assert_eq!(errno(fs::remove_dir(m.path("d"))), libc::ENOTEMPTY);
    assert_eq!(errno(fs::remove_file(m.path("none"))), libc::ENOENT);
    assert_eq!(errno(fs::remove_dir(m.path("h"))), libc::ENOTDIR);
    assert_eq!(errno(File::open(m.path("h/x"))), libc::ENOTDIR);
    assert_eq!(errno(File::create(m.path(&"n".repeat(256)))), libc::ENAMETOOLONG);
    File::create(m.path(&"n".repeat(255))).expect("255 bytes are allowed");

    for (name, kind, mode, rdev) in [
        ("fifo", rustix::fs::FileType::Fifo, libc::S_IFIFO, 0),
        ("sock", rustix::fs::FileType::Socket, libc::S_IFSOCK, 0),
        ("char", rustix::fs::FileType::CharacterDevice, libc::S_IFCHR, rustix::fs::makedev(1, 3)),
        ("block", rustix::fs::FileType::BlockDevice, libc::S_IFBLK, rustix::fs::makedev(259, 70_000)),
        ("file", rustix::fs::FileType::RegularFile, libc::S_IFREG, 0),
    ] {
        rustix::fs::mknodat(CWD, m.path(name), kind, Mode::from_raw_mode(0o640), rdev).expect(name);
        let found = fs::symlink_metadata(m.path(name)).expect(name);
        assert_eq!((found.mode(), found.rdev()), (mode | 0o640, rdev), "{name}");
    }

    let space = rustix::fs::statvfs(m.dir.path()).expect("statvfs");
    assert_eq!((space.f_bsize, space.f_namemax, space.f_blocks), (4096, 255, 1 << 20));
    m.end();
}

#[test]
fn rename_in_all_its_forms() {
    let Some(m) = Mount::new(FuseSettings::default()) else {
        return;
    };
    let rename =
        |from: &str, to: &str, flags| rustix::fs::renameat_with(CWD, m.path(from), CWD, m.path(to), flags);
    fs::write(m.path("a"), b"a").expect("write");
    fs::write(m.path("b"), b"b").expect("write");
    assert_eq!(rename("a", "b", RenameFlags::NOREPLACE), Err(Errno::EXIST));
    rename("a", "b", RenameFlags::EXCHANGE).expect("exchange");
    assert_eq!(fs::read(m.path("a")).expect("read"), b"b");
    rename("a", "w", RenameFlags::WHITEOUT).expect("leaves a whiteout");
    let whiteout = fs::symlink_metadata(m.path("a")).expect("stat");
    assert!(whiteout.file_type().is_char_device() && whiteout.rdev() == 0);
    rename("w", "c", RenameFlags::NOREPLACE).expect("to a free name");
    fs::rename(m.path("c"), m.path("b")).expect("replace");
    assert_eq!(fs::read(m.path("b")).expect("read"), b"b");
    fs::create_dir_all(m.path("d/e")).expect("mkdir");
    assert_eq!(errno(fs::rename(m.path("d"), m.path("d/e/f"))), libc::EINVAL);
    assert_eq!(errno(fs::rename(m.path("b"), m.path("d"))), libc::EISDIR);
    m.end();
}

#[test]
fn setattr_takes_everything() {
    let Some(m) = Mount::new(FuseSettings::default()) else {
        return;
    };
    let path = m.path("f");
    fs::write(&path, vec![7; 10_000]).expect("write");
    rustix::fs::chown(&path, Some(rustix::fs::Uid::from_raw(12)), Some(rustix::fs::Gid::from_raw(34)))
        .expect("chown");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o4751)).expect("chmod");
    let found = fs::metadata(&path).expect("stat");
    assert_eq!((found.uid(), found.gid(), found.mode() & 0o7777), (12, 34, 0o4751));

    let file = OpenOptions::new().write(true).open(&path).expect("open");
    file.set_len(5000).expect("shorter");
    file.set_len(20_000).expect("longer");
    let bytes = fs::read(&path).expect("read");
    assert!(
        bytes.len() == 20_000
            && bytes[..5000].iter().all(|b| *b == 7)
            && bytes[5000..].iter().all(|b| *b == 0)
    );
    assert_eq!(fs::metadata(&path).expect("stat").blocks(), 16, "two pages are held");

    // Nanoseconds, and times before 1970.
    for (secs, nanos) in [
        (1_700_000_000, 123_456_789),
        (0, 1),
        (-1, 0),
        (-2, 800_000_000),
        (i64::MAX, 0),
        (i64::MIN, 0),
        (-3_000_000_000, 5),
    ] {
        let time = Timespec { tv_sec: secs, tv_nsec: nanos };
        let both = Timestamps { last_access: time, last_modification: time };
        rustix::fs::utimensat(CWD, &path, &both, AtFlags::empty()).expect("utimens");
        let found = fs::metadata(&path).expect("stat");
        assert_eq!((found.mtime(), found.mtime_nsec()), (secs, i64::from(nanos as i32)));
        assert_eq!((found.atime(), found.atime_nsec()), (secs, i64::from(nanos as i32)));
    }
    drop(file);
    let before = std::time::SystemTime::now() - Duration::from_secs(1);
    let now = Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW };
    let omit = Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT };
    let one = Timestamps { last_access: omit, last_modification: now };
    rustix::fs::utimensat(CWD, &path, &one, AtFlags::empty()).expect("utimens");
    let found = fs::metadata(&path).expect("stat");
    assert!(found.modified().expect("mtime") >= before);
    assert_eq!(found.atime(), -3_000_000_000, "UTIME_OMIT left it alone");
    m.end();
}

#[test]
fn set_id_bits_fall_when_someone_else_writes() {
    let Some(m) = Mount::new(FuseSettings::default()) else {
        return;
    };
    fs::set_permissions(m.dir.path(), fs::Permissions::from_mode(0o777)).expect("chmod");
    for (name, script) in [
        ("write", "echo x >> \"$0\""),
        ("truncate", ": > \"$0\""),
        ("cut", "truncate -s 3 \"$0\""),
        ("grow", "truncate -s 300 \"$0\""),
        ("dd", "dd if=/dev/zero of=\"$0\" bs=1 count=1 conv=notrunc"),
        ("direct", "dd if=/dev/zero of=\"$0\" bs=4096 count=1 conv=notrunc oflag=direct"),
        ("allocate", "fallocate -l 64k \"$0\""),
        ("punch", "fallocate -p -l 4k \"$0\""),
    ] {
        // In the second and third case the group may not execute the file and the writer is not in the group: there the kernel's own rule for FUSE
        // would keep the set-group-id bit.
        for (before, after) in [(0o6777, 0o777), (0o6666, 0o666), (0o2666, 0o666), (0o2676, 0o676)] {
            let path = m.path(name);
            fs::write(&path, b"#!/bin/sh\n").expect("write");
            fs::set_permissions(&path, fs::Permissions::from_mode(before)).expect("chmod");
            assert_eq!(fs::metadata(&path).expect("stat").mode() & 0o7777, before);
            run_as_nobody(script, &path);
            assert_eq!(fs::metadata(&path).expect("stat").mode() & 0o7777, after, "{name} {before:o}");
        }
    }
    // A writer with CAP_FSETID keeps the bits, whatever user it is: root, unless it has given the capability away.
    let path = m.path("capable");
    let nobody = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let lent = [&nobody[..], &["--inh-caps=+fsetid", "--ambient-caps=+fsetid"]].concat();
    for (who, after) in
        [(&[][..], 0o6777), (&["--bounding-set=-fsetid"], 0o777), (&nobody, 0o777), (&lent, 0o6777)]
    {
        for script in ["echo x >> \"$0\"", "truncate -s 3 \"$0\"", ": > \"$0\""] {
            fs::write(&path, b"#!/bin/sh\n").expect("write");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o6777)).expect("chmod");
            let status = Command::new("setpriv").args(who).args(["sh", "-c", script]).arg(&path).status();
            assert!(status.expect("setpriv").success(), "{who:?} {script}");
            assert_eq!(fs::metadata(&path).expect("stat").mode() & 0o7777, after, "{who:?} {script}");
        }
    }
    m.end();
}

fn run_as_nobody(script: &str, path: &Path) {
    use std::os::unix::process::CommandExt;
    // Everybody may search the parents of the temporary directory, and the directory itself is the root of the mount.
    let status = std::process::Command::new("sh")
        .args(["-c", script])
        .arg(path)
        .uid(65534)
        .gid(65534)
        .stderr(std::process::Stdio::null())
        .status()
        .expect("sh");
    assert!(status.success(), "{script}");
}

#[test]
fn bytes_holes_and_seeks() {
    let Some(m) = Mount::new(FuseSettings::default()) else {
        return;
    };
    let path = m.path("f");
    let file =
        OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path).expect("open");
    let pattern: Vec<u8> = (0..3_000_000u32).map(|i| (i * 7 + i / 251) as u8).collect();
    file.write_all_at(&pattern, 12_345).expect("write");
    let mut back = vec![0; pattern.len()];
    file.read_exact_at(&mut back, 12_345).expect("read");
    assert!(back == pattern);
    assert!(m.volume.calls("write") <= 6, "writes come in requests of up to 1 MiB");

    file.set_len(0).expect("truncate");
    file.write_all_at(b"x", 1 << 20).expect("write");
    let seek = |from| rustix::fs::seek(&file, from);
    assert_eq!(seek(SeekFrom::Data(0)), Ok(1 << 20));
    assert_eq!(seek(SeekFrom::Hole(0)), Ok(0));
    assert_eq!(seek(SeekFrom::Hole(1 << 20)), Ok((1 << 20) + 1));
    assert_eq!(seek(SeekFrom::Data((1 << 20) + 1)), Err(Errno::NXIO));

    let allocate = |flags, offset, len| rustix::fs::fallocate(&file, flags, offset, len);
    let len = || file.metadata().expect("stat").len();
    allocate(FallocateFlags::empty(), 0, 3 << 20).expect("reserve");
    assert_eq!((len(), file.metadata().expect("stat").blocks()), (3 << 20, 3 << 11));
    allocate(FallocateFlags::KEEP_SIZE, 0, 4 << 20).expect("reserve past the end");
    assert_eq!((len(), file.metadata().expect("stat").blocks()), (3 << 20, 4 << 11));
    allocate(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, 2 << 20).expect("punch");
    assert_eq!(file.metadata().expect("stat").blocks(), 2 << 11);
    let mut byte = [1];
    file.read_exact_at(&mut byte, 1 << 20).expect("read");
    assert_eq!(byte, [0], "punched out of the page cache too");
    file.write_all_at(b"yyyy", 100).expect("write");
    allocate(FallocateFlags::ZERO_RANGE, 101, 2).expect("zero");
    let mut four = [0; 4];
    file.read_exact_at(&mut four, 100).expect("read");
    assert_eq!(&four, b"y\0\0y");
    assert_eq!(allocate(FallocateFlags::COLLAPSE_RANGE, 0, 4096), Err(Errno::OPNOTSUPP));

    fs::write(m.path("from"), &pattern).expect("write");
    let (from, to) = (File::open(m.path("from")).expect("open"), File::create(m.path("to")).expect("create"));
    let (mut from_at, mut to_at) = (4096, 0);
    let copied =
        rustix::fs::copy_file_range(&from, Some(&mut from_at), &to, Some(&mut to_at), 1 << 20).expect("copy");
    assert_eq!(copied, 1 << 20);
    assert!(fs::read(m.path("to")).expect("read") == pattern[4096..4096 + (1 << 20)]);
    assert!(m.volume.calls("copy_range") >= 1);

    file.sync_all().expect("fsync");
    file.sync_data().expect("fdatasync");
    File::open(m.dir.path()).expect("open").sync_all().expect("fsync of a directory");
    assert_eq!((m.volume.calls("fsync"), m.volume.calls("fsync_dir")), (2, 1));
    // SAFETY: an ioctl without an argument on an open descriptor.
    let result = unsafe { libc::ioctl(std::os::fd::AsRawFd::as_raw_fd(&file), libc::FIONCLEX << 8) };
    assert_eq!((result, std::io::Error::last_os_error().raw_os_error()), (-1, Some(libc::ENOTTY)));
    drop((file, from, to));
    m.end();
}

#[test]
fn appends_and_exclusive_creates() {
    let Some(m) = Mount::new(FuseSettings::default()) else {
        return;
    };
    let path = m.path("log");
    let mut first = OpenOptions::new().append(true).create(true).open(&path).expect("open");
    let mut second = OpenOptions::new().append(true).open(&path).expect("open");
    first.write_all(b"one ").expect("append");
    second.write_all(b"two ").expect("append");
    first.write_all(b"three").expect("append");
    assert_eq!(fs::read(&path).expect("read"), b"one two three");
    assert_eq!(errno(OpenOptions::new().write(true).create_new(true).open(&path)), libc::EEXIST);
    drop((first, second));

    // Unlinked while open: readable until closed, then gone.
    let mut orphan = File::open(&path).expect("open");
    fs::remove_file(&path).expect("unlink");
    let mut text = String::new();
    orphan.read_to_string(&mut text).expect("read");
    assert_eq!(text, "one two three");
    drop(orphan);
    let volume = Arc::clone(&m.volume);
    m.end();
    assert_eq!(volume.inodes(), 1, "only the root is left");
}

#[test]
fn files_without_a_name() {
    let Some(m) = Mount::new(FuseSettings::default()) else {
        return;
    };
    let open = |flags: OFlags| {
        let made = rustix::fs::open(
            m.dir.path(),
            OFlags::TMPFILE | OFlags::RDWR | flags,
            Mode::from_raw_mode(0o640),
        );
        match made {
            // Before Linux 6.1 no FUSE file system supports O_TMPFILE.
            Err(Errno::OPNOTSUPP) if m.volume.calls("create_nameless") == 0 => None,
            made => Some(File::from(made.expect("open"))),
        }
    };
    let give_name = |file: &File, name: &str| {
        let at = format!("/proc/self/fd/{}", file.as_raw_fd());
        rustix::fs::linkat(CWD, at, CWD, m.path(name), AtFlags::SYMLINK_FOLLOW)
    };
    let Some(mut file) = open(OFlags::empty()) else {
        eprintln!("skipped: this kernel asks for no files without a name");
        return;
    };
    file.write_all(b"all of it").expect("write");
    file.sync_all().expect("fsync");
    let found = file.metadata().expect("stat");
    assert_eq!((found.nlink(), found.mode() & 0o7777, found.len()), (0, 0o640, 9));
    assert_eq!(fs::read_dir(m.dir.path()).expect("list").count(), 0);
    give_name(&file, "named").expect("link");
    assert_eq!(file.metadata().expect("stat").nlink(), 1);
    assert_eq!(fs::read(m.path("named")).expect("read"), b"all of it");
    assert_eq!(give_name(&file, "named"), Err(Errno::EXIST));
    drop(file);
    assert_eq!(fs::read(m.path("named")).expect("read"), b"all of it");
    let inodes = m.volume.inodes();
    let secret = open(OFlags::EXCL).expect("it did before");
    assert_eq!(m.volume.inodes(), inodes + 1);
    assert_eq!(give_name(&secret, "told"), Err(Errno::NOENT), "O_EXCL");
    drop(secret);
    fs::remove_file(m.path("named")).expect("remove");
    let removed = File::open(m.path("named")).expect_err("it is gone");
    assert_eq!(removed.raw_os_error(), Some(libc::ENOENT));
    // The kernel sends a close after close(2) has returned.
    while m.volume.inodes() > 1 {
        std::thread::sleep(Duration::from_millis(1));
    }
    m.end();
}

#[test]
fn create_of_a_name_that_another_client_made_asks_for_permission() {
    let settings = FuseSettings { negative_cache: Duration::from_secs(60), ..FuseSettings::default() };
    let Some(m) = Mount::new(settings) else {
        return;
    };
    fs::set_permissions(m.dir.path(), fs::Permissions::from_mode(0o777)).expect("chmod");
    for name in ["secret", "open"] {
        assert_eq!(errno(fs::metadata(m.path(name))), libc::ENOENT, "and the kernel remembers");
        // Another client makes the file, so this mount's kernel does not know of it.
        let mode = if name == "secret" { 0o600 } else { 0o666 };
        let how = OpenHow { write: true, ..OpenHow::default() };
        let (_, opened) =
            m.volume.create(&ROOT_CALLER, ROOT, name.as_bytes(), mode, true, how).expect("create");
        m.volume.write(&ROOT_CALLER, opened.handle, 0, b"theirs").expect("write");
        m.volume.release(opened.handle);
    }
    run_as_nobody("! cat 3<>\"$0\" <&3", &m.path("secret"));
    run_as_nobody("test \"$(cat 3<>\"$0\" <&3)\" = theirs", &m.path("open"));
    assert_eq!(fs::read(m.path("secret")).expect("read"), b"theirs");
    m.end();
}

#[test]
fn missing_names_are_remembered_as_long_as_asked() {
    for (negative_cache, lookups) in [(Duration::from_secs(60), 1), (Duration::ZERO, 3)] {
        let Some(m) = Mount::new(FuseSettings { negative_cache, ..FuseSettings::default() }) else {
            return;
        };
        for _ in 0..3 {
            assert_eq!(errno(fs::metadata(m.path("none"))), libc::ENOENT);
        }
        assert_eq!(m.volume.calls("lookup"), lookups);
        fs::write(m.path("none"), b"now it is there").expect("create");
        assert_eq!(fs::read(m.path("none")).expect("read"), b"now it is there");
        m.end();
    }
}

#[test]
fn large_directories_list_once_each_while_they_change() {
    let Some(m) = Mount::new(FuseSettings::default()) else {
        return;
    };
    let dir = m.path("d");
    fs::create_dir(&dir).expect("mkdir");
    let names: BTreeSet<String> = (0..3000).map(|i| format!("a-rather-long-name-{i:05}")).collect();
    for name in &names {
        File::create(dir.join(name)).expect("create");
    }
    let listed: Vec<String> = fs::read_dir(&dir)
        .expect("opendir")
        .map(|entry| entry.expect("entry").file_name().into_string().expect("utf-8"))
        .collect();
    assert_eq!(listed.len(), names.len());
    assert_eq!(listed.into_iter().collect::<BTreeSet<_>>(), names);
    assert!(m.volume.calls("read_dir") + m.volume.calls("read_dir_plus") > 3, "in several requests");

    // Removing what was listed must not make the rest skip: this is `rm -r`.
    for entry in fs::read_dir(&dir).expect("opendir") {
        fs::remove_file(entry.expect("entry").path()).expect("unlink");
    }
    fs::remove_dir(&dir).expect("empty now");

    let with_dots = std::process::Command::new("ls").arg("-fa").arg(m.dir.path()).output().expect("ls");
    assert_eq!(with_dots.stdout, b".\n..\n");
    m.end();
}

#[test]
fn extended_attributes() {
    let Some(m) = Mount::new(FuseSettings::default()) else {
        return;
    };
    let path = m.path("f");
    fs::write(&path, b"").expect("write");
    let set = |name: &str, value: &[u8], flags| rustix::fs::setxattr(&path, name, value, flags);
    let mut buffer = [0u8; 64];
    set("user.a", b"one", XattrFlags::CREATE).expect("create");
    assert_eq!(set("user.a", b"two", XattrFlags::CREATE), Err(Errno::EXIST));
    assert_eq!(set("user.b", b"two", XattrFlags::REPLACE), Err(Errno::NODATA));
    set("user.b", b"", XattrFlags::empty()).expect("an empty value");
    assert_eq!(rustix::fs::getxattr_query(&path, "user.a"), Ok(3));
    assert_eq!(rustix::fs::getxattr(&path, "user.a", &mut buffer[..2]), Err(Errno::RANGE));
    assert_eq!(rustix::fs::getxattr(&path, "user.a", &mut buffer), Ok(3));
    assert_eq!(&buffer[..3], b"one");
    assert_eq!(rustix::fs::listxattr_query(&path), Ok(14));
    assert_eq!(rustix::fs::listxattr(&path, &mut buffer), Ok(14));
    assert_eq!(&buffer[..14], b"user.a\0user.b\0");
    rustix::fs::removexattr(&path, "user.a").expect("remove");
    assert_eq!(rustix::fs::removexattr(&path, "user.a"), Err(Errno::NODATA));
    assert_eq!(rustix::fs::getxattr(&path, "system.posix_acl_access", &mut buffer), Err(Errno::NODATA));
    assert_eq!(rustix::fs::getxattr(&path, "system.nfs4_acl", &mut buffer), Err(Errno::OPNOTSUPP));

    // The kernel would ask for capabilities before each write, but the file's attributes say that it has none.
    let before = m.volume.calls("get_xattr");
    let file = OpenOptions::new().write(true).open(&path).expect("open");
    for at in 0..50 {
        file.write_all_at(b"x", at).expect("write");
    }
    assert!(m.volume.calls("get_xattr") - before <= 2, "{}", m.volume.calls("get_xattr") - before);
    drop(file);
    m.end();
}

#[test]
fn direct_and_uncached_opens_map_and_agree() {
    for settings in [FuseSettings::default(), FuseSettings::default().without_cache()] {
        let Some(m) = Mount::new(settings) else {
            return;
        };
        let path = m.path("f");
        fs::write(&path, vec![1; 8192]).expect("write");
        let cached = OpenOptions::new().read(true).write(true).open(&path).expect("open");
        let direct = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(OFlags::DIRECT.bits() as i32)
            .open(&path)
            .expect("O_DIRECT");
        let byte = |file: &File, at| {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).expect("read");
            byte[0]
        };
        assert_eq!((byte(&cached, 0), byte(&direct, 0)), (1, 1));
        direct.write_all_at(&[2; 4096], 0).expect("direct write");
        assert_eq!((byte(&cached, 0), byte(&direct, 4096)), (2, 1));
        cached.write_all_at(&[3; 10], 4096).expect("write");
        assert_eq!(byte(&direct, 4096), 3);

        for file in [&cached, &direct] {
            map_agrees(file);
        }
        drop((cached, direct));
        fs::copy("/bin/true", m.path("program")).expect("copy");
        let ran = std::process::Command::new(m.path("program")).status().expect("execute");
        assert!(ran.success());
        m.end();
    }
}

/// Checks that changes through a shared mapping show in reads, and writes in the mapping.
fn map_agrees(file: &File) {
    use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync, munmap};
    // SAFETY: a fresh mapping of a file that nobody truncates, used only in this function.
    unsafe {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let map = mmap(std::ptr::null_mut(), 8192, protection, MapFlags::SHARED, file, 0).expect("mmap");
        let bytes = map.cast::<u8>();
        bytes.add(5000).write_volatile(77);
        msync(map, 8192, MsyncFlags::SYNC).expect("msync");
        let mut byte = [0];
        file.read_exact_at(&mut byte, 5000).expect("read");
        assert_eq!(byte, [77]);
        file.write_all_at(&[78], 5001).expect("write");
        assert_eq!(bytes.add(5001).read_volatile(), 78);
        munmap(map, 8192).expect("munmap");
    }
}

/// The contents of a file in the volume, read without the kernel's cache.
fn held(volume: &MemoryVolume, name: &str) -> Vec<u8> {
    let attr = volume.lookup(&ROOT_CALLER, ROOT, name.as_bytes()).expect("lookup");
    let how = OpenHow { read: true, ..OpenHow::default() };
    let opened = volume.open(&ROOT_CALLER, attr.ino, how).expect("open");
    let mut bytes = Vec::new();
    let mut take = |got: &[u8]| bytes.extend_from_slice(got);
    volume.read(&ROOT_CALLER, opened.handle, 0, attr.size as u32, &mut take).expect("read");
    volume.release(opened.handle);
    bytes
}

#[test]
fn regression_mapped_writes_of_a_file_open_to_append_stay_in_their_place() {
    for settings in [FuseSettings::default(), FuseSettings::default().without_cache()] {
        let Some(m) = Mount::new(settings) else {
            return;
        };
        fs::write(m.path("f"), vec![1; 8192]).expect("write");
        let mut file = OpenOptions::new().read(true).append(true).open(m.path("f")).expect("open");
        set_mapped(&file, 5000, 2);
        file.write_all(&[3]).expect("append");
        let mut expected = vec![1; 8193];
        (expected[5000], expected[8192]) = (2, 3);
        assert!(held(&m.volume, "f") == expected);
        drop(file);
        m.end();
    }
}

#[test]
fn regression_appending_may_be_switched_off_and_on() {
    for settings in [FuseSettings::default(), FuseSettings::default().without_cache()] {
        let Some(m) = Mount::new(settings) else {
            return;
        };
        fs::write(m.path("f"), b"begun").expect("write");
        let file = OpenOptions::new().read(true).append(true).open(m.path("f")).expect("open");
        rustix::fs::fcntl_setfl(&file, OFlags::empty()).expect("F_SETFL");
        file.write_all_at(b"B", 0).expect("write");
        assert_eq!(held(&m.volume, "f"), b"Begun");

        rustix::fs::fcntl_setfl(&file, OFlags::APPEND).expect("F_SETFL");
        // Another client makes the file longer, and this kernel does not know it.
        let ino = m.volume.lookup(&ROOT_CALLER, ROOT, b"f").expect("lookup").ino;
        let how = OpenHow { write: true, ..OpenHow::default() };
        let theirs = m.volume.open(&ROOT_CALLER, ino, how).expect("open").handle;
        m.volume.write(&ROOT_CALLER, theirs, 5, b", theirs").expect("write");
        m.volume.release(theirs);
        file.write_all_at(b", ours", 0).expect("append");
        assert_eq!(held(&m.volume, "f"), b"Begun, theirs, ours");
        drop(file);
        m.end();
    }
}

#[test]
fn regression_a_single_write_can_ask_to_be_durable() {
    use rustix::io::ReadWriteFlags;
    for settings in [FuseSettings::default(), FuseSettings::default().without_cache()] {
        let Some(m) = Mount::new(settings) else {
            return;
        };
        let file = File::create(m.path("f")).expect("create");
        let syncs = || m.volume.calls("fsync") + m.volume.calls("durable_write");
        file.write_all_at(b"later", 0).expect("write");
        assert_eq!(syncs(), 0);
        let bytes = [std::io::IoSlice::new(b"now")];
        rustix::io::pwritev2(&file, &bytes, 0, ReadWriteFlags::DSYNC).expect("write");
        assert!(syncs() > 0, "nothing made it durable");
        drop(file);
        m.end();
    }
}

/// Sets a byte of the first 8 KiB through a shared mapping, and writes it back with msync(2).
fn set_mapped(file: &File, at: usize, byte: u8) {
    use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync, munmap};
    assert!(at < 8192);
    // SAFETY: a fresh mapping of a file that nobody truncates, used only in this function.
    unsafe {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let map = mmap(std::ptr::null_mut(), 8192, protection, MapFlags::SHARED, file, 0).expect("mmap");
        map.cast::<u8>().add(at).write_volatile(byte);
        msync(map, 8192, MsyncFlags::SYNC).expect("msync");
        munmap(map, 8192).expect("munmap");
    }
}

#[test]
fn what_another_client_changes_shows_in_time() {
    let settings = FuseSettings { attr_cache: Duration::from_millis(200), ..FuseSettings::default() };
    let Some(m) = Mount::new(settings) else {
        return;
    };
    let path = m.path("f");
    fs::write(&path, b"before").expect("write");
    assert_eq!(fs::read(&path).expect("read"), b"before");
    let ino = m.volume.lookup(&ROOT_CALLER, ROOT, b"f").expect("lookup").ino;
    let opened =
        m.volume.open(&ROOT_CALLER, ino, OpenHow { write: true, ..OpenHow::default() }).expect("open");
    m.volume.write(&ROOT_CALLER, opened.handle, 0, b"AFTER!").expect("write");
    m.volume.release(opened.handle);
    assert_eq!(fs::read(&path).expect("read"), b"AFTER!", "pages are dropped at open");
    let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    m.volume.set_attr(&ROOT_CALLER, ino, set).expect("chmod");
    std::thread::sleep(Duration::from_millis(250));
    assert_eq!(fs::metadata(&path).expect("stat").mode() & 0o777, 0o600);
    m.end();
}

#[test]
fn many_threads_at_once() {
    let Some(m) = Mount::new(FuseSettings::default()) else {
        return;
    };
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let m = &m;
            scope.spawn(move || {
                for round in 0..40 {
                    let path = m.path(&format!("t{thread}-{round}"));
                    fs::write(&path, vec![thread as u8; 10_000]).expect("write");
                    let moved = m.path(&format!("m{thread}-{round}"));
                    fs::rename(&path, &moved).expect("rename");
                    assert!(fs::read(&moved).expect("read") == vec![thread as u8; 10_000]);
                    if round % 2 == 0 {
                        fs::remove_file(&moved).expect("unlink");
                    }
                }
            });
        }
    });
    assert_eq!(fs::read_dir(m.dir.path()).expect("list").count(), 8 * 20);
    m.end();
}

#[test]
fn a_read_only_mount_refuses_changes() {
    let settings = FuseSettings { read_only: true, ..FuseSettings::default() };
    let Some(m) = Mount::new(settings) else {
        return;
    };
    assert_eq!(errno(fs::write(m.path("f"), b"x")), libc::EROFS);
    assert_eq!(m.volume.calls("create"), 0);
    m.end();
}

#[test]
fn mounting_on_nothing_is_an_error_and_leaves_nothing() {
    let volume = Arc::new(MemoryVolume::new(ROOT));
    let nowhere = Path::new("/nonexistent/cuttlefs");
    let mounted = mount(Arc::clone(&volume), "x", nowhere, &FuseSettings::default(), || ());
    let error = mounted.err().expect("an error");
    assert!(error.to_string().contains("/nonexistent/cuttlefs"), "{error}");
    assert!(!volume.is_shut_down());
}
