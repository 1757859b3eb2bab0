#!/usr/bin/env python3
"""Writers that race on several mounts of one file system, and what must be there afterwards.

usage: race_writers.py prepare MOUNT
       race_writers.py burst GO NUMBER                     lets writers go, all in the same moment
       race_writers.py write LOGS GO STOP SEED MOUNT...    32 writers; they work while GO is there, and end when STOP is
       race_writers.py check LOGS MOUNT [FROM TO]          compares MOUNT with the logs: as of now, or as of a moment between
                                                           these two (CLOCK_MONOTONIC, ns), when an image of the disk was taken

Every block says whose it is: writer, file, place, generation and a checksum over all of it, so any wrong byte is known. A writer
notes in a log, on another disk, what it begins, what is done, and what was synced.

What may be found of a block: a version whose write had begun, and behind whose end no other one both began and was synced by then.
"""
import ctypes
import errno
import glob
import mmap
import os
import random
import signal
import struct
import sys
import time
import zlib

WRITERS = 32
BLOCK = 4096
HEAD = struct.Struct("<8sIIIQI")  # magic, writer, file, place, generation, CRC over all other bytes
MAGIC = b"cfrace01"
# The kind of a file, by its number. Each own file fills a zone of the pool; the small files share one.
OWN, SMALL, SHARED, CONTESTED, APPENDED = 1000, 2000, 3000, 4000, 5000
OWN_BLOCKS, SMALL_BLOCKS, SHARED_FILES, CONTESTED_BLOCKS, APPENDED_FILES = 256, 3, 4, 16, 2
# The writer of blocks for which there was no race.
NOBODY = 99
# Parts of an own file; each is written in one way only.
BUFFERED, DIRECT, MAPPED = range(0, 96), range(96, 176), range(176, 256)


def name(file):
    kind, number = file // 1000 * 1000, file % 1000
    return {OWN: "own", SMALL: "small", SHARED: "shared", CONTESTED: "contested", APPENDED: "appended"}[kind] + f"-{number}"


