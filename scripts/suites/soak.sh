#!/usr/bin/env bash
# Two mounts write files five times as large as the server's memory, and read them back with verification, for some time: no byte is lost or foreign,
# the server's memory does not grow, and pages are promoted and evicted all the time.
# usage: soak.sh [shm|tcp|unix]      CUTTLEFS_SOAK_SECONDS=N (20; the long form is 1200)
source "$(dirname "$0")/lib.sh"
need_command fio
need_command jq
suite_begin soak "${1:-tcp}"
needs_server
seconds=${CUTTLEFS_SOAK_SECONDS:-20}
memory_mib=64
data_mib=$((memory_mib * 5))
start_server $((data_mib * 2))M ${memory_mib}M
mount_fs
mount_fs "$WORK/second"

# Reads and writes 4 KiB to 64 KiB at skewed positions, and verifies every written block before it is written again and at the end: a lost, torn or
# foreign block is an error. Each file has one writer.
soak_fio() {
    fio --name="$1" --directory="$2" --size=$((data_mib / 2))M --rw=randrw --rwmixread=60 --bsrange=4k-64k \
        --blockalign=4k --ioengine=psync --direct=1 --norandommap --randrepeat=0 --random_distribution=zipf:0.9 \
        --verify=crc32c --verify_backlog=512 --verify_fatal=1 --verify_dump=0 --serialize_overlap=0 \
        --time_based --runtime="$seconds" --eta=never >"$WORK/$1.out" 2>&1
}

# Resident memory of the server in KiB, every second, until $WORK/stop exists.
watch_memory() {
    while [[ ! -e $WORK/stop ]]; do
        awk '/^VmRSS/ {print $2}' "/proc/$SERVER_PID/status" 2>/dev/null
        sleep 1
    done >"$WORK/rss"
}

# After the first quarter, in which caches fill, it changes by less than a tenth.
memory_is_flat() {
    awk '{all[NR] = $1} END {
        from = int(NR / 4) + 1; least = most = all[from]
        for (i = from; i <= NR; i++) { if (all[i] < least) least = all[i]; if (all[i] > most) most = all[i] }
        printf "%d samples, %d to %d KiB\n", NR, least, most
        exit !(NR > 4 && most - least < most / 10)
    }' "$WORK/rss"
}

region_figure() { "$CUTTLEFS_BIN/cuttlefs" status --json "$(server_url)" | jq -e ".. | objects | .$1? // empty" | head -1; }
pages_moved() {
    local name
    for name in evicted promoted fetch_misses; do
        figure=$(region_figure $name) || { echo "no figure $name"; return 1; }
        echo "$name $figure"
        ((figure > 1000)) || return 1
    done
}

watch_memory &
watcher=$!
soak_fio first "$MNT" &
first=$!
soak_fio second "$WORK/second" &
second=$!
check "the first mount's blocks are what was written" wait $first || tail -20 "$WORK/first.out"
check "the second mount's blocks are what was written" wait $second || tail -20 "$WORK/second.out"
touch "$WORK/stop"
wait $watcher
check "the server's memory is flat" memory_is_flat
memory_is_flat
check "pages were evicted, promoted and fetched" pages_moved
pages_moved
suite_end
