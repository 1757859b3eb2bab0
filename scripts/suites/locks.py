#!/usr/bin/env python3
"""Locks between two mounts of one server: what programs see. Used by locks.sh.

  locks.py semantics LEFT RIGHT           what conflicts with what, and what ends a lock
  locks.py waits LEFT RIGHT               waiting: promptness, order, signals, deadlock, a mount full of waiters
  locks.py count KIND FILE... N           adds one to a number, N times for each FILE (one file, seen through its mounts)
  locks.py appended LEFT RIGHT SECONDS    what one mount appends or overwrites under a lock, the other one sees under the lock, while the file is opened
  locks.py hold FILE                      holds fcntl and flock locks, says so, and stays
  locks.py take FILE SECONDS              takes both within so many seconds
  locks.py pause LEFT RIGHT               holds a lock over a kill of the server (see locks.sh)
  locks.py sqlite DATABASE... N           N transactions through each path of one database, by several processes
"""
import errno
import fcntl
import os
import signal
import sqlite3
import struct
import sys
import threading
import time

F_OFD_SETLK = 37
F_OFD_SETLKW = 38
FORMAT = "hhqqi4x"


def command(kind):
    return {"set": fcntl.F_SETLK, "wait": fcntl.F_SETLKW, "ofd": F_OFD_SETLK, "ofd-wait": F_OFD_SETLKW}[kind]


def lock(fd, kind, how="set", start=0, length=0):
    """One lock; raises what the system says."""
    if kind == "flock":
        base = {"x": fcntl.LOCK_EX, "s": fcntl.LOCK_SH, "u": fcntl.LOCK_UN}
        mode, wait = base[how[0]], how.endswith("wait")
        fcntl.flock(fd, mode if wait or mode == fcntl.LOCK_UN else mode | fcntl.LOCK_NB)
        return
    base = {"x": fcntl.F_WRLCK, "s": fcntl.F_RDLCK, "u": fcntl.F_UNLCK}
    wait = "wait" if how.endswith("wait") else "set"
    if kind == "ofd":
        wait = "ofd-wait" if wait == "wait" else "ofd"
    fcntl.fcntl(fd, command(wait), struct.pack(FORMAT, base[how[0]], os.SEEK_SET, start, length, 0))


def refused(fd, kind, how="x", start=0, length=0):
    """Whether a lock is refused because somebody else has it. If not it is given back."""
    try:
        lock(fd, kind, how, start, length)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return True
        raise
    lock(fd, kind, "u", start, length)
    return False


def elsewhere(body):
    """Runs body in a process of its own; its value as an exit status."""
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = int(body())
        except Exception as error:
            # The step of SQLite that failed: reading, writing, a lock, a name.
            name = getattr(error, "sqlite_errorname", "")
            print(f"  child: {error!r} {name} after {time.monotonic() - began:.1f} s", flush=True)
        finally:
            os._exit(status)
    return pid


def status_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def ask(path, kind, how="x", start=0, length=0):
    """Whether a lock is refused to a process of its own."""

    def body():
        return refused(os.open(path, os.O_RDWR), kind, how, start, length)

    found = status_of(elsewhere(body))
    assert found in (0, 1), found
    return found == 1


