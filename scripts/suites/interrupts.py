"""Programs that do not want to wait for a server. The server is stopped or gone meanwhile, but for `made` and `looped`; `signalled` stops it.

usage: interrupts.py killed|made MNT, interrupts.py signalled MNT SERVER_PID, or interrupts.py looped MNT ROUNDS
"""
import errno
import fcntl
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import time

# The size of the file is larger than the server's memory, which interrupts.sh makes 64 MiB.
CHUNK = 1 << 20
LARGE_CHUNKS = 80

# Time limit for something that happens at once, on a busy machine.
PATIENCE_S = 15


def fail(what):
    sys.exit(what)


def ends(process, what):
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if process.poll() is not None:
            return time.monotonic() - until + PATIENCE_S
        time.sleep(0.005)
    fail(f"{what} still runs {PATIENCE_S} s after it was killed")


def killed(mnt):
    """One of each kind, and more than the mount has threads."""
    python = [sys.executable, "-c"]
    lock = "import fcntl, sys; f = open(sys.argv[1], 'r+b'); fcntl.{}(f, fcntl.LOCK_EX)"
    sync = "import os, sys; f = os.open(sys.argv[1], os.O_RDWR); os.pwrite(f, b'x', 2000000); os.fsync(f)"
    programs = [
        ["cat", f"{mnt}/file"],
        ["dd", "if=/dev/zero", f"of={mnt}/written", "bs=64k", "count=4"],
        ["dd", "if=/dev/zero", f"of={mnt}/file", "bs=4k", "count=1", "seek=500", "conv=notrunc,fsync"],
        ["ls", "-l", f"{mnt}/dir"],
        ["mkdir", f"{mnt}/made"],
        ["stat", f"{mnt}/missing"],
        ["mv", f"{mnt}/dir/none", f"{mnt}/dir/other"],
        ["flock", f"{mnt}/file", "true"],
        [*python, lock.format("lockf"), f"{mnt}/file"],
        [*python, sync, f"{mnt}/file"],
        *[["mkdir", f"{mnt}/made.{number}"] for number in range(20)],
        *[["cat", f"{mnt}/file.{number}"] for number in range(20)],
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    running = [(program, subprocess.Popen(program, **quiet)) for program in programs]
    time.sleep(1.5)
    still = [(program, process) for program, process in running if process.poll() is None]
    print(f"{len(still)} of {len(running)} wait")
    if len(still) < len(running) * 2 // 3:
        fail("too few wait: is there a server after all?")
    # Every other one gets Ctrl-C: both signals end a program that does not handle them.
    for number, (_, process) in enumerate(still):
        handles = process.args[0] in (sys.executable, "dd")
        process.send_signal(signal.SIGINT if number % 2 and not handles else signal.SIGKILL)
    took = max(ends(process, " ".join(program)) for program, process in still)
    print(f"all have ended after {took:.2f} s")


def made(mnt):
    for name in ["made", *[f"made.{number}" for number in range(20)]]:
        path = f"{mnt}/{name}"
        # Either exists or not, and either may be changed: a late mkdir would disturb the next one.
        if os.path.isdir(path):
            os.rmdir(path)
        os.mkdir(path)
        time.sleep(0.01)
        os.rmdir(path)
    with open(f"{mnt}/file", "r+b") as file:
        file.truncate(1000000)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_UN)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


class Interrupted(Exception):
    pass


def signalled(mnt):
    def one(what, work, expected):
        """In a process of its own; `expected`: whether it hears of the signal."""
        pid = os.fork()
        if pid == 0:
            def handler(*_):
                raise Interrupted

            signal.signal(signal.SIGUSR1, handler)
            # Python repeats a call after EINTR, unless the handler raises an exception.
            try:
                work()
            except Interrupted:
                os._exit(3)
            except OSError as error:
                os._exit(3 if error.errno == errno.EINTR else 4)
            os._exit(0)
        time.sleep(0.7)
        os.kill(pid, signal.SIGUSR1)
        until = time.monotonic() + (PATIENCE_S if expected else 4)
        while time.monotonic() < until:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                break
            time.sleep(0.01)
        if not done:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            if expected:
                fail(f"{what} still waits")
            return
        if not expected:
            fail(f"{what} ended with status {status}")
        if os.waitstatus_to_exitcode(status) != 3:
            fail(f"{what} ended with status {status} instead of EINTR")

    def read_large():
        buffer = mmap.mmap(-1, CHUNK)
        for number in range(LARGE_CHUNKS):
            os.preadv(direct, [buffer], number * CHUNK)

    # A page in a frame can be read without the server, so there are more pages than frames.
    one("a direct read", read_large, True)
    # As on any file system, a program that waits for a page of the page cache can only be killed.
    one("a read", lambda: os.pread(opened, 4096, 0), False)
    one("an open", lambda: os.open(f"{mnt}/dir", os.O_RDONLY), False)
    one("an fsync", lambda: os.fsync(opened), True)
    one("a mkdir", lambda: os.mkdir(f"{mnt}/dir/made"), False)


RECORD = struct.Struct("=II")


def looped(mnt, rounds):
    path = f"{mnt}/appended"
    open(path, "wb").close()
    acknowledged = set()
    chance = random.Random()
    for number in range(rounds):
        reader, writer = os.pipe()
        children = []
        for child in range(6):
            pid = os.fork()
            if pid == 0:
                file = os.open(path, os.O_WRONLY | os.O_APPEND)
                for record in range(1000):
                    bytes_ = RECORD.pack(number * 6 + child, record)
                    if os.write(file, bytes_) == len(bytes_):
                        os.write(writer, bytes_)
                os._exit(0)
            children.append(pid)
        os.close(writer)
        time.sleep(chance.uniform(0.01, 0.3))
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + PATIENCE_S
        for pid in children:
            while os.waitpid(pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > until:
                    fail(f"a writer of round {number} still runs")
                time.sleep(0.005)
        with os.fdopen(reader, "rb") as told:
            while record := told.read(RECORD.size):
                acknowledged.add(RECORD.unpack(record))
    # Writes that were sent for a killed writer are done when the server goes on.
    time.sleep(3)
    there = list(RECORD.iter_unpack(open(path, "rb").read()))
    twice = len(there) - len(set(there))
    lost = len(acknowledged - set(there))
    print(f"{len(there)} records, {len(acknowledged)} acknowledged, {twice} twice, {lost} lost")
    if twice or lost or not acknowledged:
        fail("not once each")


mnt = sys.argv[2]
if sys.argv[1] == "signalled":
    # While the server still answers.
    opened = os.open(f"{mnt}/file", os.O_RDWR)
    with open(f"{mnt}/large", "wb") as file:
        for _ in range(LARGE_CHUNKS):
            file.write(os.urandom(CHUNK))
    direct = os.open(f"{mnt}/large", os.O_RDONLY | os.O_DIRECT)
    os.kill(int(sys.argv[3]), signal.SIGSTOP)
match sys.argv[1]:
    case "killed":
        killed(mnt)
    case "made":
        made(mnt)
    case "signalled":
        signalled(mnt)
    case "looped":
        looped(mnt, int(sys.argv[3]))
