"""What Linux lets programs do with inodes beyond reading and writing: one check a word, named on the command line.

usage: inodes.py CHECK DIRECTORY [OTHER-MOUNT'S-DIRECTORY]
A check that holds ends with status 0. Those that check permissions run parts as user 65534.
"""
import ctypes
import errno
import fcntl
import os
import stat
import struct
import sys
import time

libc = ctypes.CDLL(None, use_errno=True)
AT_FDCWD = -100
AT_SYMLINK_FOLLOW = 0x400
NOBODY = 65534
ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
OWNER, USER, OWNING_GROUP, GROUP, MASK, OTHERS = 1, 2, 4, 8, 0x10, 0x20
NONE = 0xFFFFFFFF
RENAME_NOREPLACE, RENAME_WHITEOUT = 1, 4
GET_FLAGS, SET_FLAGS = 0x80086601, 0x40086602
IMMUTABLE, APPEND_ONLY, NO_DUMP, NO_ATIME = 0x10, 0x20, 0x40, 0x80


def expect(found, wanted, what):
    if found != wanted:
        sys.exit(f"{what}: {found!r}, not {wanted!r}")


def refused(number, what, call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        return expect(errno.errorcode[error.errno], errno.errorcode[number], what)
    sys.exit(f"{what}: it was done")


def as_nobody(call, *arguments, gid=NOBODY):
    """Runs a call in a process of that user's; gives the name of its error, or nothing."""
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(NOBODY)
        try:
            call(*arguments)
        except OSError as error:
            os._exit(error.errno)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return errno.errorcode.get(status) if status else None


def acl(*entries):
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


def write(path, data=b"x", flags=os.O_WRONLY):
    file = os.open(path, flags)
    os.write(file, data)
    os.close(file)


def read(path):
    with open(path, "rb") as file:
        return file.read()


def rename(source, target, flags):
    if libc.renameat2(AT_FDCWD, source.encode(), AT_FDCWD, target.encode(), flags):
        raise OSError(ctypes.get_errno(), "renameat2")


def set_flags(path, flags):
    file = os.open(path, os.O_RDONLY)
    try:
        fcntl.ioctl(file, SET_FLAGS, struct.pack("L", flags))
    finally:
        os.close(file)


def get_flags(path):
    file = os.open(path, os.O_RDONLY)
    flags = struct.unpack("I", fcntl.ioctl(file, GET_FLAGS, bytes(8))[:4])[0]
    os.close(file)
    return flags


def answers_removed(file):
    """A directory that was removed while it was open."""
    expect(os.fstat(file).st_nlink, 0, "links of a removed directory")
    try:
        expect(os.listdir(file), [], "entries of a removed directory")
    except OSError as error:
        # It was removed through this mount, so the kernel does not list it any more.
        expect(error.errno, errno.ENOENT, "listing a removed directory")
    os.fsync(file)
    os.fchmod(file, 0o710)
    expect(stat.S_IMODE(os.fstat(file).st_mode), 0o710, "mode of a removed directory")
    make = lambda: os.open("new", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=file)
    refused(errno.ENOENT, "a file in a removed directory", make)


def removed_directory(directory, other):
    for remover in [directory, other]:
        for how in ["rmdir", "rename over"]:
            path = f"{directory}/gone"
            os.mkdir(path)
            file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            if how == "rmdir":
                os.rmdir(f"{remover}/gone")
            else:
                os.mkdir(f"{remover}/over")
                os.rename(f"{remover}/over", f"{remover}/gone")
                os.rmdir(f"{remover}/gone")
            if remover == other:
                # Attributes may be cached for a second.
                time.sleep(1.2)
            answers_removed(file)
            os.close(file)


def removed_directory_and_restart(directory, _other):
    """Waits for a line on standard input while it has a removed directory open."""
    path = f"{directory}/outlives"
    os.mkdir(path)
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    os.rmdir(path)
    print("open", flush=True)
    sys.stdin.readline()
    answers_removed(file)
    os.close(file)


def acls(directory, other):
    path, seen = f"{directory}/listed", f"{other}/listed"
    write(path, b"secret", os.O_CREAT | os.O_WRONLY)
    os.chmod(path, 0o640)
    refused(errno.ENODATA, "no list yet", os.getxattr, path, ACCESS)
    expect(as_nobody(read, path), "EACCES", "reading without a list")
    def with_mask(mask):
        return acl((OWNER, 6, NONE), (USER, 4, NOBODY), (OWNING_GROUP, 4, NONE), (MASK, mask, NONE), (OTHERS, 0, NONE))

    listed = with_mask(4)
    os.setxattr(path, ACCESS, listed)
    expect(os.getxattr(path, ACCESS), listed, "the list")
    expect(mode(path), 0o640, "the mode beside it")
    expect(as_nobody(read, path), None, "reading as the list allows")
    expect(as_nobody(write, path), "EACCES", "writing as the list does not allow")
    expect(as_nobody(os.setxattr, path, ACCESS, listed), "EPERM", "somebody else's list")
    # chmod changes the mask: at once on this mount, within a second on another one.
    os.chmod(path, 0o600)
    expect(as_nobody(read, path), "EACCES", "reading past the mask")
    expect(os.getxattr(path, ACCESS), with_mask(0), "the mask")
    time.sleep(1.2)
    expect(os.getxattr(seen, ACCESS), with_mask(0), "the mask elsewhere")
    refused(errno.EINVAL, "a list without owner", os.setxattr, path, ACCESS, acl((OWNING_GROUP, 4, NONE)))
    refused(errno.EACCES, "a default list of a file", os.setxattr, path, DEFAULT, listed)
    minimal = acl((OWNER, 6, NONE), (OWNING_GROUP, 0, NONE), (OTHERS, 4, NONE))
    os.setxattr(path, ACCESS, minimal)
    expect(mode(path), 0o604, "the mode of a list that says no more")
    refused(errno.ENODATA, "a list that says no more is not kept", os.getxattr, path, ACCESS)


def inherited_acls(directory, _other):
    parent = f"{directory}/parent"
    os.mkdir(parent)
    default = acl((OWNER, 7, NONE), (USER, 6, NOBODY), (OWNING_GROUP, 5, NONE), (MASK, 7, NONE), (OTHERS, 0, NONE))
    os.setxattr(parent, DEFAULT, default)
    before = os.umask(0o077)
    os.close(os.open(f"{parent}/file", os.O_CREAT | os.O_WRONLY, 0o666))
    os.mkdir(f"{parent}/below", 0o777)
    os.mknod(f"{parent}/fifo", stat.S_IFIFO | 0o666)
    os.close(os.open(f"{directory}/masked", os.O_CREAT | os.O_WRONLY, 0o666))
    os.umask(before)
    expect(mode(f"{parent}/file"), 0o660, "the umask does not count beside a default list")
    expect(mode(f"{parent}/fifo"), 0o660, "nor for what mknod makes")
    expect(mode(f"{directory}/masked"), 0o600, "it counts elsewhere")
    expect(os.getxattr(f"{parent}/below", DEFAULT), default, "a directory's default list")
    refused(errno.ENODATA, "a file has no default list", os.getxattr, f"{parent}/file", DEFAULT)
    os.chmod(parent, 0o700)
    expect(as_nobody(write, f"{parent}/file"), "EACCES", "a default list is not the directory's own")
    os.chmod(parent, 0o755)
    expect(as_nobody(write, f"{parent}/file"), None, "what is inherited holds")


def set_group_id(directory, _other):
    """chmod(2) and setfacl(1) of somebody who is not in the file's group take the bit; so does a write."""
    path = f"{directory}/group"
    list_of_three = acl((OWNER, 7, NONE), (OWNING_GROUP, 7, NONE), (OTHERS, 7, NONE))
    for gid, left in [(100, 0o2777), (101, 0o777)]:
        write(path, b"x", os.O_CREAT | os.O_WRONLY)
        os.chown(path, NOBODY, 100)
        os.chmod(path, 0o2755)
        expect(as_nobody(os.setxattr, path, ACCESS, list_of_three, gid=gid), None, "a list of one's own file")
        expect(mode(path), left, f"after a list by group {gid}")
    for before, after in [(0o6666, 0o666), (0o6676, 0o676), (0o2666, 0o666)]:
        for what, change in [("write", write), ("truncate", lambda path: os.truncate(path, 3)),
                             ("allocate", lambda path: os.posix_fallocate(os.open(path, os.O_WRONLY), 0, 9999))]:
            os.chown(path, 0, 0)
            os.chmod(path, before)
            expect(as_nobody(change, path), None, what)
            expect(oct(mode(path)), oct(after), f"after {what} of {before:o}")
            os.chmod(path, before)
            change(path)
            expect(oct(mode(path)), oct(before), f"after root's {what} of {before:o}")


def whiteouts(directory, other):
    for name in ["one", "two"]:
        write(f"{directory}/{name}", name.encode(), os.O_CREAT | os.O_WRONLY)
    rename(f"{directory}/one", f"{directory}/moved", RENAME_WHITEOUT)
    refused(errno.EEXIST, "not over a name", rename, f"{directory}/two", f"{directory}/moved",
            RENAME_WHITEOUT | RENAME_NOREPLACE)
    rename(f"{directory}/two", f"{directory}/moved", RENAME_WHITEOUT)
    for seen in [directory, other]:
        expect(read(f"{seen}/moved"), b"two", "what was moved")
        for name in ["one", "two"]:
            left = os.lstat(f"{seen}/{name}")
            expect((stat.S_ISCHR(left.st_mode), left.st_rdev), (True, 0), f"what is left of {name}")


def marks(directory, other):
    path = f"{directory}/marked"
    write(path, b"x", os.O_CREAT | os.O_WRONLY)
    os.mkdir(f"{directory}/fixed")
    expect(get_flags(path), 0, "marks of a new file")
    set_flags(path, NO_DUMP | NO_ATIME)
    expect(get_flags(f"{other}/marked"), NO_DUMP | NO_ATIME, "marks elsewhere")
    refused(errno.EOPNOTSUPP, "a mark that there is not", set_flags, path, 0x4000)
    opened = [os.open(f"{mount}/marked", os.O_RDWR) for mount in [directory, other]]
    set_flags(path, IMMUTABLE)
    for descriptor in opened:
        refused(errno.EPERM, "writing by a descriptor from before", os.pwrite, descriptor, b"y", 0)
        refused(errno.EPERM, "cutting by a descriptor from before", os.ftruncate, descriptor, 0)
        refused(errno.EPERM, "reserving by a descriptor from before", os.posix_fallocate, descriptor, 0, 9999)
    for mount in [directory, other]:
        marked = f"{mount}/marked"
        for what, call, *arguments in [
            ("write", write, marked), ("truncate", os.truncate, marked, 0), ("chmod", os.chmod, marked, 0o600),
            ("unlink", os.unlink, marked), ("link", os.link, marked, f"{mount}/again"),
            ("rename", os.rename, marked, f"{mount}/elsewhere"), ("setxattr", os.setxattr, marked, "user.a", b"x"),
            ("utime", os.utime, marked), ("rename over", os.rename, f"{mount}/fixed", marked),
        ]:
            number = errno.ENOTDIR if what == "rename over" else errno.EPERM
            refused(number, f"{what} of what is immutable", call, *arguments)
    expect(read(path), b"x", "reading what is immutable")
    set_flags(path, APPEND_ONLY)
    refused(errno.EPERM, "writing elsewhere than at the end", write, path)
    refused(errno.EPERM, "cutting", os.truncate, path, 0)
    refused(errno.EPERM, "removing", os.unlink, path)
    write(path, b"y", os.O_WRONLY | os.O_APPEND)
    os.utime(path)
    expect(read(path), b"xy", "what was added")
    set_flags(path, 0)
    for descriptor in opened:
        expect(os.pwrite(descriptor, b"x", 0), 1, "writing by a descriptor that was refused once")
        os.close(descriptor)
    os.chmod(path, 0o600)
    set_flags(f"{directory}/fixed", IMMUTABLE)
    refused(errno.EPERM, "a name in an immutable directory", os.mkdir, f"{directory}/fixed/new")
    set_flags(f"{directory}/fixed", APPEND_ONLY)
    os.mkdir(f"{directory}/fixed/new")
    refused(errno.EPERM, "removing from a directory that is only added to", os.rmdir, f"{directory}/fixed/new")
    set_flags(f"{directory}/fixed", 0)
    os.rmdir(f"{directory}/fixed/new")


def give_name(file, path):
    if libc.linkat(AT_FDCWD, f"/proc/self/fd/{file}".encode(), AT_FDCWD, path.encode(), AT_SYMLINK_FOLLOW):
        raise OSError(ctypes.get_errno(), "linkat")


def has_nameless(directory, _other):
    """Whether this kernel asks for them."""
    try:
        os.close(os.open(directory, os.O_TMPFILE | os.O_WRONLY, 0o600))
    except OSError as error:
        # The checks report any other error.
        if error.errno == errno.EOPNOTSUPP:
            sys.exit("this kernel asks for no files without a name")


def nameless(directory, other):
    """O_TMPFILE: whole before it has a name, and gone if it gets none."""
    used = os.statvfs(directory).f_files - os.statvfs(directory).f_ffree
    file = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o640)
    os.write(file, b"whole")
    os.fsync(file)
    expect(os.fstat(file).st_nlink, 0, "names before there is one")
    expect(os.listdir(other), [], "entries")
    give_name(file, f"{directory}/named")
    expect(os.fstat(file).st_nlink, 1, "names")
    expect(read(f"{other}/named"), b"whole", "what it holds elsewhere")
    refused(errno.EEXIST, "the same name again", give_name, file, f"{directory}/named")
    os.close(file)
    expect(read(f"{directory}/named"), b"whole", "what it holds when it is closed")
    file = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600)
    os.write(file, bytes(1 << 20))
    refused(errno.ENOENT, "a name in spite of O_EXCL", give_name, file, f"{directory}/never")
    os.close(file)
    os.unlink(f"{directory}/named")
    for _ in range(50):
        if os.statvfs(directory).f_files - os.statvfs(directory).f_ffree <= used:
            break
        time.sleep(0.1)
    else:
        sys.exit("files that have no name are still there")
    # A file that gets a name is like one that was created there: the directory's group and ACL, its permissions, its marks.
    os.chown(directory, 0, 123)
    os.chmod(directory, 0o2750)
    make = lambda: os.close(os.open(directory, os.O_TMPFILE | os.O_WRONLY, 0o600))
    expect(as_nobody(make), "EACCES", "one in somebody else's directory")
    os.setxattr(directory, DEFAULT, acl((OWNER, 6, NONE), (USER, 4, NOBODY), (OWNING_GROUP, 4, NONE), (MASK, 4, NONE), (OTHERS, 0, NONE)))
    file = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o666)
    found = os.fstat(file)
    expect((found.st_gid, stat.S_IMODE(found.st_mode)), (123, 0o640), "group and mode")
    give_name(file, f"{directory}/listed")
    os.close(file)
    expect(len(os.getxattr(f"{other}/listed", ACCESS)) > 4, True, "an inherited list")
    set_flags(directory, IMMUTABLE)
    refused(errno.EPERM, "one in an immutable directory", make)
    set_flags(directory, 0)


