#!/usr/bin/env python3
"""One-sided writes, appends and atomics of a native program beside a mount of the same server: what the mount reads, past its page cache and at each open,
is neither stale nor torn, over evictions, truncates, and kills of the server and of the program. And moves of a file's pages over a kill.

usage: native_regions.py URL KEY MOUNT PART    (CUTTLEFS_LIBRARY and PYTHONPATH say where the binding and the library are)
"""

import errno
import mmap
import os
import random
import struct
import sys
import threading
import time

import cuttlefs

URL, KEY, MOUNT, PART = sys.argv[1:5]
PAGE = 4096
SEED = 23
HAS_VERBS = URL.startswith(("tcp", "unix"))
CREATE = os.O_RDWR | os.O_CREAT


def connect():
    return cuttlefs.Session(URL, key=KEY, label="native_regions.py")


def at_mount(name):
    return os.path.join(MOUNT, name)


class Direct:
    """A file of the mount, past the page cache."""

    def __init__(self, name):
        self.fd = os.open(at_mount(name), os.O_RDONLY | os.O_DIRECT)
        self.memory = mmap.mmap(-1, 1 << 20)

    def read(self, offset, length):
        """`offset` at a page."""
        return self.memory[: os.preadv(self.fd, [memoryview(self.memory)[:length]], offset)]


def same(got, expected, what):
    if got != expected:
        at = next((at for at, pair in enumerate(zip(got, expected)) if pair[0] != pair[1]), min(len(got), len(expected)))
        sys.exit(f"{what}: {len(got)} bytes, {len(expected)} were expected, and they differ from byte {at} on")


