#!/usr/bin/env python3
"""Runs the native API's examples, and looks at what they print and at their files in a mount of the same server.

usage: examples.py WORK EXAMPLES URL OTHER_URL MOUNT PART    (OTHER_URL: the same server over unix; WORK has `begin` and `begin.py`, the programs of the headings)
"""

import os
import re
import signal
import struct
import subprocess
import sys

WORK, EXAMPLES, URL, OTHER_URL, MOUNT, PART = sys.argv[1:7]
HAS_VERBS = URL.startswith(("tcp", "unix"))
TIMEOUT_S = 150
# As native_table.rs has them.
SLOT, SLOTS = 256, 4096


def fail(words):
    sys.exit(words)


def start(*command):
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(program):
    """What it printed."""
    printed, said = program.communicate(timeout=TIMEOUT_S)
    if program.returncode != 0:
        fail(f"{program.args}: exit status {program.returncode}: {said}")
    return printed


def run(*command):
    return end(start(*command))


def refusal(*command):
    """What it said before it failed."""
    program = start(*command)
    printed, said = program.communicate(timeout=TIMEOUT_S)
    if program.returncode == 0 or printed:
        fail(f"{command} was not refused; it printed {printed!r}")
    return said


def example(name):
    return os.path.join(EXAMPLES, name)


def in_mount(name):
    with open(os.path.join(MOUNT, name), "rb") as file:
        return file.read()


def same(got, expected, what):
    if got != expected:
        at = next((at for at, pair in enumerate(zip(got, expected)) if pair[0] != pair[1]), min(len(got), len(expected)))
        fail(f"{what}: {len(got)} bytes, {len(expected)} were expected, and they differ from byte {at} on")


