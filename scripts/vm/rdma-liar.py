#!/usr/bin/env python3
"""Files whose pages move all the time, and readers that know what they may read: beside rdma-liar.c.

usage: rdma-liar.py WRITING READING SECONDS SEED     two mounts of one server

One writer empties small files, by a cut or a hole, and writes them anew, so that their frames go to each other. Readers
read blocks past the page cache, and compare: each block says of which file, place and version it is, over and over.
Last line: checked N empty N wrong N. Exit status 1: a block was wrong, or a process failed.
"""
import ctypes
import mmap
import os
import random
import struct
import sys
import time

BLOCK = 4096
FILES = 32
# Blocks of a file. A read is of half of them at most.
BLOCKS = 16
READERS = 6
# Shared by all processes: for each file the version that the writer has begun, and the one that it has written; then
# for each reader how many blocks it has checked, found empty, and found wrong. Words of eight bytes, each with one writer.
BEGUN, WRITTEN, CHECKED, EMPTY, WRONG = 0, FILES, 2 * FILES, 2 * FILES + READERS, 2 * FILES + 2 * READERS
WORDS = 2 * FILES + 3 * READERS
# Wrong blocks of a reader that are described.
MOST_DESCRIBED = 3
PUNCH_HOLE_KEEP_SIZE = 3

libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def block(file, place, version):
    return struct.pack("<HHI", file, place, version) * (BLOCK // 8)


def describe(found):
    """The pieces of a block: from which byte on it is of which file, place and version."""
    pieces = []
    for at in range(0, BLOCK, 8):
        piece = struct.unpack_from("<HHI", found, at)
        if not pieces or pieces[-1][1] != piece:
            pieces.append((at, piece))
    return "; ".join(f"from {at} on file {f} place {p} version {v}" for at, (f, p, v) in pieces[:6])


def opened(mount, flags):
    return [os.open(os.path.join(mount, f"file-{file}"), flags | os.O_DIRECT, 0o644) for file in range(FILES)]


def write(files, words, file, way):
    version = words[BEGUN + file] + 1
    words[BEGUN + file] = version
    if way == "cut":
        os.ftruncate(files[file], 0)
    elif libc.fallocate(files[file], PUNCH_HOLE_KEEP_SIZE, 0, BLOCKS * BLOCK):
        raise OSError(ctypes.get_errno(), "fallocate")
    buffer = mmap.mmap(-1, BLOCKS * BLOCK)
    buffer[:] = b"".join(block(file, place, version) for place in range(BLOCKS))
    if os.pwritev(files[file], [buffer], 0) != len(buffer):
        raise OSError("a short write")
    words[WRITTEN + file] = version


def writer(mount, words, until, seed):
    files, chance = opened(mount, os.O_RDWR), random.Random(seed)
    while time.monotonic() < until:
        write(files, words, chance.randrange(FILES), chance.choice(("cut", "hole")))
        time.sleep(0.01)


def reader(number, mount, words, until, seed):
    files, chance = opened(mount, os.O_RDONLY), random.Random(seed * 1000 + number)
    buffer = mmap.mmap(-1, BLOCKS // 2 * BLOCK)
    while time.monotonic() < until:
        file, count = chance.randrange(FILES), chance.randint(1, BLOCKS // 2)
        first = chance.randint(0, BLOCKS - count)
        least = words[WRITTEN + file]
        got = os.preadv(files[file], [memoryview(buffer)[: count * BLOCK]], first * BLOCK)
        most = words[BEGUN + file]
        for place in range(first, first + got // BLOCK):
            found = buffer[(place - first) * BLOCK : (place - first + 1) * BLOCK]
            version = struct.unpack_from("<HHI", found)[2]
            if least <= version <= most and found == block(file, place, version):
                words[CHECKED + number] += 1
            elif least < most and not any(found):
                words[EMPTY + number] += 1
            else:
                words[WRONG + number] += 1
                if words[WRONG + number] <= MOST_DESCRIBED:
                    print(f"wrong: file {file} place {place} versions {least} to {most}: {describe(found)}", flush=True)


def fork(work, *arguments):
    child = os.fork()
    if child == 0:
        try:
            work(*arguments)
            os._exit(0)
        except BaseException as error:
            print(f"{work.__name__}: {error!r}", flush=True)
            os._exit(1)
    return child


def main():
    writing, reading, seconds, seed = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
    words = memoryview(mmap.mmap(-1, WORDS * 8)).cast("Q")
    files = opened(writing, os.O_RDWR | os.O_CREAT)
    for file in range(FILES):
        write(files, words, file, "cut")
    until = time.monotonic() + seconds
    children = [fork(writer, writing, words, until, seed)]
    children += [fork(reader, number, reading, words, until, seed) for number in range(READERS)]
    failed = sum(os.waitpid(child, 0)[1] != 0 for child in children)
    checked, empty, wrong = (sum(words[at : at + READERS]) for at in (CHECKED, EMPTY, WRONG))
    versions = sum(words[BEGUN : BEGUN + FILES])
    print(f"{versions} writes, {failed} processes failed")
    print(f"checked {checked} empty {empty} wrong {wrong}")
    sys.exit(1 if wrong or failed else 0)


main()