def nameless_and_restart(directory, _other):
    """Waits for a line on standard input while it has files without a name."""
    def made(size):
        file = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
        os.write(file, os.urandom(8) * (size // 8))
        return file
    named, never = made(100_000), made(3 << 20)
    os.fsync(named)
    before = os.pread(named, 100_000, 0), os.pread(never, 3 << 20, 0)
    print("open", flush=True)
    sys.stdin.readline()
    expect((os.pread(named, 100_000, 0), os.pread(never, 3 << 20, 0)) == before, True, "bytes of before")
    give_name(named, f"{directory}/named")
    print("named", flush=True)
    sys.stdin.readline()
    expect(os.fstat(named).st_nlink, 1, "names")
    expect(os.fstat(never).st_nlink, 0, "names of one without")
    expect(read(f"{directory}/named") == before[0], True, "bytes by the name")
    os.close(named)
    os.close(never)
    expect(os.listdir(directory), ["named"], "entries")


def handle_of(path):
    handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128))
    mount_id = ctypes.c_int()
    if libc.name_to_handle_at(AT_FDCWD, path.encode(), handle, ctypes.byref(mount_id), 0):
        sys.exit(f"name_to_handle_at: {os.strerror(ctypes.get_errno())}")
    return handle


def forget_inodes():
    with open("/proc/sys/vm/drop_caches", "w") as drop:
        drop.write("2")


