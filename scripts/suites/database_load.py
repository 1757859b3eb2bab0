#!/usr/bin/env python3
"""A database load whose results depend on a seed alone: prints digests of all that it reads, and its operations a second.

usage: database_load.py sqlite|leveldb PATH
"""

import hashlib
import random
import sys
import time

KIND, PATH = sys.argv[1:3]
ROWS = 10000
LOOKUPS = 5000
SCANS = 20
source = random.Random(31)
digest = hashlib.sha256()


def seen(value):
    digest.update(repr(value).encode())


def sqlite():
    import sqlite3

    # A small cache, so that lookups read the file.
    base = sqlite3.connect(PATH, isolation_level=None)
    base.execute("pragma cache_size = 50")
    base.execute("pragma mmap_size = 0")
    base.execute("create table t (number integer primary key, name text, body blob)")
    base.execute("create index by_name on t (name)")
    yield "rows written", ROWS
    for first in range(0, ROWS, 500):
        base.execute("begin")
        rows = ((n, f"name {source.randrange(10**6)}", source.randbytes(300)) for n in range(first, first + 500))
        base.executemany("insert into t values (?, ?, ?)", rows)
        base.execute("commit")
    yield "lookups", LOOKUPS
    for _ in range(LOOKUPS):
        seen(base.execute("select * from t where number = ?", (source.randrange(ROWS),)).fetchone())
    yield "scans", SCANS
    for _ in range(SCANS):
        low = source.randrange(10**6)
        query = "select count(*), sum(length(body)), max(name) from t where name between ? and ?"
        seen(base.execute(query, (f"name {low}", f"name {low + 50000}")).fetchall())
    yield "small transactions", 40
    for _ in range(40):
        base.execute("update t set name = ? where number = ?", (f"new {source.random()}", source.randrange(ROWS)))
    seen(base.execute("pragma integrity_check").fetchall())
    base.close()


def leveldb():
    import plyvel

    base = plyvel.DB(PATH, create_if_missing=True, write_buffer_size=1 << 20, lru_cache_size=64 << 10)
    yield "puts", ROWS
    for n in range(ROWS):
        base.put(b"%08d" % source.randrange(ROWS), source.randbytes(300))
    yield "gets", LOOKUPS
    for _ in range(LOOKUPS):
        seen(base.get(b"%08d" % source.randrange(ROWS)))
    yield "scans", SCANS
    for _ in range(SCANS):
        first = source.randrange(ROWS)
        for pair in base.iterator(start=b"%08d" % first, stop=b"%08d" % (first + 200)):
            seen(pair)
    base.close()


rates, begun = [], None
for name, count in {"sqlite": sqlite, "leveldb": leveldb}[KIND]():
    now = time.monotonic()
    if begun:
        rates.append(f"{begun[1] / (now - begun[2]):.0f} {begun[0]} a second")
    begun = (name, count, now)
rates.append(f"{begun[1] / (time.monotonic() - begun[2]):.0f} {begun[0]} a second")
print(digest.hexdigest())
print(", ".join(rates))
