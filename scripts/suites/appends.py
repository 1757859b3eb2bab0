"""Several programs append to one file through several mounts: no record is torn, none is lost, each writer's are in order.

Records are of 1 byte to 1 MiB, from memory that begins within a page, in one part or in many.

usage: appends.py RECORDS PATH... (one path for each mount; all name the same new file)
"""
import mmap
import os
import random
import struct
import sys
import time
import zlib

WRITERS_A_MOUNT = 3
LARGEST = 1 << 20
PARTS_MAX = 1024
# length of all, writer, number, checksum of the rest
HEAD = struct.Struct("=IHII")


def length(chance):
    """All magnitudes alike, and the largest now and then."""
    return LARGEST if chance.random() < 0.03 else int(HEAD.size + 2 ** chance.uniform(0, 20) - 1)


def parts_of(memory, chance):
    """The same bytes in pieces, up to as many as writev(2) takes."""
    cuts = sorted(chance.randrange(len(memory)) for _ in range(chance.randrange(1, PARTS_MAX)))
    bounds = [0, *cuts, len(memory)]
    return [memory[start:end] for start, end in zip(bounds, bounds[1:]) if start < end]


def write_records(path, writer, records, seed):
    chance = random.Random(seed)
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    pages = memoryview(mmap.mmap(-1, LARGEST + 4096))
    noise = chance.randbytes(LARGEST)
    began = time.monotonic()
    for number in range(records):
        all_bytes = min(length(chance), LARGEST)
        body = noise[: all_bytes - HEAD.size]
        at = chance.randrange(4096)
        record = pages[at : at + all_bytes]
        record[: HEAD.size] = HEAD.pack(all_bytes, writer, number, zlib.crc32(body))
        record[HEAD.size :] = body
        written = os.writev(file, parts_of(record, chance)) if chance.random() < 0.3 else os.write(file, record)
        if written != all_bytes:
            sys.exit(f"writer {writer}: {written} bytes of record {number} of {all_bytes}")
    print(f"writer {writer}: {records / (time.monotonic() - began):.0f} records a second")
    os.close(file)


def check(path, writers, records):
    seen = [0] * writers
    with open(path, "rb") as file:
        while head := file.read(HEAD.size):
            place = file.tell() - len(head)
            if len(head) < HEAD.size:
                sys.exit(f"{path}: the last {len(head)} bytes are of no record")
            all_bytes, writer, number, checksum = HEAD.unpack(head)
            if not (HEAD.size <= all_bytes <= LARGEST and writer < writers):
                sys.exit(f"{path}: no record begins at {place}")
            if zlib.crc32(file.read(all_bytes - HEAD.size)) != checksum:
                sys.exit(f"{path}: record {number} of writer {writer} at {place}, {all_bytes} bytes, is torn")
            if number != seen[writer]:
                sys.exit(f"{path}: record {number} of writer {writer} at {place} where {seen[writer]} is due")
            seen[writer] += 1
    if seen != [records] * writers:
        sys.exit(f"{path}: records there are {seen}, of {records}")


records, paths = int(sys.argv[1]), sys.argv[2:]
seed = int(os.environ.get("CUTTLEFS_APPENDS_SEED", time.time_ns() % 1_000_000))
print(f"seed {seed}")
os.close(os.open(paths[0], os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
children = []
for writer in range(WRITERS_A_MOUNT * len(paths)):
    pid = os.fork()
    if pid == 0:
        write_records(paths[writer % len(paths)], writer, records, seed + writer)
        sys.exit(0)
    children.append(pid)
if any([os.waitpid(pid, 0)[1] != 0 for pid in children]):
    sys.exit("a writer failed")
for path in paths:
    check(path, len(children), records)
