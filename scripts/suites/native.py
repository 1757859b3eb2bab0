#!/usr/bin/env python3
"""What a native program and a mount of the same server see of each other's changes.

usage: native.py LIBRARY URL KEY MOUNT PART
"""

import ctypes
import mmap
import os
import random
import sys
import threading

LIBRARY, URL, KEY, MOUNT, PART = sys.argv[1:6]
PAGE = 4096
SEED = 17

lib = ctypes.CDLL(LIBRARY, use_errno=False)
lib.cuttlefs_error.restype = ctypes.c_char_p
lib.cuttlefs_buffer_data.restype = ctypes.c_void_p
for name in ("pread", "pwrite", "append"):
    getattr(lib, f"cuttlefs_{name}").restype = ctypes.c_int64


class Options(ctypes.Structure):
    _fields_ = [
        ("key", ctypes.c_char_p),
        ("label", ctypes.c_char_p),
        ("subtree", ctypes.c_char_p),
        ("server_user", ctypes.c_int64),
        ("threads", ctypes.c_uint32),
        ("deadline_ms", ctypes.c_uint32),
    ]


class Stat(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("ino", "size", "allocated", "mtime", "ctime")] + [
        (name, ctypes.c_uint32) for name in ("mtime_ns", "ctime_ns", "mode", "nlink", "uid", "gid")
    ]


class Completion(ctypes.Structure):
    _fields_ = [("token", ctypes.c_uint64), ("result", ctypes.c_int64), ("offset", ctypes.c_uint64)]


def done(result):
    if result < 0:
        sys.exit(f"{os.strerror(-result)}: {lib.cuttlefs_error().decode()}")
    return result


u64, size = ctypes.c_uint64, ctypes.c_size_t


class Session:
    def __init__(self):
        self.handle = ctypes.c_void_p()
        options = Options(key=KEY.encode(), label=b"native.py")
        done(lib.cuttlefs_connect(URL.encode(), ctypes.byref(options), ctypes.byref(self.handle)))

    def stat(self, path):
        stat = Stat()
        result = lib.cuttlefs_stat(self.handle, path.encode(), ctypes.byref(stat))
        return stat if result == 0 else -result

    def open(self, path, flags=os.O_RDWR | os.O_CREAT):
        return File(self, path, flags)


class File:
    def __init__(self, session, path, flags):
        self.handle = ctypes.c_void_p()
        done(lib.cuttlefs_open(session.handle, path.encode(), flags, 0o644, ctypes.byref(self.handle)))

    def read(self, offset, length):
        room = ctypes.create_string_buffer(length)
        got = done(lib.cuttlefs_pread(self.handle, room, size(length), u64(offset)))
        return room.raw[:got]

    def write(self, offset, data):
        done(lib.cuttlefs_pwrite(self.handle, data, size(len(data)), u64(offset)))

    def append(self, data):
        return done(lib.cuttlefs_append(self.handle, data, size(len(data))))

    def truncate(self, length):
        done(lib.cuttlefs_ftruncate(self.handle, u64(length)))

    def sync(self):
        done(lib.cuttlefs_fsync(self.handle))

    def close(self):
        lib.cuttlefs_file_free(self.handle)


def same(got, expected, what):
    if got != expected:
        sys.exit(f"{what}: {len(got)} bytes that differ from the {len(expected)} that were expected")


def at_mount(name):
    return os.path.join(MOUNT, name)


def mount_writes(session):
    length = 24 << 20
    source = random.Random(SEED)
    model = bytearray(source.randbytes(length))
    fd = os.open(at_mount("a"), os.O_RDWR | os.O_CREAT)
    for at in range(0, length, 1 << 20):
        os.pwrite(fd, model[at : at + (1 << 20)], at)
    file = session.open("a")
    for step in range(1500):
        at, count = source.randrange(length), source.randrange(1, 20000)
        part = source.randbytes(min(count, length - at))
        os.pwrite(fd, part, at)
        model[at : at + len(part)] = part
        begin = max(0, at - 5000)
        same(file.read(begin, len(part) + 10000), bytes(model[begin : begin + len(part) + 10000]), f"step {step}")
    os.ftruncate(fd, 5 << 20)
    same(file.read(0, length), bytes(model[: 5 << 20]), "cut by the mount")
    os.close(fd)
    file.close()


