#!/usr/bin/env bash
# How long a server takes to start: after a clean stop with many files, and after a kill with a log of names or of contents.
# usage: measure-start.sh [FILES]      prints medians of five, and their ranges; FILES: 2000000
source "$(dirname "$0")/suites/lib.sh"
need_command python3
suite_begin start shm
needs_server
files=${1:-2000000}
rounds=5

# fill DIRECTORY FIRST COUNT: makes this number of files, a thousand in each directory.
fill() {
    python3 - "$@" <<'PYTHON'
import os, sys
directory, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for number in range(first, first + count):
    if number == first or number % 1000 == 0:
        below = f"{directory}/{number // 1000}"
        os.makedirs(below, exist_ok=True)
    os.mknod(f"{below}/file-{number}")
PYTHON
}

# overwrite FILE COUNT: writes 16 KiB of the file and syncs, COUNT times.
overwrite() {
    python3 - "$@" <<'PYTHON'
import os, sys
fd = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)
for number in range(int(sys.argv[2])):
    os.pwrite(fd, os.urandom(16384), number % 512 * 16384)
    os.fdatasync(fd)
PYTHON
}

# time_start NAME: starts the server, and notes the time it took, its memory, and its message about its log.
time_start() {
    local began log_lines serves ms rss said
    log_lines=$(wc -l <"$WORK/server.log")
    began=$(date +%s%N)
    launch_server
    tail -n "+$((log_lines + 1))" "$WORK/server.log" | sed 's/\x1b\[[0-9;]*m//g' >"$WORK/said"
    serves=$(sed -nE 's/^([^ ]+) .* serving pool=.*/\1/p' "$WORK/said")
    ms=$((($(date -d "$serves" +%s%N) - began) / 1000000))
    rss=$(awk '/VmRSS/ {print $2}' "/proc/$SERVER_PID/status")
    said=$(sed -nE 's/.*read what the log has.* batches=([0-9]+) bytes=([0-9]+) ms=([0-9]+).*/\1 \2 \3/p' "$WORK/said")
    echo "$1 $ms $rss ${said:-0 0 0}" >>"$WORK/figures"
}

start_server 2G 256M
for ((round = 0; round < rounds; round++)); do
    stop_server
    time_start empty
done
mount_fs
mkdir "$MNT/many"
half=$((files / 2))
fill "$MNT/many" 0 "$half" &
other=$!
fill "$MNT/many" "$half" $((files - half)) || exit 1
wait "$other" || exit 1
umount_fs
for ((round = 0; round < rounds; round++)); do
    stop_server
    time_start clean
done
mount_fs
mkdir "$MNT/names"
fill "$MNT/names" 0 30000 || exit 1
for ((round = 0; round < rounds; round++)); do
    kill_server
    time_start names
done
overwrite "$MNT/contents" 2200 || exit 1
for ((round = 0; round < rounds; round++)); do
    kill_server
    time_start contents
done
python3 - "$WORK/figures" "$files" <<'PYTHON'
import statistics, sys
rows = {}
for line in open(sys.argv[1]):
    name, *figures = line.split()
    rows.setdefault(name, []).append([int(figure) for figure in figures])
what = {"empty": "clean, an empty pool", "clean": f"clean, {sys.argv[2]} files", "names": "killed, a log of names",
        "contents": "killed, a log of contents"}
print(f"{'':28}{'start ms':>18}{'resident MiB':>14}{'batches':>10}{'log MiB':>9}{'replay ms':>16}{'MB/s':>7}")
for name, runs in rows.items():
    middle = [statistics.median(run[at] for run in runs) for at in range(5)]
    def span(at): return f"{middle[at]:.0f} ({min(r[at] for r in runs)}-{max(r[at] for r in runs)})"
    rate = f"{middle[3] / max(middle[4], 1) / 1000:7.0f}" if middle[3] else " " * 7
    print(f"{what[name]:28}{span(0):>18}{middle[1] / 1024:14.0f}{middle[2]:10.0f}{middle[3] / 2**20:9.1f}{span(4):>16}{rate}")
PYTHON
echo "1 passed, 0 failed"