def matrix():
    # Rows of 4,000 bytes: neighbouring processes write to one page.
    size, processes = 500, 3
    printed = run(example("native_matrix"), URL, str(size), str(processes)).splitlines()
    parts = []
    for line in printed[:processes]:
        words = r"rows (\d+) to (\d+): (\d+) one-sided reads; (\d+) requests to write (\d+) rows"
        found = re.fullmatch(words, line) or fail(f"not expected: {line!r}")
        first, last, reads, requests, rows = map(int, found.groups())
        parts.append((first, last))
        # The layout may be asked for, and the grant is. Over other links each row is a request.
        if HAS_VERBS and (reads < size or requests > rows // 4):
            fail(f"not one-sided: {line!r}")
        if not HAS_VERBS and requests < rows:
            fail(f"rows without requests: {line!r}")
    if sorted(parts) != [(size * part // processes, size * (part + 1) // processes) for part in range(processes)]:
        fail(f"not all rows, once: {parts}")
    if not re.fullmatch(rf"{size} by {size} by {processes} processes in \S+", printed[processes]):
        fail(f"not expected: {printed[processes]!r}")
    same(printed[processes + 1 :], ["the product is right"], "the last line")

    def bytes_of(element):
        return b"".join(struct.pack(f"<{size}d", *(element(row, column) for column in range(size))) for row in range(size))

    def a(row, column):
        return (row * 7 + column * 3) % 11

    def b(row, column):
        return (row * 13 + column * 3) % 11

    # Elements depend on the rest of row and column by 11 alone.
    sums = [[sum(a(row, k) * b(k, column) for k in range(size)) for column in range(11)] for row in range(11)]
    same(in_mount("matrix.a"), bytes_of(a), "the first factor")
    same(in_mount("matrix.b"), bytes_of(b), "the second factor")
    same(in_mount("matrix.product"), bytes_of(lambda row, column: sums[row % 11][column % 11]), "the product")


def log():
    count, times = 1000, 10
    for index in range(3):
        run(example("native_log"), URL, "append", f"first {index}")
    same(in_mount("log"), b"first 0\nfirst 1\nfirst 2\n", "the log")
    many = [start(example("native_log"), URL, "append-many", str(count), f"line of {name}") for name in "abc"]
    # A program that waits before its next one, of each language.
    for _ in range(times):
        both = [start(os.path.join(WORK, "begin"), URL), start(sys.executable, os.path.join(WORK, "begin.py"), URL)]
        for program in both:
            same(end(program), "", "what a program of a heading prints")
    with open(os.path.join(MOUNT, "log"), "a") as file:
        file.write("of the mount\n")
    for program in many:
        found = re.fullmatch(r"(\d+) appended with (\d+) requests\n", end(program)) or fail("another line was expected")
        appended, requests = map(int, found.groups())
        if appended != count or (requests > count // 4 if HAS_VERBS else requests < count):
            fail(f"{appended} appends of {count}, {requests} requests")
    run(example("native_log"), URL, "append", "the\nlast")
    got = in_mount("log")
    lines = got.decode().splitlines()
    expected = {f"line of {name}": count for name in "abc"}
    expected |= {"a line of C": times, "a line of Python": times, "of the mount": 1, "the last": 1, "first 0": 1, "first 1": 1, "first 2": 1}
    counts = {line: lines.count(line) for line in sorted(set(lines))}
    if counts != expected or lines[-1] != "the last":
        fail(f"lines and how often they are there: {counts}")
    same(run(example("native_log"), URL, "read").encode(), got, "what a native reader reads")


def table_run(url, *arguments):
    return run(example("native_table"), url, *arguments)


def slots():
    """Place, word, key and value of the slots that were ever used."""
    got = in_mount("table")
    if len(got) != SLOT * SLOTS:
        fail(f"the table has {len(got)} bytes")
    for place in range(0, len(got), SLOT):
        word, key_len, value_len = struct.unpack_from("<QBB", got, place)
        if word:
            rest = got[place + 10 : place + SLOT]
            yield place, word, rest[:key_len].decode(), rest[key_len : key_len + value_len].decode()


def table():
    count, keys, names = 3000, 1000, ["one", "two", "three"]
    table_run(URL, "put", "apple", "red")
    same(table_run(OTHER_URL, "get", "apple"), "red\n", "a value")
    # By requests, too, where the link has no such verbs, beside one that needs none.
    urls = [URL, URL, OTHER_URL]
    together = [start(example("native_table"), url, "put-many", str(count), name) for url, name in zip(urls, names)]
    for program in together:
        if not re.fullmatch(rf"{count} puts in \S+\n", end(program)):
            fail("another line was expected")
    found = {key: (word, value) for _, word, key, value in slots()}
    if len(found) != keys + 1 or found["apple"] != (2, "red"):
        fail(f"the table has {len(found)} keys")
    for number in range(keys):
        word, value = found[f"key {number}"]
        # Each put of each process counts the word by two, and the last one of all is the last one of its process.
        if word != 2 * len(names) * count // keys or value not in [f"{name} {count - keys + number}" for name in names]:
            fail(f"key {number}: the word {word}, the value {value!r}")
    for number in range(0, keys, 97):
        same(table_run(URL, "get", f"key {number}"), found[f"key {number}"][1] + "\n", "what a native reader reads")
    table_run(URL, "put", "apple", "green")
    same(table_run(URL, "get", "apple"), "green\n", "a value that was changed")


def abandon(key):
    """As a writer leaves a slot that is killed before it lets it go. Returns the word."""
    place, word = next((place, word) for place, word, found, _ in slots() if found == key)
    with open(os.path.join(MOUNT, "table"), "r+b") as file:
        file.seek(place)
        file.write(struct.pack("<Q", word + 1))
    return word


def abandoned():
    word = abandon("apple")
    table_run(URL, "put", "apple", "yellow")
    same(table_run(URL, "get", "apple"), "yellow\n", "a value")
    same([now for _, now, key, _ in slots() if key == "apple"], [word + 4], "the word")
    word = abandon("apple")
    same(table_run(URL, "get", "apple"), "yellow\n", "a value that nobody finished")
    same([now for _, now, key, _ in slots() if key == "apple"], [word + 2], "the word")


def memory():
    """One owner, one user after the other; over the same kind of link as the suite, but for RNICs, which the library has no way over."""
    scheme = URL.split("://")[0]
    endpoint = {"tcp": "tcp://127.0.0.1:0", "shm": f"shm://{WORK}/memory.shm"}.get(scheme, f"unix://{WORK}/memory.sock")
    pages = os.path.join(WORK, "memory.pages")
    owner = start(example("remote_memory"), "serve", endpoint, "16M", "4M", pages)
    try:
        ready = owner.stdout.readline()
        found = re.fullmatch(r"16M, of which 4M may be in memory, at (\S+)\n", ready) or fail(f"not expected: {ready!r}")
        for user in (1, 2):
            printed = run(example("remote_memory"), "use", found.group(1))
            words = r"255 blocks written and read; of 16, read 32 times more, (\d+) reads were one-sided; the counter is at (\d+)\n"
            numbers = re.fullmatch(words, printed) or fail(f"not expected: {printed!r}")
            one_sided, counter = map(int, numbers.groups())
            # Of 512. The blocks are there from the second time on, but an initiator that has met many faults tries only some, until one finds its pages.
            if one_sided < 64 or counter != 100 * user:
                fail(f"user {user}: {one_sided} one-sided reads, the counter at {counter}")
        owner.send_signal(signal.SIGTERM)
        told = end(owner)
    finally:
        owner.kill()
    words = r"asked \d+ times; (\d+) pages written to the file, (\d+) read from it, (\d+) in memory\n"
    written, read, resident = map(int, (re.fullmatch(words, told) or fail(f"not expected: {told!r}")).groups())
    # Each user writes 4,080 pages and reads them, and 1,024 may be in memory.
    if resident > 1024 or written < 2 * 3000 or read < 2 * 3000:
        fail(f"16M were not moved through 4M: {told!r}")
    if os.path.exists(pages):
        fail("the file of pages has still its name")


def refused():
    before = {name: in_mount(name) for name in ("log", "table")}
    for name in ("native_table", "native_log", "native_matrix"):
        for arguments in ((), (URL,), (URL, "put")):
            if f"usage: {name} URL" not in refusal(example(name), *arguments):
                fail(f"{name} {arguments}: no usage")
    for arguments in (("no such key",), ("",)):
        if "there is no such key" not in refusal(example("native_table"), URL, "get", *arguments):
            fail("a key that is not there")
    for key, value in (("", "value"), ("k" * 100, "v" * 147)):
        if "at most 246" not in refusal(example("native_table"), URL, "put", key, value):
            fail("a pair that does not fit")
    if "a row or more for each" not in refusal(example("native_matrix"), URL, "2", "3"):
        fail("more processes than rows")
    if "usage: remote_memory serve" not in refusal(example("remote_memory"), "serve"):
        fail("remote_memory: no usage")
    there = os.path.join(WORK, "there")
    with open(there, "w", encoding="utf-8") as file:
        file.write("mine")
    if "not there yet" not in refusal(example("remote_memory"), "serve", f"unix://{WORK}/there.sock", "1M", "1M", there):
        fail("a file that is there")
    if not os.path.exists(there) or os.path.getsize(there) != 4:
        fail("a file that was there was changed")
    for name, got in before.items():
        same(in_mount(name), got, name)


{"matrix": matrix, "log": log, "table": table, "abandoned": abandoned, "memory": memory, "refused": refused}[PART]()
