#!/usr/bin/env python3
"""What a program may do with descriptors, while `cuttlefs preload` reads past FUSE beside it.

usage: preload.py MOUNT LOCAL [beside PART | reread BEGUN | shortened OTHER]      MOUNT/file has the bytes of LOCAL

Every step compares with the bytes that must be there. With `beside` other processes of this machine work on the file meanwhile, or the program itself
does by a mapping. With `reread` the program reads for some seconds, and makes the file BEGUN when it has begun. With `shortened` another mount, OTHER,
makes files shorter than the kernel knows them here.
"""

import ctypes
import mmap
import os
import random
import socket
import subprocess
import sys
import threading
import time

MOUNT, LOCAL = sys.argv[1:3]
FILE = os.path.join(MOUNT, "file")
with open(LOCAL, "rb") as local:
    BYTES = local.read()
PAGE = 4096
SEED = 11


def same(got, expected, what):
    if got != expected:
        sys.exit(f"{what}: {len(got)} bytes that differ from the {len(expected)} that were expected; they begin with {bytes(got[:16])!r}")


def warm(fd):
    """Reads so often that the library takes over."""
    for at in range(20):
        same(os.pread(fd, 100, at * 50), BYTES[at * 50 : at * 50 + 100], "warm")


def offsets():
    fd = os.open(FILE, os.O_RDONLY)
    warm(fd)
    other = os.dup(fd)
    at = 0
    source = random.Random(SEED)
    for step in range(500):
        which = fd if source.random() < 0.5 else other
        length = source.randrange(1, 20000)
        if source.random() < 0.1:
            at = os.lseek(which, source.randrange(len(BYTES)), os.SEEK_SET)
        got = os.read(which, length)
        same(got, BYTES[at : at + length], f"read {step}")
        at += len(got)
        assert os.lseek(fd, 0, os.SEEK_CUR) == at, "the offset"
    os.lseek(fd, len(BYTES) - 10, os.SEEK_SET)
    same(os.read(fd, 100), BYTES[-10:], "up to the end")
    same(os.read(fd, 100), b"", "at the end")
    same(os.pread(fd, 100, len(BYTES) + 5), b"", "behind the end")
    parts = [bytearray(10), bytearray(0), bytearray(5000)]
    assert os.preadv(fd, parts, 4090) == 5010
    same(b"".join(parts), BYTES[4090 : 4090 + 5010], "preadv")
    os.lseek(fd, 1, os.SEEK_SET)
    assert os.readv(fd, parts) == 5010 and os.lseek(other, 0, os.SEEK_CUR) == 5011
    same(b"".join(parts), BYTES[1:5011], "readv")
    os.close(other)
    os.close(fd)


def numbers_that_change_their_file():
    """A descriptor's number names other files later, by all the ways that there are."""
    path = os.path.join(MOUNT, "other")
    with open(path, "wb") as other:
        other.write(BYTES[::-1])
    fd = os.open(FILE, os.O_RDONLY)
    warm(fd)
    second = os.open(path, os.O_RDONLY)
    os.dup2(second, fd)
    for at in range(30):
        same(os.pread(fd, 64, at), BYTES[::-1][at : at + 64], "after dup2")
    reading, writing = os.pipe()
    os.dup2(reading, fd)
    os.write(writing, b"pipe")
    same(os.read(fd, 10), b"pipe", "a pipe in its place")
    os.closerange(3, 200)
    fd = os.open(FILE, os.O_RDONLY)
    warm(fd)
    # Everything that a daemon closes. What the library has open must not be hit, nor what it needs.
    for number in range(3, 1000):
        if number != fd:
            try:
                os.close(number)
            except OSError:
                pass
    for at in range(2000):
        same(os.pread(fd, 64, at * 100), BYTES[at * 100 : at * 100 + 64], "after everything was closed")
    os.close(fd)
    try:
        os.read(fd, 1)
        sys.exit("a closed descriptor reads")
    except OSError:
        pass
    writing = os.open(FILE, os.O_WRONLY)
    try:
        os.read(writing, 1)
        sys.exit("a descriptor for writing reads")
    except OSError:
        os.close(writing)
    os.unlink(path)


