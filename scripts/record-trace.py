#!/usr/bin/env python3
"""Records what programs do to their files, for Figures 7 and 8 of `cuttlefs bench filemr`: fixtures/bench/src/filemr/traces/*.trace.

    record-trace.py LOAD OUTPUT         records a load: fileserver, varmail, redis or sqlite (docs/filemr.md says with which programs)
    record-trace.py --log LOG OUTPUT    makes a trace of a log of strace that is there: `strace -f -s 0` of programs that worked in /work

A load runs in a directory of its own under $TMPDIR, under strace. Programs are found in PATH; the personalities of filebench beside it, in
../share/filebench/workloads.

The trace: the eight bytes "cuttrace", the version, the number of steps, and the number of files (four bytes each, little-endian), and then the steps,
packed by zlib. A step is a row of LEB128 numbers:

    kind (the lower three bits) and file (above them)
    0 read, 1 write    the offset from where the last access of this file ended (zigzag), the length
    2 cut              the new length, which may also be a greater one
    3 removed, 4 made  nothing more

A file is known by the smallest number that no other file had when it was made. Steps are in the order in which system calls ended. Calls that failed, and
those on files that have no name any more, are not in a trace; a read beside a write of another thread ends at the length before, if the write ended later.
"""

import collections
import heapq
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zlib

MAGIC, VERSION = b"cuttrace", 1
READ, WRITE, CUT, REMOVED, MADE = range(5)
KINDS = ["reads", "writes", "cuts", "removed", "made"]
CALLS = (
    "openat,open,creat,close,read,write,readv,writev,pread64,pwrite64,preadv,pwritev,lseek,ftruncate,truncate,fallocate,unlink,unlinkat,"
    "rename,renameat,renameat2,link,linkat,chdir,dup,dup2,dup3,fcntl,clone,clone3,fork,vfork,copy_file_range,sendfile,mmap"
)


# ---- a log of strace, and the steps in it


def finished(log):
    """Process, call, arguments and result of each call, in the order in which they ended; a close counts from its begin."""
    begun = {}
    for line in log:
        found = re.match(r"(\d+) +(.*)", line)
        if not found or found[2][:3] in ("+++", "---"):
            continue
        pid, text = int(found[1]), found[2]
        if text.endswith("<unfinished ...>"):
            begun[pid] = text.removesuffix("<unfinished ...>").rstrip()
            if begun[pid].startswith("close("):
                yield pid, "close", begun.pop(pid)[6:].rstrip(" )"), 0
            continue
        resumed = re.match(r"<\.\.\. (\w+) resumed>(.*)", text)
        if resumed:
            if pid not in begun:
                continue
            text = begun.pop(pid) + resumed[2]
        found = re.match(r"(\w+)\((.*)\) += (-?\d+)", text)
        if found:
            yield pid, found[1], found[2], int(found[3])


class File:
    def __init__(self, number):
        self.number, self.length = number, 0


class Open:
    """An open file: what descriptors of one or more processes name."""

    def __init__(self, file, appends):
        self.file, self.appends, self.position = file, appends, 0