def walk():
    """Grants of random windows of a file that is larger than the server's memory."""
    session, source = connect(), random.Random(SEED)
    length = 24 << 20
    model = bytearray(source.randbytes(length))
    file = session.open("walk", CREATE)
    for at in range(0, length, 1 << 20):
        file.write(at, model[at : at + (1 << 20)])
    direct, queue, buffer = Direct("walk"), cuttlefs.Queue(session, 16), cuttlefs.Buffer(session, 16 * PAGE)
    one_sided = 0
    for step in range(150):
        first = source.randrange(len(model) // PAGE - 32) * PAGE
        window = 32 * PAGE
        # A window may reach behind the end, for appends.
        if step % 5 == 0:
            first = len(model) // PAGE * PAGE
        with file.grant(first, window) as grant:
            one_sided += grant.stands()
            for _ in range(source.randrange(1, 8)):
                offset = source.randrange(first, min(first + window, len(model))) if first < len(model) else first
                data = source.randbytes(source.randrange(1, 5000))[: max(0, min(first + window, len(model)) - offset)]
                if data:
                    file.write(offset, data)
                    model[offset : offset + len(data)] = data
            for number in range(source.randrange(4)):
                data = source.randbytes(source.randrange(1, 3000))
                buffer.view[: len(data)] = data
                queue.append(number, file, buffer, 0, len(data))
                ((token, count, offset),) = queue.wait(60000)
                assert (token, count, offset) == (number, len(data), len(model)), (token, count, offset)
                model += data
            if first + 8 <= len(model):
                add = source.getrandbits(64)
                old = int.from_bytes(model[first : first + 8], "little")
                assert file.fetch_add(first, add) == old
                assert file.compare_swap(first, old, 1) == (old + add) % 2**64, "not swapped"
                model[first : first + 8] = ((old + add) % 2**64).to_bytes(8, "little")
        # Close-to-open, past the cache, and natively.
        same(direct.read(first, window), bytes(model[first : first + window]), f"direct, step {step}")
        same(file.read(first, window), bytes(model[first : first + window]), f"natively, step {step}")
        if step % 10 == 0:
            with open(at_mount("walk"), "rb") as cached:
                cached.seek(first)
                same(cached.read(window), bytes(model[first : first + window]), f"opened again, step {step}")
        if step % 25 == 24:
            # Under a grant of its end, which that ends.
            with file.grant(len(model) // PAGE * PAGE, PAGE):
                cut = len(model) - source.randrange(1, 100000)
                os.truncate(at_mount("walk"), cut)
                del model[cut:]
                file.append(b"after the cut")
                model += b"after the cut"
    with open(at_mount("walk"), "rb") as cached:
        same(cached.read(), bytes(model), "all of it")
    assert one_sided == (150 if HAS_VERBS else 0), one_sided


def counters():
    """Pages that a queue writes one-sidedly, each full of one number: a reader finds no page of two, and none older than what was done before it looked."""
    pages, depth = 64, 16
    session = connect()
    file = session.open("counters", CREATE)
    file.write(0, bytes(pages * PAGE))
    queue, buffer = cuttlefs.Queue(session, depth), cuttlefs.Buffer(session, depth * PAGE)
    done = [0] * pages
    ended, faults = threading.Event(), []

    def look(what, read):
        source, count = random.Random(SEED), 0
        while not ended.is_set():
            page = source.randrange(pages - 4)
            before = done[page : page + 4]
            got = read(page * PAGE, 4 * PAGE)
            for index, known in enumerate(before):
                words = struct.unpack("<512Q", got[index * PAGE : (index + 1) * PAGE])
                if len(set(words)) > 1:
                    faults.append(f"{what}: page {page + index} is torn: {sorted(set(words))}")
                elif words[0] < known:
                    faults.append(f"{what}: page {page + index} is stale: {words[0]}, and {known} was done")
            count += 1
        print(f"{count} looks {what}")

    direct = Direct("counters")
    other = connect().open("counters")

    def opened_again(offset, length):
        with open(at_mount("counters"), "rb") as cached:
            return os.pread(cached.fileno(), length, offset)

    looks = [("past the page cache", direct.read), ("by a new open", opened_again), ("natively", other.read)]
    readers = [threading.Thread(target=look, args=one) for one in looks]
    # An eviction wants the frames of pages that no grant holds.
    churn = session.open("churn", CREATE)
    churn.write(0, bytes(1 << 20))
    churn.truncate(20 << 20)
    with file.grant(0, pages // 2 * PAGE):
        for thread in readers:
            thread.start()
        number, until = 0, time.monotonic() + 8
        while time.monotonic() < until and not faults:
            number += 1
            for first in range(0, pages, depth):
                for place in range(depth):
                    buffer.view[place * PAGE : (place + 1) * PAGE] = struct.pack("<Q", number) * 512
                    queue.write(first + place, file, (first + place) * PAGE, buffer, place * PAGE, PAGE)
                left = depth
                while left:
                    for token, result, _ in queue.wait(60000):
                        assert result == PAGE, os.strerror(-result)
                        done[token] = number
                        left -= 1
            churn.read(number % 19 << 20, 1 << 20)
        ended.set()
        for thread in readers:
            thread.join()
    print(f"{number * pages} page writes")
    sys.exit(faults[0] if faults else 0)


def kills(begun, over):
    """Batches that are written one-sidedly and synced, beside kills of the server: what a sync covered is there, what is lost is told."""
    pages = 16
    session = connect()
    file = session.open("kills", CREATE)
    file.write(0, bytes(pages * PAGE))
    file.sync()
    direct = Direct("kills")
    grant = file.grant(0, pages * PAGE)
    batch, lost = 0, 0
    while not os.path.exists(over) or batch < 50:
        batch += 1
        while True:
            for page in range(pages):
                file.write(page * PAGE, struct.pack("<Q", batch) * 512)
            try:
                file.fetch_add(0, 0)
            except OSError as error:
                # The server was killed under it.
                if error.errno != errno.ECONNABORTED:
                    raise
            try:
                file.sync()
                break
            except OSError as error:
                # Bytes are lost: they are written again.
                if error.errno != errno.EIO:
                    raise
                lost += 1
        got = direct.read(0, pages * PAGE)
        same(got, struct.pack("<Q", batch) * 512 * pages, f"batch {batch}")
        if batch == 5:
            open(begun, "w").close()
    # A kill behind the last change has taken the grant, and the next change asks for it again.
    file.write(0, struct.pack("<Q", batch))
    assert grant.stands() == HAS_VERBS
    print(f"{batch} batches, {lost} were told to be lost")


def moves(begun, dead):
    """A file's pages move, and its server is killed between two steps: who has no time is told so, and the moves go on with the next server."""
    pages = 1024
    session, hurried = connect(), cuttlefs.Session(URL, key=KEY, label="native_regions.py", deadline_ms=500)
    file, between = session.open("moves", CREATE), session.open("between", CREATE)
    whole = random.Random(SEED).randbytes(pages * PAGE)
    for at in range(0, len(whole), PAGE):
        for one in (file, between):
            one.write(at, whole[at : at + PAGE])
    file.sync()
    late, before, steps = hurried.open("moves", os.O_RDWR), file.runs(), []

    def progress(moved):
        steps.append(moved)
        if len(steps) == 1:
            open(begun, "w").close()
            while not os.path.exists(dead):
                time.sleep(0.05)
            for call in (late.runs, late.defragment):
                try:
                    sys.exit(f"{call.__name__} is answered by a dead server: {call()}")
                except OSError as error:
                    assert error.errno == errno.ETIMEDOUT, error
            os.unlink(dead)

    file.defragment(progress)
    assert before > pages // 2 and file.runs() == 1 and len(steps) > 2, (before, file.runs(), steps)
    same(file.read(0, len(whole) + 1), whole, "natively")
    with open(at_mount("moves"), "rb") as cached:
        same(cached.read(), whole, "by the mount")
    print(f"{before} runs became one, in {len(steps)} steps")


RECORD = 512
# Where the appended records begin, and how many of them are synced.
BASE, SYNCED = 2 * PAGE, 50


def record(number):
    return (b"%07d " % number) * (RECORD // 8)


def abandon(name, note):
    """Appends, writes and counts under a grant until it is killed. What is done it notes on the local disk; only the first records are synced."""
    session = connect()
    file = session.open(name, CREATE)
    file.write(0, bytes(BASE))
    grant = file.grant(0, 64 * PAGE)
    assert grant.stands()
    with open(note, "w", buffering=1) as noted:
        for number in range(1, 1 << 20):
            assert file.append(record(number)) == BASE + (number - 1) * RECORD
            file.write(PAGE, record(number))
            assert file.fetch_add(0, 1) == number - 1
            if number == SYNCED:
                file.sync()
            noted.write(f"{number}\n")


def abandoned(name, note, also_server):
    """What a killed program leaves: all that was done, if the server lives; else what was synced, and perhaps more. Appends are whole, with no hole."""
    with open(note) as noted:
        done = int(noted.read().splitlines()[-1])
    # It may have died between a completion and its note.
    least, most = (SYNCED if also_server == "1" else done), done + 1
    session = connect()
    file = session.open(name, os.O_RDWR)
    got = file.read(0, file.stat().size)
    count, part = divmod(len(got) - BASE, RECORD)
    last = int(got[PAGE : PAGE + 7])
    counted = int.from_bytes(got[:8], "little")
    if part or not all(least <= number <= most for number in (count, last, counted)):
        sys.exit(f"{len(got)} bytes, {count} records, the last one written is {last}, {counted} counted; {least} to {most} were done")
    expected = counted.to_bytes(8, "little").ljust(PAGE, b"\0") + record(last).ljust(PAGE, b"\0")
    expected += b"".join(record(number) for number in range(1, count + 1))
    same(got, expected, "natively")
    with open(at_mount(name), "rb") as cached:
        same(cached.read(), expected, "by the mount")
    # Others go on where it ended: under a grant of their own, and by requests.
    with file.grant(0, 1):
        assert file.append(record(count + 1)) == len(expected)
    with open(at_mount(name), "ab", buffering=0) as appending:
        appending.write(record(count + 2))
    expected += record(count + 1) + record(count + 2)
    same(file.read(0, len(expected) + 1), expected, "appended to")
    print(f"{done} were done, {count} are there")


{"walk": walk, "counters": counters, "kills": kills, "moves": moves, "abandon": abandon, "abandoned": abandoned}[PART](*sys.argv[5:])