def forks_and_threads():
    """All readers of one open file together get each byte once."""
    fd = os.open(FILE, os.O_RDONLY)
    warm(fd)
    os.lseek(fd, 0, os.SEEK_SET)
    got = [[] for _ in range(4)]

    def read(mine):
        while part := os.read(fd, 1000):
            mine.append(part)

    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        for _ in range(300):
            part = os.read(fd, 1000)
            os.write(writing, len(part).to_bytes(4, "little") + part)
        os._exit(0)
    os.close(writing)
    threads = [threading.Thread(target=read, args=(mine,)) for mine in got]
    collected = []

    def collect():
        with os.fdopen(reading, "rb") as pipe:
            while length := pipe.read(4):
                collected.append(pipe.read(int.from_bytes(length, "little")))

    threads.append(threading.Thread(target=collect))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert os.waitpid(child, 0)[1] == 0, "the child failed"
    places = {BYTES[at : at + 1000]: at for at in range(0, len(BYTES), 1000)}
    parts = [part for mine in got for part in mine] + [part for part in collected if part]
    found = sorted(places.get(part, -1) for part in parts)
    same(bytes(str(found), "ascii"), bytes(str(sorted(places.values())), "ascii"), "parts of one open file")
    os.close(fd)
    # A descriptor that came over a socket.
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    child = os.fork()
    if child == 0:
        fd = os.open(FILE, os.O_RDONLY)
        socket.send_fds(theirs, [b"x"], [fd])
        os._exit(0)
    _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    os.waitpid(child, 0)
    warm(fds[0])
    os.close(fds[0])


def own_writes():
    path = os.path.join(MOUNT, "written")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    model = bytearray(BYTES[: 1 << 20])
    os.write(fd, model)
    source = random.Random(SEED)
    for step in range(400):
        at, length = source.randrange(len(model)), source.randrange(1, 9000)
        if step % 3 == 0:
            part = BYTES[at : at + length]
            os.pwrite(fd, part, at)
            model[at : at + len(part)] = part
        elif step % 50 == 1:
            os.ftruncate(fd, at)
            del model[at:]
            os.write(fd, b"") or os.lseek(fd, 0, os.SEEK_END)
            model += b"tail"
            os.write(fd, b"tail")
        same(os.pread(fd, length, at), bytes(model[at : at + length]), f"own writes, step {step}")
    # A mapping of another process's is seen when it is written back; one of this process at once.
    os.ftruncate(fd, 64 * PAGE)
    model = bytearray(os.pread(fd, 64 * PAGE, 0))
    warmed = [os.pread(fd, 10, 0) for _ in range(20)]
    same(warmed[-1], bytes(model[:10]), "before it is mapped")
    child = os.fork()
    if child == 0:
        with mmap.mmap(fd, 0) as mapped:
            mapped[5 * PAGE : 5 * PAGE + 5] = b"child"
            mapped.flush()
        os._exit(0)
    os.waitpid(child, 0)
    model[5 * PAGE : 5 * PAGE + 5] = b"child"
    same(os.pread(fd, 64 * PAGE, 0), bytes(model), "a flushed mapping of another process")
    with mmap.mmap(fd, 0) as mapped:
        for step in range(64):
            mapped[step * PAGE : step * PAGE + 4] = b"mine"
            model[step * PAGE : step * PAGE + 4] = b"mine"
            same(os.pread(fd, 8, step * PAGE), bytes(model[step * PAGE : step * PAGE + 8]), "a mapping's store")
    os.close(fd)
    os.unlink(path)


def removed():
    """A file without a name is read on, and its space comes back."""
    path = os.path.join(MOUNT, "removed")
    with open(path, "wb") as file:
        file.write(BYTES)
    fd = os.open(path, os.O_RDONLY)
    warm(fd)
    os.unlink(path)
    for at in range(0, len(BYTES), 100_000):
        same(os.pread(fd, 500, at), BYTES[at : at + 500], "a removed file")
    os.close(fd)