def native_writes(session):
    length = 1 << 20
    source = random.Random(SEED)
    model = bytearray(source.randbytes(length))
    file = session.open("b")
    file.write(0, bytes(model))
    direct = os.open(at_mount("b"), os.O_RDONLY | os.O_DIRECT)
    buffer = mmap.mmap(-1, 16 * PAGE)
    for step in range(400):
        at = source.randrange(length // PAGE - 16) * PAGE
        part = source.randbytes(source.randrange(1, 16 * PAGE))
        file.write(at, part)
        model[at : at + len(part)] = part
        got = os.preadv(direct, [buffer], at)
        same(buffer[:got], bytes(model[at : at + 16 * PAGE]), f"direct, step {step}")
        if step % 10 == 0:
            with open(at_mount("b"), "rb") as cached:
                same(cached.read(), bytes(model), f"opened again, step {step}")
    os.close(direct)
    file.close()


def mapping(session):
    fd = os.open(at_mount("c"), os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 64 * PAGE)
    file = session.open("c")
    with mmap.mmap(fd, 64 * PAGE) as mapped:
        for step in range(200):
            page = step % 64
            stored = b"%08d" % step
            mapped[page * PAGE : page * PAGE + 8] = stored
            mapped.flush(page * PAGE, PAGE)
            same(file.read(page * PAGE, 8), stored, f"step {step}")
    os.close(fd)
    file.close()


def appends(session):
    count = 300
    files = [session.open("d"), Session().open("d")]

    def record(who, number):
        return (b"%d %05d " % (who, number)).ljust(20 + (number * 37) % 3000, b".") + b"\n"

    def natively(who):
        for number in range(count):
            files[who].append(record(who, number))

    def by_mount():
        fd = os.open(at_mount("d"), os.O_WRONLY | os.O_APPEND)
        for number in range(count):
            os.write(fd, record(2, number))
        os.close(fd)

    threads = [threading.Thread(target=natively, args=(who,)) for who in (0, 1)]
    threads.append(threading.Thread(target=by_mount))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = sorted(record(who, number) for who in range(3) for number in range(count))
    for what, read in (("natively", files[0].read(0, 64 << 20)), ("by the mount", open(at_mount("d"), "rb").read())):
        same(b"".join(sorted(read.splitlines(keepends=True))), b"".join(expected), f"records read {what}")


def names(session):
    # The mount may remember for a second that a name is missing, so it looks at those that it has not asked for.
    file = session.open("e")
    file.write(0, b"hello")
    with open(at_mount("e"), "rb") as seen:
        same(seen.read(), b"hello", "a file that was made natively")
    assert session.stat("e").size == 5 and session.stat("none") == 2
    os.rename(at_mount("e"), at_mount("f"))
    assert session.stat("e") == 2 and session.stat("f").ino == os.stat(at_mount("f")).st_ino
    os.unlink(at_mount("f"))
    same(file.read(0, 10), b"hello", "a file without a name")
    file.truncate(3)
    file.sync()
    same(file.read(0, 10), b"hel", "cut")
    file.close()
    os.mkdir(at_mount("directory"))
    names = []
    take = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, u64)
    for number in range(300):
        open(at_mount(f"directory/{number}"), "w").close()
    collect = take(lambda context, name, ino: names.append(name.decode()) or 0)
    done(lib.cuttlefs_readdir(session.handle, b"directory", collect, None))
    assert sorted(names) == sorted(str(number) for number in range(300)), names


def pages(session):
    """A page that is read while it is written is of before or after: never of both."""
    length, depth = 64 * PAGE, 16
    fd = os.open(at_mount("g"), os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, bytes([0]) * length, 0)
    file = session.open("g")
    queue, buffer = ctypes.c_void_p(), ctypes.c_void_p()
    done(lib.cuttlefs_queue_new(session.handle, size(depth), ctypes.byref(queue)))
    done(lib.cuttlefs_buffer_new(session.handle, size(depth * PAGE), ctypes.byref(buffer)))
    data = lib.cuttlefs_buffer_data(buffer)
    ended = False

    def write():
        value = 0
        while not ended:
            value = (value + 1) % 256
            for page in range(64):
                os.pwrite(fd, bytes([value]) * PAGE, page * PAGE)

    writer = threading.Thread(target=write)
    writer.start()
    source = random.Random(SEED)
    ends = (Completion * depth)()
    torn = None
    for _ in range(300):
        for place in range(depth):
            offset = u64(source.randrange(64) * PAGE)
            done(lib.cuttlefs_post_read(queue, u64(place), file.handle, offset, buffer, size(place * PAGE), size(PAGE)))
        left = depth
        while left > 0:
            got = done(lib.cuttlefs_wait(queue, ends, size(depth), ctypes.c_uint32(60000)))
            assert got > 0, "nothing comes"
            for end in ends[:got]:
                assert done(end.result) == PAGE
                page = ctypes.string_at(data + end.token * PAGE, PAGE)
                if page != page[:1] * PAGE:
                    torn = page
            left -= got
    ended = True
    writer.join()
    assert torn is None, "a page has bytes of two writes"
    lib.cuttlefs_queue_free(queue)
    lib.cuttlefs_buffer_free(buffer)


PARTS = {
    "mount-writes": mount_writes,
    "native-writes": native_writes,
    "mapping": mapping,
    "appends": appends,
    "names": names,
    "pages": pages,
}
PARTS[PART](Session())
