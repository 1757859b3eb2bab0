#!/usr/bin/env python3
"""Records what SQLite does to its files, for figures 7 and 8 of `cuttlefs bench filemr`: fixtures/bench/src/filemr/sqlite.trace.

Takes sqlite3 and strace. The load is like MobiBench's (FileMR section 6.2): rows are inserted in large transactions, then inserted, updated, selected and
deleted at random, each in a transaction of its own, with a write-ahead log.

The trace has a token for each run of equal steps, of LEB128 numbers: what was done (its kind in the lower two bits: 0 read, 1 write, 2 cut, 3 removed;
the number of the file above), the offset from where the last access of this file ended (zigzag), the length, and how often the same follows.

usage: record-sqlite-trace.py OUTPUT
"""

import os
import random
import re
import subprocess
import sys
import tempfile

ROWS, EXTRA, SINGLE = 20_000, 1000, 1000


def load():
    dice = random.Random(7)

    def blob(length):
        return "x'" + dice.randbytes(length).hex() + "'"

    yield "pragma journal_mode=wal; pragma synchronous=normal; create table large(k integer primary key, v blob);"
    for start in range(0, ROWS, 500):  # By key, as rows come in.
        yield "begin;"
        for key in range(start, start + 500):
            yield f"insert into large values({key},{blob(1800)});"
        yield "commit;"
    yield "create table small(k integer primary key, v blob);"
    for key in range(EXTRA):
        yield f"insert into small values({key},{blob(200)});"
    for _ in range(SINGLE):
        yield f"update small set v={blob(200)} where k={dice.randrange(EXTRA)};"
        yield f"update large set v={blob(1800)} where k={dice.randrange(ROWS)};"
        yield f"select length(v) from large where k={dice.randrange(ROWS)};"
        yield f"delete from small where k={dice.randrange(EXTRA)};"


def steps(log):
    """Kind, file, offset, length of each step; a write that goes on where the one before ended is one with it."""
    numbers, open_files, merged = {}, {}, None
    for line in log:
        found = re.match(r"\d+ +(\w+)\((.*)\) += (\d+)", line)
        if not found:
            continue
        call, arguments, result = found[1], found[2], int(found[3])
        name = re.search(r'"([^"]*/db[^"]*)"', arguments)
        if call == "openat":
            open_files[result] = numbers.setdefault(name[1], len(numbers)) if name else None
            continue
        if call == "unlink":
            step = (3, numbers.get(name[1]) if name else None, 0, 0)
        else:
            file = open_files.get(int(arguments.split(",")[0]))
            last = int(arguments.rsplit(",", 1)[1]) if call != "close" else 0
            step = {"pread64": (0, file, last, result), "pwrite64": (1, file, last, result)}.get(call, (2, file, 0, last))
        if step[1] is None or call == "close" or (step[0] < 2 and step[3] == 0):
            continue
        if merged and merged[:2] == step[:2] and step[0] == 1 and merged[2] + merged[3] == step[2] and merged[3] < 4096:
            merged = (*merged[:3], merged[3] + step[3])
            continue
        if merged:
            yield merged
        merged = step
    if merged:
        yield merged


def number(value):
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out) + bytes([value])


def encode(all_steps):
    out, ends, last, repeats = bytearray(), {}, None, 0
    for kind, file, offset, length in [*all_steps, (None,) * 4]:
        if kind is None:
            token = None
        else:
            ahead = offset - ends.get(file, 0)
            token = number(kind | file << 2) + number(ahead << 1 if ahead >= 0 else -ahead * 2 - 1) + number(length)
            ends[file] = offset + length
        if token == last:
            repeats += 1
            continue
        if last is not None:
            out += last + number(repeats)
        last, repeats = token, 0
    return bytes(out)


with tempfile.TemporaryDirectory() as directory:
    log = os.path.join(directory, "log")
    calls = "trace=openat,pread64,pwrite64,ftruncate,unlink,close"
    command = ["strace", "-f", "-e", calls, "-o", log, "sqlite3", os.path.join(directory, "db")]
    subprocess.run(command, input="\n".join(load()).encode(), stdout=subprocess.DEVNULL, check=True)
    with open(log) as lines, open(sys.argv[1], "wb") as out:
        out.write(encode(steps(lines)))
