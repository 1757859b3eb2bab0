#!/usr/bin/env bash
# The cost of durability for an operation: without a sync, with an fsync after each, and at a server with durable answers; compared with one data sync
# of the same disk: 4 KiB over written blocks of a file, and fdatasync(2).
# usage: measure-durability.sh [shm|tcp] [ROUNDS]      prints a table of microseconds; modes in turn, median of the rounds
source "$(dirname "$0")/suites/lib.sh"
need_command python3
suite_begin durability "${1:-shm}"
needs_server
rounds=${2:-3}

cat >"$WORK/operations.py" <<'PYTHON'
import os, sys, time
directory, syncs, count = sys.argv[1], sys.argv[2] == "fsync", int(sys.argv[3])
os.makedirs(directory)
dirfd = os.open(directory, os.O_RDONLY)
page = os.urandom(4096)
def sync(fd):
    if syncs:
        os.fsync(fd)
def create(n):
    fd = os.open(f"{directory}/{n}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    os.close(fd)
    sync(dirfd)
def write(n):
    os.pwrite(data, page, n * 4096)
    sync(data)
def overwrite(n):
    os.pwrite(data, page, (n * 7919 % count) * 4096)
    sync(data)
def append(n):
    os.write(log, page[:100])
    sync(log)
def rename(n):
    os.rename(f"{directory}/{n}", f"{directory}/to{n}")
    sync(dirfd)
def unlink(n):
    os.unlink(f"{directory}/to{n}")
    sync(dirfd)
data = os.open(f"{directory}/data", os.O_CREAT | os.O_RDWR)
log = os.open(f"{directory}/log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
for operation in (create, write, overwrite, append, rename, unlink):
    begun = time.monotonic()
    for n in range(count):
        operation(n)
    print(operation.__name__, (time.monotonic() - begun) / count * 1e6)
PYTHON

cat >"$WORK/data-sync.py" <<'PYTHON'
import os, sys, time
fd, count = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR), int(sys.argv[2])
os.pwrite(fd, bytes(1 << 20), 0)
os.fsync(fd)
begun = time.monotonic()
for n in range(count):
    os.pwrite(fd, os.urandom(4096), n % 256 * 4096)
    os.fdatasync(fd)
print("data-sync", (time.monotonic() - begun) / count * 1e6)
PYTHON

count=${CUTTLEFS_MEASURE_OPS:-500}
for ((round = 0; round < rounds; round++)); do
    python3 "$WORK/data-sync.py" "$WORK/data-sync" "$count" | sed "s/^/none /" >>"$WORK/figures" || exit 1
    for mode in none fsync ack; do
        CUTTLEFS_DURABILITY=fsync
        [[ $mode == ack ]] && CUTTLEFS_DURABILITY=ack
        start_server 1G 256M
        mount_fs
        python3 "$WORK/operations.py" "$MNT/work" "$mode" "$count" | sed "s/^/$mode /" >>"$WORK/figures" || exit 1
        umount_fs
        stop_server
        rm -r "$POOL"
    done
done
python3 - "$WORK/figures" "$LINK" "$rounds" <<'PYTHON'
import statistics, sys
figures = {}
for line in open(sys.argv[1]):
    mode, operation, us = line.split()
    figures.setdefault(operation, {}).setdefault(mode, []).append(float(us))
print(f"over {sys.argv[2]}, microseconds an operation, median of {sys.argv[3]}")
sync = statistics.median(figures.pop("data-sync")["none"])
print(f"one data sync of this disk: {sync:.0f}")
print(f"{'':12}{'none':>10}{'fsync':>10}{'ack':>10}{'fsync/none':>12}{'ack/none':>10}{'ack/fsync':>11}{'ack/data sync':>15}")
for operation, modes in figures.items():
    none, fsync, ack = (statistics.median(modes[mode]) for mode in ("none", "fsync", "ack"))
    times = f"{none:10.0f}{fsync:10.0f}{ack:10.0f}"
    print(f"{operation:12}{times}{fsync/none:12.1f}{ack/none:10.1f}{ack/fsync:11.2f}{ack/sync:15.2f}")
PYTHON
echo "1 passed, 0 failed"