def directory_handles(directory, other):
    """The same of directories: the way up to the root is found, also when they were moved."""
    os.makedirs(f"{directory}/one/two/three")
    write(f"{directory}/one/two/three/file", b"deep", os.O_CREAT | os.O_WRONLY)
    handle = handle_of(f"{directory}/one/two/three")
    mount = os.open(os.path.dirname(directory), os.O_RDONLY)
    for place in ["one/two", "moved"]:
        forget_inodes()
        file = libc.open_by_handle_at(mount, handle, os.O_RDONLY | os.O_DIRECTORY)
        if file < 0:
            sys.exit(f"open_by_handle_at in {place}: {os.strerror(ctypes.get_errno())}")
        expect(os.listdir(file), ["file"], "entries")
        expect(os.readlink(f"/proc/self/fd/{file}"), f"{directory}/{place}/three", "its path")
        os.close(file)
        if place != "moved":
            os.rename(f"{other}/one/two", f"{other}/moved")
            # Names may be cached for a second.
            time.sleep(1.2)


def handles(directory, _other):
    """name_to_handle_at(2), and back when the kernel has forgotten the inode."""
    path = f"{directory}/handled"
    write(path, b"by number", os.O_CREAT | os.O_WRONLY)
    handle = handle_of(path)
    forget_inodes()
    mount = os.open(directory, os.O_RDONLY)
    file = libc.open_by_handle_at(mount, handle, os.O_RDONLY)
    if file < 0:
        sys.exit(f"open_by_handle_at: {os.strerror(ctypes.get_errno())}")
    expect(os.read(file, 100), b"by number", "what the handle opens")
    os.close(file)
    os.unlink(path)
    # The server closes the file a little later; as long as it is open there, its handle is valid.
    for _ in range(50):
        file = libc.open_by_handle_at(mount, handle, os.O_RDONLY)
        if file < 0:
            return expect(ctypes.get_errno(), errno.ESTALE, "a removed file's handle")
        os.close(file)
        time.sleep(0.1)
    sys.exit("a removed file was opened")


if __name__ == "__main__":
    check, directory = sys.argv[1], sys.argv[2]
    globals()[check](directory, sys.argv[3] if len(sys.argv) > 3 else directory)