class Recorder:
    """Follows descriptors, offsets and names of files below a directory."""

    def __init__(self, work):
        self.work = work
        self.names, self.free, self.known, self.steps = {}, [], 0, []
        self.tables = {}
        self.nameless = self.early = self.removals = 0

    def path(self, arguments, which=0):
        """The name among the arguments, if it is one below the directory."""
        directory, name = re.findall(r'(?:(\w+), )?"((?:[^"\\]|\\.)*)"', arguments)[which]
        if directory not in ("", "AT_FDCWD") and not name.startswith("/"):
            sys.exit(f"a name beside an open directory cannot be recorded: {arguments}")
        name = os.path.normpath(os.path.join(self.work, name))
        return name if name.startswith(self.work + "/") else None

    def step(self, kind, file, offset=0, length=0):
        if file.number is None:
            self.nameless += 1
        else:
            self.steps.append((kind, file.number, offset, length))

    def made(self, name):
        if self.free:
            number = heapq.heappop(self.free)
        else:
            number, self.known = self.known, self.known + 1
        self.names[name] = file = File(number)
        self.step(MADE, file)
        return file

    def removed(self, name):
        file = self.names.pop(name, None)
        if file:
            self.removals += 1
            self.step(REMOVED, file)
            heapq.heappush(self.free, file.number)
            file.number = None

    def moved(self, arguments):
        source, target = self.path(arguments), self.path(arguments, 1)
        if source and not target or target and not source:
            sys.exit(f"a file came from outside, or went there: {arguments}")
        if source in self.names and source != target:
            self.removed(target)
            self.names[target] = self.names.pop(source)
        elif source:
            # A directory, with all that is in it.
            for name in [name for name in self.names if name.startswith(source + "/")]:
                self.names[target + name[len(source) :]] = self.names.pop(name)

    def cut(self, file, length):
        if file.length != length:
            file.length = length
            self.step(CUT, file, 0, length)

    def access(self, kind, opened, offset, length):
        if kind == READ and length > 0 and offset + length > opened.file.length:
            length = opened.file.length - offset
            self.early += 1
        if length > 0:
            self.step(kind, opened.file, offset, length)
            opened.file.length = max(opened.file.length, offset + length)

    def follow(self, log, removed_most=None):
        """Records, up to the removal of so many files."""
        log = list(log)
        # A child may be seen before the call that made it has returned.
        parents = {}
        for pid, call, arguments, result in finished(log):
            if call in ("clone", "clone3", "fork", "vfork") and result > 0:
                parents[result] = (pid, "CLONE_FILES" in arguments)
        for pid, call, arguments, result in finished(log):
            if result >= 0:
                self.call(self.table(pid, parents), call, arguments, result)
            if self.removals == removed_most:
                return
        if removed_most:
            sys.exit(f"only {self.removals} files were removed; let it run for longer")

    def table(self, pid, parents):
        if pid not in self.tables:
            parent, shares = parents.get(pid, (None, False))
            of_parent = self.table(parent, parents) if parent else {}
            self.tables[pid] = of_parent if shares else dict(of_parent)
        return self.tables[pid]

    def call(self, table, call, arguments, result):
        if call in ("openat", "open", "creat"):
            name = self.path(arguments)
            table.pop(result, None)
            if name is None or "O_DIRECTORY" in arguments or os.path.isdir(name):
                return
            makes = call == "creat" or "O_CREAT" in arguments
            if name not in self.names and not makes:
                sys.exit(f"{name} was not made in this recording")
            file = self.names.get(name) or self.made(name)
            if call == "creat" or "O_TRUNC" in arguments:
                self.cut(file, 0)
            table[result] = Open(file, "O_APPEND" in arguments)
        elif call in ("unlink", "unlinkat"):
            self.removed(self.path(arguments))
        elif call in ("rename", "renameat", "renameat2"):
            self.moved(arguments)
        elif call == "truncate":
            if file := self.names.get(self.path(arguments)):
                self.cut(file, int(arguments.rsplit(",", 1)[1]))
        elif call in ("link", "linkat") and self.path(arguments):
            sys.exit(f"a second name of a file cannot be recorded: {arguments}")
        elif call == "chdir":
            if os.path.normpath(os.path.join(self.work, arguments.strip('"'))) != self.work:
                sys.exit(f"the program left its directory, so names are not known: {arguments}")
        else:
            self.of_descriptor(table, call, arguments, result)

    def of_descriptor(self, table, call, arguments, result):
        words = [word.strip() for word in arguments.split(",")]
        descriptor = int(words[4] if call == "mmap" else words[0]) if re.fullmatch(r"-?\d+", words[4 if call == "mmap" else 0]) else -1
        opened = table.get(descriptor)
        if call == "close":
            table.pop(descriptor, None)
        elif opened is None:
            if call in ("dup2", "dup3"):
                table.pop(result, None)
        elif call in ("dup", "dup2", "dup3") or call == "fcntl" and words[1].startswith("F_DUPFD"):
            table[result] = opened
        elif call in ("pread64", "preadv"):
            self.access(READ, opened, int(words[-1]), result)
        elif call in ("pwrite64", "pwritev"):
            self.access(WRITE, opened, int(words[-1]), result)
        elif call in ("read", "readv"):
            self.access(READ, opened, opened.position, result)
            opened.position += result
        elif call in ("write", "writev"):
            if opened.appends:
                opened.position = opened.file.length
            self.access(WRITE, opened, opened.position, result)
            opened.position += result
        elif call == "lseek":
            opened.position = result
        elif call == "ftruncate":
            self.cut(opened.file, int(words[1]))
        elif call in ("fallocate", "copy_file_range", "sendfile") or call == "mmap" and "MAP_SHARED" in arguments and not self.is_index(opened):
            sys.exit(f"{call} of a recorded file cannot be recorded: {arguments}")

    def is_index(self, opened):
        """SQLite shares the index of its log, a few pages, by mapping it: its stores are no system calls."""
        return any(file is opened.file and name.endswith("-shm") for name, file in self.names.items())


