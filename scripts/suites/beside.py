#!/usr/bin/env python3
"""A mount that measures itself, for attack.sh.

usage: beside.py DIRECTORY SECONDS

Creates, writes, syncs, reads and removes files for so many seconds; prints how many a second it did and the longest it waited
for one, in milliseconds. Anything that fails or reads wrong ends it with a message.
"""
import os
import sys
import time

directory, seconds = sys.argv[1], float(sys.argv[2])
SMALL, LARGE = 16 * 1024, 1 << 20
done, longest = 0, 0.0
began = now = time.monotonic()
while now - began < seconds:
    path = f"{directory}/beside.{os.getpid()}.{done}"
    data = bytes([done % 251 + 1]) * (LARGE if done % 4 == 0 else SMALL)
    with open(path, "w+b", buffering=0) as file:
        assert file.write(data) == len(data)
        os.fsync(file.fileno())
        # So that the read comes from the server, not from the kernel's cache.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(file.fileno(), len(data), 0) == data, f"{path} reads wrong"
    os.unlink(path)
    before, now = now, time.monotonic()
    longest = max(longest, now - before)
    done += 1
print(f"{done / (now - began):.1f} {longest * 1000:.0f}")
