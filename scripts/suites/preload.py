#!/usr/bin/env python3
"""What a program may do with descriptors, while `cuttlefs preload` reads past FUSE beside it.

usage: preload.py MOUNT LOCAL [reread BEGUN | shortened OTHER]      MOUNT/file has the bytes of LOCAL

Every step compares with the bytes that must be there. With `reread` the program reads for some seconds, and makes the file BEGUN when it has begun.
With `shortened` another mount, OTHER, makes files shorter than the kernel knows them here.
"""

import mmap
import os
import random
import socket
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


if len(sys.argv) > 3:
    {"reread": reread, "shortened": shortened}[sys.argv[3]](sys.argv[4])
else:
    for part in (offsets, numbers_that_change_their_file, forks_and_threads, own_writes, removed):
        part()
        print(part.__name__, "as it should be")