# ---- the trace


def number(value):
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out) + bytes([value])


def encode(steps):
    out, ends, files = bytearray(), {}, 0
    for kind, file, offset, length in steps:
        out += number(kind | file << 3)
        files = max(files, file + 1)
        if kind in (READ, WRITE):
            ahead = offset - ends.get(file, 0)
            out += number(ahead << 1 if ahead >= 0 else -ahead * 2 - 1) + number(length)
            ends[file] = offset + length
        elif kind == CUT:
            out += number(length)
        elif kind == MADE:
            ends[file] = 0
    return MAGIC + struct.pack("<III", VERSION, len(steps), files) + zlib.compress(bytes(out), 9)


def write_trace(recorder, output):
    trace = encode(recorder.steps)
    with open(output, "wb") as out:
        out.write(trace)
    counts = collections.Counter(KINDS[kind] for kind, *_ in recorder.steps)
    lengths = [file.length for file in recorder.names.values()]
    print(f"{len(recorder.steps)} steps ({', '.join(f'{count} {kind}' for kind, count in sorted(counts.items()))}), {len(trace)} bytes")
    print(f"left are {len(lengths)} files of {sum(lengths)} bytes")
    print(f"left out: {recorder.nameless} steps of files without a name; what {recorder.early} reads had of writes that ended after them")


# ---- the loads


def strace(log, *command, **options):
    command = ["strace", "-f", "-s", "0", "--seccomp-bpf", "-e", f"trace={CALLS}", "-o", log, *command]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, **options)


def run(program):
    if program.wait() != 0:
        sys.exit(f"{program.args}: exit status {program.returncode}")


def filebench(work, log, personality, seconds, **settings):
    """A personality of filebench, with other values of its variables. How much it does in a second depends on the machine: so it runs for longer than is
    recorded, which ends with a number of removed files (REMOVED_MOST)."""
    home = os.path.dirname(os.path.dirname(os.path.realpath(shutil.which("filebench"))))
    with open(os.path.join(home, "share/filebench/workloads", f"{personality}.f")) as file:
        text = file.read()
    for name, value in {"dir": work, **settings}.items():
        text, found = re.subn(rf"^set \${name}=.*$", f"set ${name}={value}", text, flags=re.M)
        if found != 1:
            sys.exit(f"{personality}.f has no ${name}")
    text = re.sub(r"^run .*$", f"run {seconds}", text, flags=re.M)
    script = os.path.join(os.path.dirname(log), "workload.f")
    with open(script, "w") as file:
        file.write(text)
    # It hands pointers to functions to processes that it starts.
    run(strace(log, "setarch", "--addr-no-randomize", "filebench", "-f", script, cwd=work))