def block(writer, file, place, generation):
    fill = zlib.crc32(b"%d %d %d %d" % (writer, file, place, generation)).to_bytes(4, "little")
    body = fill * ((BLOCK - HEAD.size) // 4 + 1)
    body = body[:BLOCK - HEAD.size]
    crc = zlib.crc32(body, zlib.crc32(HEAD.pack(MAGIC, writer, file, place, generation, 0)))
    return HEAD.pack(MAGIC, writer, file, place, generation, crc) + body


def parse(found, file):
    """(writer, place, generation) of a block, or what is wrong with it."""
    if len(found) < BLOCK:
        return f"only {len(found)} bytes"
    magic, writer, of, place, generation, _ = HEAD.unpack_from(found)
    if magic != MAGIC:
        return "zeros" if not any(found) else "no block of ours"
    if found != block(writer, of, place, generation):
        wrong = next(at for at, (a, b) in enumerate(zip(found, block(writer, of, place, generation))) if a != b)
        return f"torn: writer {writer}, generation {generation}, wrong from byte {wrong} on"
    if of != file:
        return f"a block of {name(of)}, place {place}"
    return writer, place, generation


def write_all(fd, data, offset):
    while data:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def prepare(mount):
    sizes = [(SMALL + w, SMALL_BLOCKS) for w in range(WRITERS)]
    sizes += [(OWN + w, OWN_BLOCKS) for w in range(WRITERS)]
    sizes += [(SHARED + s, 2 * WRITERS) for s in range(SHARED_FILES)]
    sizes += [(CONTESTED, CONTESTED_BLOCKS)] + [(APPENDED + a, 0) for a in range(APPENDED_FILES)]
    for file, blocks in sizes:
        fd = os.open(os.path.join(mount, name(file)), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        write_all(fd, b"".join(block(NOBODY, file, place, 0) for place in range(blocks)), 0)
        os.fsync(fd)
        os.close(fd)
    fd = os.open(mount, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def burst(go, number):
    """Every other burst, from the first one on, is narrow: all of it is in one zone of the pool. The one behind it begins in
    another zone, which was idle, too."""
    with open(go + ".new", "w") as file:
        file.write(f"{time.monotonic_ns() + 300_000_000} {number}")
    os.rename(go + ".new", go)


class Writer:
    def __init__(self, number, mount, logs, seed):
        self.number, self.mount = number, mount
        self.random = random.Random(seed * 1000 + number)
        self.log = os.open(os.path.join(logs, f"writer-{number}"), os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
        self.generation = 0
        self.fds = {}
        self.libc = ctypes.CDLL(None, use_errno=True)
        # Page-aligned, as O_DIRECT requires.
        self.aligned = mmap.mmap(-1, 4 * BLOCK)
        self.mapping = mmap.mmap(self.fd(OWN + number, os.O_RDWR), OWN_BLOCKS * BLOCK)

    def note(self, what, *numbers):
        os.write(self.log, " ".join([what, *map(str, numbers), str(time.monotonic_ns())]).encode() + b"\n")

    def fd(self, file, flags):
        key = file, flags
        if key not in self.fds:
            self.fds[key] = os.open(os.path.join(self.mount, name(file)), flags)
        return self.fds[key]

    def write(self, file, places, flags=os.O_RDWR):
        """Neighbouring blocks, as one write."""
        self.generation += 1
        data = b"".join(block(self.number, file, place, self.generation) for place in places)
        for place in places:
            self.note("b", file, place, self.generation)
        fd = self.fd(file, flags)
        if flags & os.O_DIRECT:
            self.aligned[:len(data)] = data
            view = memoryview(self.aligned)[:len(data)]
            assert os.pwrite(fd, view, places[0] * BLOCK) == len(data), "a short direct write"
        else:
            write_all(fd, data, places[0] * BLOCK)
        for place in places:
            self.note("e", file, place, self.generation)

    def sync(self, file, flags=os.O_RDWR):
        began = time.monotonic_ns()
        try:
            self.random.choice([os.fsync, os.fdatasync])(self.fd(file, flags))
            self.note("s", file, began)
        except OSError as error:
            # If two writers wrote the same bytes before a kill of the server, one of them may be told that its bytes are lost.
            if error.errno != errno.EIO or file // 1000 * 1000 not in (CONTESTED, SHARED, APPENDED):
                raise
            self.note("x", file)

    def begin(self):
        self.write(SHARED, range(2 * self.number, 2 * self.number + 1))
        self.sync(SHARED)

    def narrow_step(self):
        self.write(SMALL + self.number, range(self.random.randrange(SMALL_BLOCKS), SMALL_BLOCKS))
        self.sync(SMALL + self.number)

    def run_of(self, places):
        length = self.random.choice([1, 1, 2, 4])
        first = self.random.randrange(places.start, places.stop - length + 1)
        return range(first, first + length)

    def step(self):
        me, draw = self.number, self.random.random()
        if draw < 0.3:
            self.narrow_step()
        elif draw < 0.5:
            self.write(OWN + me, self.run_of(BUFFERED))
            if self.random.random() < 0.7:
                self.sync(OWN + me)
        elif draw < 0.65:
            self.write(OWN + me, self.run_of(DIRECT), os.O_RDWR | os.O_DIRECT)
            if self.random.random() < 0.5:
                self.sync(OWN + me, os.O_RDWR | os.O_DIRECT)
        elif draw < 0.75:
            self.map(self.run_of(MAPPED))
        elif draw < 0.88:
            file = SHARED + self.random.randrange(SHARED_FILES)
            flags = self.random.choice([os.O_RDWR, os.O_RDWR | os.O_DIRECT])
            # One block for each of the two ways.
            self.write(file, range(2 * me, 2 * me + 1) if flags == os.O_RDWR else range(2 * me + 1, 2 * me + 2), flags)
            self.sync(file, flags)
        elif draw < 0.94:
            place = self.random.randrange(CONTESTED_BLOCKS)
            self.write(CONTESTED, range(place, place + 1), os.O_RDWR | os.O_DIRECT)
            self.sync(CONTESTED, os.O_RDWR | os.O_DIRECT)
        else:
            self.append(APPENDED + self.random.randrange(APPENDED_FILES))

    def map(self, places):
        self.generation += 1
        for place in places:
            self.note("b", OWN + self.number, place, self.generation)
            self.mapping[place * BLOCK:(place + 1) * BLOCK] = block(self.number, OWN + self.number, place, self.generation)
        self.mapping.flush(places.start * BLOCK, len(places) * BLOCK)
        for place in places:
            # For these files msync(2) reports what fsync would.
            self.note("m", OWN + self.number, place, self.generation)

    def append(self, file):
        self.generation += 1
        fd = self.fd(file, os.O_WRONLY | os.O_APPEND)
        self.note("b", file, 0, self.generation)
        assert os.write(fd, block(self.number, file, 0, self.generation)) == BLOCK, "a short append"
        self.note("e", file, 0, self.generation)
        self.sync(file, os.O_WRONLY | os.O_APPEND)

    def finish(self):
        for file, flags in list(self.fds):
            if file != OWN + self.number or flags == os.O_RDWR:
                self.sync(file, flags)


def write(logs, go, stop, seed, mounts):
    children = {}
    for number in range(WRITERS):
        pid = os.fork()
        if pid == 0:
            try:
                writer = Writer(number, mounts[number % len(mounts)], logs, seed)
                steps, begun = 0, None
                while not os.path.exists(stop):
                    try:
                        start, round = map(int, open(go).read().split())
                    except FileNotFoundError:
                        time.sleep(0.05)
                        continue
                    is_narrow = round % 2 == 1
                    if round != begun:
                        time.sleep(max(0, start - time.monotonic_ns()) / 1e9)
                        begun = round
                        if not is_narrow:
                            writer.begin()
                    if is_narrow:
                        writer.narrow_step()
                    else:
                        writer.step()
                    steps += 1
                writer.finish()
                print(f"writer {number}: {steps} steps", flush=True)
                os._exit(0)
            except BaseException as error:
                print(f"writer {number} on {mounts[number % len(mounts)]}: {error!r}", flush=True)
                os._exit(1)
        children[pid] = number
    # All are told to end at once, since some of them may hang.
    signal.signal(signal.SIGTERM, lambda *_: [os.kill(pid, signal.SIGKILL) for pid in children] and os._exit(2))
    failed = 0
    for _ in range(len(children)):
        pid, status = os.wait()
        failed += status != 0
    sys.exit(failed != 0)


class Version:
    def __init__(self, began, place):
        self.began, self.place = began, place
        self.ended = self.synced = float("inf")


def read_logs(logs):
    """(file, place) -> {(writer, generation): Version}; of appended files the place is None."""
    versions = {}
    for path in glob.glob(os.path.join(logs, "writer-*")):
        writer, unsynced = int(path.rsplit("-", 1)[1]), {}
        for line in open(path):
            what, *numbers = line.split()
            numbers = list(map(int, numbers))
            if what == "b":
                file, place, generation, at = numbers
                key = (file, None if file >= APPENDED else place)
                versions.setdefault(key, {})[writer, generation] = Version(at, place)
            elif what in "em":
                file, place, generation, at = numbers
                version = versions[file, None if file >= APPENDED else place][writer, generation]
                version.ended = at
                if what == "m":
                    version.synced = at
                else:
                    unsynced.setdefault(file, []).append(version)
            elif what == "s":
                file, began, at = numbers
                for version in unsynced.pop(file, []):
                    assert version.ended <= began
                    version.synced = at
            else:
                # The writer was told that something is lost, but not what.
                unsynced.pop(numbers[0], None)
    return versions


def check(logs, mount, first, last):
    versions = read_logs(logs)
    start = {(NOBODY, 0): Version(0, 0)}
    start[NOBODY, 0].ended = start[NOBODY, 0].synced = 0
    bad, blocks, promised = [], 0, 0

    def wrong(file, place, why):
        bad.append(f"{name(file)} block {place}: {why}")

    for path in sorted(os.listdir(mount)):
        kind, number = path.rsplit("-", 1)
        kinds = {"own": OWN, "small": SMALL, "shared": SHARED, "contested": CONTESTED, "appended": APPENDED}
        file = kinds[kind] + int(number)
        data = open(os.path.join(mount, path), "rb").read()
        found = [parse(data[at:at + BLOCK], file) for at in range(0, len(data), BLOCK)]
        blocks += len(found)
        if file >= APPENDED:
            known, seen = versions.get((file, None), {}), {}
            for at, what in enumerate(found):
                if isinstance(what, str):
                    wrong(file, at, what)
                    continue
                writer, _, generation = what
                if (writer, generation) not in known or known[writer, generation].began > last:
                    wrong(file, at, f"nobody appended {what}")
                elif generation in seen.get(writer, []):
                    wrong(file, at, f"{what} is there twice")
                elif seen.get(writer) and generation < seen[writer][-1]:
                    wrong(file, at, f"{what} stands behind a later one of its writer")
                seen.setdefault(writer, []).append(generation)
            for (writer, generation), version in known.items():
                if version.synced <= first:
                    promised += 1
                    if generation not in seen.get(writer, []):
                        wrong(file, "?", f"the record {generation} of writer {writer} was synced and is not there")
            continue
        for place, what in enumerate(found):
            if isinstance(what, str):
                wrong(file, place, what)
                continue
            writer, at, generation = what
            all_of_block = {**start, **versions.get((file, place), {})}
            version = all_of_block.get((writer, generation))
            if at != place or version is None or version.began > last:
                wrong(file, place, f"nobody wrote {what} here")
                continue
            promised += any(other.synced <= first for key, other in all_of_block.items() if key[0] != NOBODY)
            newer = [key for key, other in all_of_block.items() if other.began > version.ended and other.synced <= first]
            if newer:
                wrong(file, place, f"writer {writer}, generation {generation}; later ones were synced: {sorted(newer)[-3:]}")
    print(f"{blocks} blocks, {promised} of them promised, {len(bad)} wrong")
    for line in bad[:40]:
        print(line)
    if promised == 0:
        print("nothing was promised: that says nothing")
    sys.exit(bool(bad) or promised == 0)


def main():
    command, *arguments = sys.argv[1:]
    if command == "prepare":
        prepare(*arguments)
    elif command == "burst":
        go, number = arguments
        burst(go, int(number))
    elif command == "write":
        logs, go, stop, seed, *mounts = arguments
        write(logs, go, stop, int(seed), mounts)
    elif command == "check":
        logs, mount, *moments = arguments
        now = time.monotonic_ns()
        first, last = map(int, moments or [now, now])
        check(logs, mount, first, last)
    else:
        sys.exit(__doc__)


main()