def beside(work):
    """Runs `work` in a forked process. It tells this one of each of its steps, and goes on while this one looks, but is no more than two steps ahead.
    Returns the process and the socket for that: a byte comes for each step, and one goes back."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child != 0:
        theirs.close()
        return child, ours
    ours.close()
    ahead = 0

    def wait(most):
        nonlocal ahead
        while ahead > most:
            assert theirs.recv(1), "nobody looks any more"
            ahead -= 1

    def tell():
        nonlocal ahead
        theirs.sendall(b"s")
        ahead += 1
        wait(2)

    try:
        work(tell)
        wait(0)
    except BaseException as error:
        print("beside:", repr(error), file=sys.stderr)
        os._exit(1)
    os._exit(0)


def ended(child, steps):
    assert steps.recv(1) == b"", "there are more steps"
    steps.close()
    assert os.waitpid(child, 0)[1] == 0, "the process beside this one failed"


PAGES = 64


def versions():
    """The pages that the writer writes, one after the other: each is full of its number in this list."""
    source = random.Random(SEED)
    return [source.randrange(PAGES) for _ in range(3000)]


def written():
    """Pages that another process writes, through the page cache and past it: a read that begins when write(2) has returned finds no older bytes."""
    path = os.path.join(MOUNT, "beside")
    with open(path, "wb") as file:
        file.write(bytes(PAGES * PAGE))
    fd = os.open(path, os.O_RDONLY)
    # Taken from here on: all of it is zeros.
    for _ in range(20):
        same(os.pread(fd, PAGE, 0), bytes(PAGE), "before it is written")

    def write(tell):
        cached, direct = os.open(path, os.O_WRONLY), os.open(path, os.O_WRONLY | os.O_DIRECT)
        aligned = mmap.mmap(-1, PAGE)
        for version, page in enumerate(versions(), 1):
            aligned[:] = version.to_bytes(8, "little") * (PAGE // 8)
            assert os.pwrite(direct if version % 4 == 0 else cached, aligned, page * PAGE) == PAGE
            tell()

    child, steps = beside(write)
    known, source = [0] * PAGES, random.Random(SEED + 1)
    for version, written_page in enumerate(versions(), 1):
        assert steps.recv(1), f"the writer has ended before write {version}"
        known[written_page] = version
        # The page that was written last, and any other.
        for page in (written_page, source.randrange(PAGES)):
            words = memoryview(os.pread(fd, PAGE, page * PAGE)).cast("Q")
            oldest = min(words) if len(words) == PAGE // 8 else -1
            if oldest < known[page]:
                sys.exit(f"page {page} has bytes of write {oldest}, and write {known[page]} has returned")
        steps.sendall(b"l")
    ended(child, steps)
    os.close(fd)
    os.unlink(path)


def appended():
    """What another process has appended is there, to the byte, when its write(2) has returned; by pread and by read at the offset."""
    path = os.path.join(MOUNT, "appended")
    source = random.Random(SEED)
    records = [BYTES[at : at + source.randrange(1, 6000)] for at in range(0, 1_500_000, 1000)]
    whole = b"".join(records)
    first = BYTES[: 1 << 20]
    with open(path, "wb") as file:
        file.write(first)
    fd = os.open(path, os.O_RDONLY)
    for at in range(20):
        same(os.pread(fd, 100, at), first[at : at + 100], "before it grows")

    def append(tell):
        fd = os.open(path, os.O_WRONLY | os.O_APPEND)
        for record in records:
            assert os.write(fd, record) == len(record)
            tell()

    child, steps = beside(append)
    os.lseek(fd, len(first), os.SEEK_SET)
    end = at = len(first)
    for done, record in enumerate(records, 1):
        assert steps.recv(1), f"the writer has ended before append {done}"
        end += len(record)
        place = max(len(first), end - source.randrange(20000))
        expected = whole[place - len(first) : end - len(first)]
        # It may go on behind what is known.
        same(os.pread(fd, len(expected) + 100, place)[: len(expected)], expected, f"the end behind append {done}")
        assert os.fstat(fd).st_size >= end, "the length"
        while at < end:
            got = os.read(fd, end - at)
            same(got, whole[at - len(first) : at - len(first) + len(got)] or b"more", f"the tail behind append {done}")
            at += len(got)
        steps.sendall(b"l")
    assert at == len(first) + len(whole), at
    ended(child, steps)
    same(os.pread(fd, len(whole), len(first)), whole, "all of it")
    os.close(fd)
    os.unlink(path)


def inherited():
    """A program that is started with descriptors of this one reads past FUSE, too. Both move one offset: together they get each byte once."""
    path = os.path.join(MOUNT, "inherited")
    with open(path, "wb") as file:
        file.write(BYTES)
    fd, both = os.open(FILE, os.O_RDONLY), os.open(path, os.O_RDWR)
    warm(fd)
    warm(both)
    os.lseek(fd, 0, os.SEEK_SET)
    command = [sys.executable, __file__, MOUNT, LOCAL, "started", f"{fd},{both}"]
    with subprocess.Popen(command, pass_fds=(fd, both), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.read(1) == b"w", "it is warm"
        child.stdin.close()
        collected, parts = [], []
        collector = threading.Thread(target=lambda: collected.append(child.stdout.read()))
        collector.start()
        while part := os.read(fd, 1000):
            parts.append(part)
        collector.join()
        assert child.wait() == 0, "the program that was started failed"
    (theirs,) = collected
    assert theirs and parts, "one of both has read nothing"
    while theirs:
        length = int.from_bytes(theirs[:4], "little")
        parts.append(theirs[4 : 4 + length])
        theirs = theirs[4 + length :]
    places = {BYTES[at : at + 1000]: at for at in range(0, len(BYTES), 1000)}
    found = sorted(places.get(part, -1) for part in parts)
    same(bytes(str(found), "ascii"), bytes(str(sorted(places.values())), "ascii"), "parts of one open file")
    for at in range(0, 2000, 100):
        same(os.pread(both, 100, at), b"started " + BYTES[at + 8 : at + 100], "what it wrote")
    os.close(fd)
    os.close(both)
    os.unlink(path)


def started(descriptors):
    """The program that `inherited` starts."""
    fd, both = map(int, descriptors.split(","))
    warm(both)
    for at in range(20):
        same(os.pread(fd, 100, at), BYTES[at : at + 100], "an inherited descriptor")
    sys.stdout.buffer.write(b"w")
    sys.stdout.flush()
    sys.stdin.read()
    while part := os.read(fd, 1000):
        sys.stdout.buffer.write(len(part).to_bytes(4, "little") + part)
    for at in range(0, 2000, 100):
        os.pwrite(both, b"started ", at)


libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_shared(fd, protection):
    """A mapping without a descriptor of its own: a close(2) of that would have what was stored written back."""
    address = libc.mmap(None, PAGES * PAGE, protection, mmap.MAP_SHARED, fd, 0)
    assert address not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    return address


def stored():
    """What the program has stored by a mapping, and nobody has written back, is there for its next read, by whatever descriptor."""
    reading_and_writing = mmap.PROT_READ | mmap.PROT_WRITE
    for case in ("mapped before it is read", "mapped when its reads are taken", "made writable later"):
        path = os.path.join(MOUNT, "stored")
        model = bytearray(BYTES[: PAGES * PAGE])
        with open(path, "wb") as file:
            file.write(model)
        fd, other = os.open(path, os.O_RDWR), os.open(path, os.O_RDONLY)
        if case != "mapped before it is read":
            warm(other)
        address = map_shared(fd, mmap.PROT_READ if case == "made writable later" else reading_and_writing)
        if case == "made writable later":
            warm(other)
            assert libc.mprotect(address, PAGES * PAGE, reading_and_writing) == 0
        for step in range(2 * PAGES):
            at = step % PAGES * PAGE + step
            ctypes.memmove(address + at, b"stored %03d" % step, 10)
            model[at : at + 10] = b"stored %03d" % step
            for which in (fd, other):
                same(os.pread(which, 20, at), bytes(model[at : at + 20]), f"{case}, step {step}")
        # It stays in the kernel's pages behind the end of the mapping.
        assert libc.munmap(address, PAGES * PAGE) == 0
        for _ in range(20):
            same(os.pread(other, PAGES * PAGE, 0), bytes(model), f"{case}, and not mapped any more")
        os.close(other)
        os.close(fd)
        os.unlink(path)


def reread(begun):
    fd = os.open(FILE, os.O_RDONLY)
    warm(fd)
    source = random.Random(SEED)
    until = time.monotonic() + 8
    count = 0
    while time.monotonic() < until:
        at = source.randrange(len(BYTES))
        same(os.pread(fd, 5000, at), BYTES[at : at + 5000], "across a restart")
        count += 1
        if count == 100:
            open(begun, "w").close()
    os.close(fd)


def shortened(other):
    """The kernel may know a length of before for a second. What does not come is no part of the offset."""
    half = len(BYTES) // 2
    for round in range(5):
        name = f"shortened{round}"
        with open(os.path.join(MOUNT, name), "wb") as file:
            file.write(BYTES)
        fd = os.open(os.path.join(MOUNT, name), os.O_RDONLY)
        warm(fd)
        os.lseek(fd, half - 100, os.SEEK_SET)
        os.truncate(os.path.join(other, name), half)
        same(os.read(fd, 1000), BYTES[half - 100 : half], "up to the new end")
        assert os.lseek(fd, 0, os.SEEK_CUR) == half, "the offset behind a short read"
        same(os.read(fd, 1000), b"", "at the new end")
        assert os.lseek(fd, 0, os.SEEK_CUR) == half, "the offset behind the end"
        os.close(fd)


BESIDE = {"written": written, "appended": appended, "inherited": inherited, "stored": stored}

if len(sys.argv) > 3:
    arranged = {"beside": lambda part: BESIDE[part](), "reread": reread, "shortened": shortened, "started": started}
    arranged[sys.argv[3]](sys.argv[4])
else:
    for part in (offsets, numbers_that_change_their_file, forks_and_threads, own_writes, removed):
        part()
        print(part.__name__, "as it should be")