def fileserver(work, log):
    sizes = "cvar(type=cvar-gamma,parameters=mean:6820000;gamma:1.5)"
    filebench(work, log, "fileserver", 10, nfiles=200, filesize=sizes, nthreads=16)


def varmail(work, log):
    filebench(work, log, "varmail", 20, nfiles=5640)


def redis(work, log):
    socket = os.path.join(work, "socket")
    options = ["--port", "0", "--unixsocket", socket, "--dir", work, "--appendonly", "yes", "--save", "5 10000", "--rdbcompression", "no"]
    options += ["--auto-aof-rewrite-percentage", "0"]

    def ask(*words):
        return subprocess.run(["redis-cli", "-s", socket, *words], capture_output=True, text=True).stdout.strip()

    # The second one reads what the first one left.
    for part in ("first", "second"):
        server = strace(f"{log}.{part}", "redis-server", *options, cwd=work)
        while ask("ping") != "PONG":
            if server.poll() is not None:
                sys.exit("redis-server ended")
            time.sleep(0.1)
        if part == "first":
            load = ["redis-benchmark", "-s", socket, "-t", "set", "-n", "160000", "-r", "80000", "-d", "1000", "-q"]
            subprocess.run(load, stdout=subprocess.DEVNULL, check=True)
            ask("save")
        ask("shutdown", "nosave")
        run(server)
    with open(log, "w") as both:
        for part in ("first", "second"):
            with open(f"{log}.{part}") as file:
                shutil.copyfileobj(file, both)


def sqlite(work, log):
    """As MobiBench does (FileMR section 6.2): rows are inserted in large transactions, then inserted, updated, selected and deleted at random, each in a
    transaction of its own, with a write-ahead log."""
    rows, extra, single = 53_000, 1000, 1000
    dice = random.Random(7)

    def blob(length):
        return "x'" + dice.randbytes(length).hex() + "'"

    def load():
        yield "pragma journal_mode=wal; pragma synchronous=normal; create table large(k integer primary key, v blob);"
        for start in range(0, rows, 500):  # By key, as rows come in.
            yield "begin;"
            for key in range(start, start + 500):
                yield f"insert into large values({key},{blob(1800)});"
            yield "commit;"
        yield "create table small(k integer primary key, v blob);"
        for key in range(extra):
            yield f"insert into small values({key},{blob(200)});"
        for _ in range(single):
            yield f"update small set v={blob(200)} where k={dice.randrange(extra)};"
            yield f"update large set v={blob(1800)} where k={dice.randrange(rows)};"
            yield f"select length(v) from large where k={dice.randrange(rows)};"
            yield f"delete from small where k={dice.randrange(extra)};"

    statements = os.path.join(os.path.dirname(log), "statements")
    with open(statements, "w") as file:
        file.writelines(line + "\n" for line in load())
    with open(statements) as file:
        run(strace(log, "sqlite3", os.path.join(work, "db"), cwd=work, stdin=file))


# Files that are removed in the part that is recorded.
REMOVED_MOST = {"fileserver": 300, "varmail": 5000}
LOADS = {"fileserver": fileserver, "varmail": varmail, "redis": redis, "sqlite": sqlite}


def main():
    if len(sys.argv) == 4 and sys.argv[1] == "--log":
        recorder = Recorder("/work")
        with open(sys.argv[2]) as log:
            recorder.follow(log)
        return write_trace(recorder, sys.argv[3])
    if len(sys.argv) != 3 or sys.argv[1] not in LOADS:
        sys.exit(f"usage: record-trace.py {'|'.join(LOADS)} OUTPUT, or record-trace.py --log LOG OUTPUT")
    with tempfile.TemporaryDirectory() as directory:
        work, log = os.path.join(os.path.realpath(directory), "work"), os.path.join(directory, "log")
        os.mkdir(work)
        LOADS[sys.argv[1]](work, log)
        recorder = Recorder(work)
        with open(log) as lines:
            recorder.follow(lines, REMOVED_MOST.get(sys.argv[1]))
        write_trace(recorder, sys.argv[2])


main()