def opened(path):
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def semantics(left, right):
    left, right = left + "/semantics", right + "/semantics"
    fd = opened(left)
    for kind in ("fcntl", "flock", "ofd"):
        other = {"fcntl": "flock", "flock": "fcntl", "ofd": "flock"}[kind]
        lock(fd, kind, "x")
        for path in (left, right):
            assert ask(path, kind), f"{kind} through {path}"
            assert ask(path, kind, "s"), f"{kind} shared through {path}"
            assert not ask(path, other), f"{kind} does not see {other} through {path}"
        lock(fd, kind, "s")
        for path in (left, right):
            assert ask(path, kind) and not ask(path, kind, "s"), f"{kind}, shared, through {path}"
        lock(fd, kind, "u")
        assert not ask(right, kind), f"{kind} given up"
    # Ranges of which parts are unlocked.
    lock(fd, "fcntl", "x", 100, 100)
    lock(fd, "fcntl", "u", 120, 10)
    assert not ask(right, "fcntl", "x", 0, 100) and not ask(right, "fcntl", "x", 200, 0)
    assert not ask(right, "fcntl", "x", 120, 10) and ask(right, "fcntl", "x", 110, 11)
    assert ask(right, "fcntl", "x", 129, 2) and ask(right, "fcntl", "x", 0, 0)

    def look():
        there = os.open(right, os.O_RDWR)
        asked = struct.pack(FORMAT, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, start, length, pid = struct.unpack(FORMAT, fcntl.fcntl(there, fcntl.F_GETLK, asked))
        return not (kind == fcntl.F_WRLCK and start == 100 and length == 20 and pid == os.getppid())

    assert status_of(elsewhere(look)) == 0, "F_GETLK"
    # fcntl: closing any descriptor of the file removes the process's locks.
    os.close(os.open(left, os.O_RDONLY))
    assert not ask(right, "fcntl"), "after a close"
    # flock and F_OFD_SETLK: only closing the last descriptor of the open file does.
    for kind in ("flock", "ofd"):
        fd2 = os.open(left, os.O_RDWR)
        fd3 = os.dup(fd2)
        lock(fd2, kind, "x")
        os.close(fd2)
        assert ask(right, kind), f"{kind} is held by the other descriptor"
        os.close(fd3)
        until(lambda: not ask(right, kind), 2, f"{kind} is given up with the last descriptor")
    # When a file with a flock is closed, the next open on the same mount gets the lock at once.
    for _ in range(200):
        fd2 = os.open(left, os.O_RDWR)
        lock(fd2, "flock", "x")
        os.close(fd2)
    # A lock ends with its process.
    ready, tell = os.pipe()
    pid = elsewhere(lambda: [lock(os.open(left, os.O_RDWR), "fcntl", "x"), os.write(tell, b"x"), time.sleep(60)] and 0)
    os.read(ready, 1)
    assert ask(right, "fcntl")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    until(lambda: not ask(right, "fcntl"), 2, "a lock ends with its process")


def until(holds, seconds, what):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"in vain: {what}"
        time.sleep(0.01)


def waiter(path, kind, then=lambda fd: 0):
    """A process that waits for a lock; waits until it does."""
    ready, tell = os.pipe()

    def body():
        fd = os.open(path, os.O_RDWR)
        os.write(tell, b"x")
        lock(fd, kind, "x wait")
        return then(fd)

    pid = elsewhere(body)
    os.read(ready, 1)
    os.close(ready)
    os.close(tell)
    time.sleep(0.1)
    return pid


def waits(left_mount, right_mount):
    left, right = left_mount + "/waits", right_mount + "/waits"
    for kind in ("fcntl", "flock", "ofd"):
        fd = opened(left)
        lock(fd, kind, "x")
        pid = waiter(right, kind)
        began = time.monotonic()
        lock(fd, kind, "u")
        assert status_of(pid) == 0
        took = time.monotonic() - began
        assert took < 0.5, f"{kind}: {took:.3f} s from unlock to lock on the other mount"
        # A process has ended before the kernel tells the file system that its files are closed: its lock is free a moment later.
        began = time.monotonic()
        lock(fd, kind, "x wait")
        assert time.monotonic() - began < 2, f"{kind}: the lock of a process that ended is free"
        # A signal ends the wait, and so does the end of the process.
        for signals, expected in ((signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)):
            pid = waiter(right, kind)
            os.kill(pid, signals)
            began = time.monotonic()
            assert status_of(pid) == expected
            assert time.monotonic() - began < 2, f"{kind}: a signal ends a wait"

        def interrupted():
            def raised(*_):
                raise InterruptedError(errno.EINTR, "by the alarm")

            signal.signal(signal.SIGALRM, raised)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            try:
                lock(os.open(right, os.O_RDWR), kind, "x wait")
            except InterruptedError:
                return 0
            return 1

        assert status_of(elsewhere(interrupted)) == 0, f"{kind}: a handler runs"
        lock(fd, kind, "u")
        assert not ask(right, kind), "who gave up has nothing"
        os.close(fd)
    deadlock(left, right)
    full(left_mount, right_mount)


def deadlock(left, right):
    """Two processes on two mounts: one of them is told."""
    fd = opened(left)
    lock(fd, "fcntl", "x", 0, 1)
    ready, tell = os.pipe()

    def other():
        there = os.open(right, os.O_RDWR)
        lock(there, "fcntl", "x", 1, 1)
        os.write(tell, b"x")
        try:
            lock(there, "fcntl", "x wait", 0, 1)
        except OSError as error:
            return 2 if error.errno == errno.EDEADLK else 3
        return 0

    pid = elsewhere(other)
    os.read(ready, 1)
    time.sleep(0.2)
    try:
        lock(fd, "fcntl", "x wait", 1, 1)
    except OSError as error:
        assert error.errno == errno.EDEADLK, error
        lock(fd, "fcntl", "u", 0, 1)
        assert status_of(pid) == 0
    else:
        assert status_of(pid) == 2
    os.close(fd)


def full(left_mount, right_mount):
    """More processes wait than the mount has threads: everything else goes on."""
    left, right = left_mount + "/full", right_mount + "/full"
    fd = opened(left)
    lock(fd, "flock", "x")
    pids = [waiter(right, "flock") for _ in range(3)]
    ready, tell = os.pipe()
    for _ in range(40):
        pids.append(elsewhere(lambda: [os.write(tell, b"x"), lock(os.open(right, os.O_RDWR), "flock", "x wait")] and 0))
    for _ in range(40):
        os.read(ready, 1)
    time.sleep(0.3)
    began = time.monotonic()
    for number in range(20):
        with open(f"{right_mount}/beside", "w") as file:
            file.write(str(number))
        assert open(f"{right_mount}/beside").read() == str(number)
    assert time.monotonic() - began < 5, "a mount full of waiters goes on"
    lock(fd, "flock", "u")
    assert all(status_of(pid) == 0 for pid in pids), "all of them get it in the end"
    os.close(fd)


def count(kind, paths, rounds):
    """With each round a new open file; every other one gives its lock up by its close only."""

    def body(path):
        for round in range(rounds):
            fd = os.open(path, os.O_RDWR)
            lock(fd, kind, "x wait")
            number = int(os.pread(fd, 20, 0) or b"0")
            os.pwrite(fd, b"%019d\n" % (number + 1), 0)
            if round % 2 == 0:
                lock(fd, kind, "u")
            os.close(fd)
        return 0

    os.close(opened(paths[0]))
    before = int(open(paths[0]).read() or 0)
    pids = [elsewhere(lambda path=path: body(path)) for path in paths]
    assert all(status_of(pid) == 0 for pid in pids), "somebody saw an error"
    fd = os.open(paths[0], os.O_RDWR)
    lock(fd, kind, "x wait")
    after = int(os.pread(fd, 20, 0))
    assert after - before == rounds * len(paths), f"{after - before} of {rounds * len(paths)}"


def appended(left, right, seconds):
    """With each change the file is longer, and its first record another. Meanwhile programs of the reader's mount open the file again and again: its
    kernel asks for the attributes in several threads, and is made to forget them."""
    paths = left + "/appended", right + "/appended"
    writer = os.open(paths[0], os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    reader = os.open(paths[1], os.O_RDWR)
    end = time.monotonic() + seconds

    def opens():
        while time.monotonic() < end:
            os.close(os.open(paths[1], os.O_RDONLY))
        return 0

    pids = [elsewhere(opens) for _ in range(2)]
    number = unseen = 0
    while time.monotonic() < end:
        record = b"%019d\n" % number
        lock(writer, "fcntl", "x wait")
        os.pwrite(writer, record, 0)
        os.pwrite(writer, record, (number + 1) * len(record))
        lock(writer, "fcntl", "u")
        lock(reader, "fcntl", "x wait")
        found = [os.pread(reader, len(record), at) for at in (0, (number + 1) * len(record))]
        lock(reader, "fcntl", "u")
        number += 1
        if found != [record, record]:
            unseen += 1
            print(f"  record {number - 1}: {found}", flush=True)
    assert all(status_of(pid) == 0 for pid in pids), "somebody saw an error"
    print(f"  {number} records")
    assert unseen == 0, f"{unseen} of {number} were not seen"


def hold(path):
    fd = opened(path)
    lock(fd, "fcntl", "x wait")
    lock(fd, "flock", "x wait")
    print("held", flush=True)
    signal.pause()


def take(path, seconds):
    began = time.monotonic()
    for kind in ("fcntl", "flock"):
        fd = opened(path)

        def body(kind=kind, fd=fd):
            lock(fd, kind, "x wait")

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        thread.join(max(0.0, seconds - (time.monotonic() - began)))
        if thread.is_alive():
            print(f"{kind}: not free after {seconds} s", flush=True)
            os._exit(1)
    print(f"free after {time.monotonic() - began:.1f} s")


def pause(left, right):
    """Holds a lock on the left while the server is killed, and tries all the time to get it on the right."""
    fd = opened(left)
    lock(fd, "fcntl", "x wait")
    lock(fd, "flock", "x wait")

    def tries():
        there = {kind: os.open(right, os.O_RDWR) for kind in ("fcntl", "flock")}
        asked = 0
        while not os.path.exists(os.environ["STOP_FILE"]):
            for kind, fd in there.items():
                if not refused(fd, kind, "x"):
                    print(f"  {kind} was given to somebody else", flush=True)
                    return 1
                asked += 1
        return 0 if asked else 2

    pid = elsewhere(tries)
    waiting = waiter(right, "flock")
    print("held", flush=True)
    assert status_of(pid) == 0, "nobody else gets the lock, and nobody sees an error"
    # The lock is still held; unlocking lets the process in that has waited all the time.
    assert ask(right, "fcntl") and ask(right, "flock")
    lock(fd, "flock", "u")
    lock(fd, "fcntl", "u")
    assert status_of(waiting) == 0, "who waited has it"


def sqlite(paths, transactions):
    def connect(path):
        connection = sqlite3.connect(path, timeout=60, isolation_level=None)
        connection.execute("PRAGMA synchronous=OFF")
        return connection

    first = connect(paths[0])
    first.execute("CREATE TABLE accounts (id INTEGER PRIMARY KEY, money INTEGER)")
    first.executemany("INSERT INTO accounts VALUES (?, 1000)", [(number,) for number in range(8)])
    first.execute("CREATE TABLE log (who INTEGER, number INTEGER, note TEXT)")
    first.close()

    def body(who, path):
        connection = connect(path)
        for number in range(transactions):
            connection.execute("BEGIN IMMEDIATE")
            (money,) = connection.execute("SELECT money FROM accounts WHERE id=?", (number % 8,)).fetchone()
            connection.execute("UPDATE accounts SET money=? WHERE id=?", (money - 1, number % 8))
            connection.execute("UPDATE accounts SET money=money+1 WHERE id=?", ((number + 1) % 8,))
            connection.execute("INSERT INTO log VALUES (?, ?, ?)", (who, number, "x" * 200))
            connection.execute("COMMIT")
        return 0

    pids = [elsewhere(lambda who=who, path=path: body(who, path)) for who, path in enumerate(paths)]
    assert all(status_of(pid) == 0 for pid in pids), "somebody saw an error"
    for path in paths[:2]:
        connection = connect(path)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("SELECT sum(money) FROM accounts").fetchone() == (8000,)
        assert connection.execute("SELECT count(*) FROM log").fetchone() == (transactions * len(paths),)


def main():
    what, arguments = sys.argv[1], sys.argv[2:]
    if what == "count":
        count(arguments[0], arguments[1:-1], int(arguments[-1]))
    elif what == "take":
        take(arguments[0], float(arguments[1]))
    elif what == "appended":
        appended(*arguments[:2], float(arguments[2]))
    elif what == "sqlite":
        sqlite(arguments[:-1], int(arguments[-1]))
    else:
        {"semantics": semantics, "waits": waits, "hold": hold, "pause": pause}[what](*arguments)


if __name__ == "__main__":
    main()
