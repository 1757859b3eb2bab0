#!/usr/bin/env bash
# The server's resident set stays within --memory plus a constant while ten times as much data is written and read.
# usage: memory.sh [shm|tcp|unix]
source "$(dirname "$0")/lib.sh"
need_command fio
suite_begin memory "${1:-shm}"
needs_server
memory=${CUTTLEFS_MEMORY_BUDGET:-64M}
# What the server may use beside its frames: code, stacks, rings, bounce buffers, the metadata cache, tables of
# eight bytes a pool page. docs/testing.md says what it is made of.
allowance_mib=${CUTTLEFS_MEMORY_ALLOWANCE_MIB:-256}
data_bytes=$((10 * $(bytes_of "$memory")))
start_server "$((data_bytes * 3 / 2 / 1048576))M" "$memory"
mount_fs
limit_kib=$(($(bytes_of "$memory") / 1024 + allowance_mib * 1024))
before_kib=$(resident_kib "$SERVER_PID")

# Peak of VmRSS, sampled ten times a second, into a file.
sample() {
    local peak=0 now
    while now=$(resident_kib "$1" 2>/dev/null) && [[ -n $now ]]; do
        ((now > peak)) && peak=$now && echo "$peak" >"$WORK/peak"
        sleep 0.1
    done
}
sample "$SERVER_PID" &
sampler=$!

run() {
    fio --directory="$MNT" --eta=never --size=$((data_bytes / 4)) --fallocate=none --numjobs=4 "$@"
}
check "write $((data_bytes / 1048576)) MiB" run --name=data --rw=write --bs=1M --direct=1
check "read it in sequence" run --name=data --rw=read --bs=1M --direct=1
check "read it at random" run --name=data --rw=randread --bs=64k --direct=1 --io_size=$((data_bytes / 8))
check "overwrite it at random" run --name=data --rw=randwrite --bs=16k --direct=1 --io_size=$((data_bytes / 16))

# Names cost memory too: many small files, made, listed and looked up.
small_files() {
    mkdir "$MNT/small" || return 1
    seq 1 5000 | (cd "$MNT/small" && xargs touch) || return 1
    [[ $(find "$MNT/small" -type f | wc -l) == 5000 ]]
}
check "make and list 5000 files" small_files

kill "$sampler" 2>/dev/null
wait "$sampler" 2>/dev/null
peak_kib=$(cat "$WORK/peak")
echo "server: $((before_kib / 1024)) MiB at start, $((peak_kib / 1024)) MiB at most, bound $memory + $allowance_mib MiB"
check "resident set within $memory + $allowance_mib MiB (peak $((peak_kib / 1024)) MiB)" test "$peak_kib" -le "$limit_kib"
# A peak that never reached the frames' own size would mean the samples looked at the wrong thing.
check "the frames were in use" test "$peak_kib" -ge $(($(bytes_of "$memory") / 1024 * 3 / 4))
check "the server still answers" status_json
suite_end
