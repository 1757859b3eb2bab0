#!/usr/bin/env bash
# The server's resident set stays within --memory plus a constant while ten times as much data is written and read. The client's stays within a
# constant, most of which it gives back when it is idle.
# usage: memory.sh [shm|tcp|unix]
source "$(dirname "$0")/lib.sh"
need_command fio
suite_begin memory "${1:-shm}"
needs_server
memory=${CUTTLEFS_MEMORY_BUDGET:-64M}
# Memory that the server may use beside its frames: code, stacks, rings, bounce buffers, the metadata cache, tables of eight bytes for each pool page.
# docs/testing.md lists its parts.
allowance_mib=${CUTTLEFS_MEMORY_ALLOWANCE_MIB:-256}
# Memory that an idle client may use for itself. The mount's status tells the bound of a busy one.
client_idle_mib=${CUTTLEFS_CLIENT_IDLE_MIB:-32}
# A mount gives memory back some six seconds after its last use.
readonly IDLE_S=12
data_bytes=$((10 * $(bytes_of "$memory")))
start_server "$((data_bytes * 3 / 2 / 1048576))M" "$memory"
mount_fs
limit_kib=$(($(bytes_of "$memory") / 1024 + allowance_mib * 1024))
before_kib=$(resident_kib "$SERVER_PID")

# Peak of VmRSS, sampled ten times a second, into a file.
sample() {
    local peak=0 now
    while now=$(resident_kib "$1" 2>/dev/null) && [[ -n $now ]]; do
        ((now > peak)) && peak=$now && echo "$peak" >"$WORK/peak.new" && mv "$WORK/peak.new" "$WORK/peak"
        sleep 0.1
    done
}
sample "$SERVER_PID" &
sampler=$!

# Kilobytes of a client's own resident memory, without the server's frames that it maps: what no file has, which the kernel counts at one moment, and the
# lanes' buffers. A sum over all of smaps counts memory twice that is given back at one address and made at another while it is read: up to 130 MiB of
# buffers of 1 MiB.
own_kib() {
    awk '/^RssAnon:/ {sum += $2} /^[0-9a-f]+-[0-9a-f]+ / {lane = $6 ~ /memfd:cuttlefs-lane/} lane && /^Rss:/ {sum += $2} END {print sum + 0}' \
        "/proc/$1/status" "/proc/$1/smaps"
}
sample_own() {
    local peak=0 now
    while now=$(own_kib "$1" 2>/dev/null) && [[ -n $now ]]; do
        ((now > peak)) && peak=$now && echo "$peak" >"$WORK/client-peak.new" && mv "$WORK/client-peak.new" "$WORK/client-peak"
        sleep 0.1
    done
}
CLIENT_PID=${CLIENT_PIDS[$MNT]}
client_bound_mib=$(($(counter memory_bound_bytes "$MNT") / 1048576))
client_before_kib=$(own_kib "$CLIENT_PID")
sample_own "$CLIENT_PID" &
client_sampler=$!

run() {
    fio --directory="$MNT" --eta=never --size=$((data_bytes / 4)) --fallocate=none --numjobs=4 "$@"
}
check "write $((data_bytes / 1048576)) MiB" run --name=data --rw=write --bs=1M --direct=1
check "read it in sequence" run --name=data --rw=read --bs=1M --direct=1
check "read it at random" run --name=data --rw=randread --bs=64k --direct=1 --io_size=$((data_bytes / 8))
check "overwrite it at random" run --name=data --rw=randwrite --bs=16k --direct=1 --io_size=$((data_bytes / 16))

# Through the page cache, by more programs than the mount has threads, and in many pieces that the mount keeps until they are synced.
check "read it through the page cache" run --name=data --rw=read --bs=1M --numjobs=4
check "write it in small pieces" run --name=data --rw=randwrite --bs=512 --io_size=$((data_bytes / 320))
check "append small records" \
    fio --directory="$MNT" --eta=never --name=log --rw=write --bs=100 --size=4M --numjobs=12 --fallocate=none

# Names take memory, too: many small files are made, listed and looked up.
small_files() {
    mkdir "$MNT/small" || return 1
    seq 1 5000 | (cd "$MNT/small" && xargs touch) || return 1
    [[ $(find "$MNT/small" -type f | wc -l) == 5000 ]]
}
check "make and list 5000 files" small_files

kill "$sampler" "$client_sampler" 2>/dev/null
wait "$sampler" "$client_sampler" 2>/dev/null
peak_kib=$(cat "$WORK/peak")
echo "server: $((before_kib / 1024)) MiB at start, $((peak_kib / 1024)) MiB at most, bound $memory + $allowance_mib MiB"
check "resident set within $memory + $allowance_mib MiB (peak $((peak_kib / 1024)) MiB)" test "$peak_kib" -le "$limit_kib"
# If the peak never reached the frames' own size, the samples were of the wrong process.
check "the frames were in use" test "$peak_kib" -ge $(($(bytes_of "$memory") / 1024 * 3 / 4))
check "the server still answers" status_json

client_peak_kib=$(cat "$WORK/client-peak")
sleep "$IDLE_S"
client_idle_kib=$(own_kib "$CLIENT_PID")
echo "client: $((client_before_kib / 1024)) MiB at start, $((client_peak_kib / 1024)) MiB at most, $((client_idle_kib / 1024)) MiB when idle"
check "the client's own memory within $client_bound_mib MiB (peak $((client_peak_kib / 1024)) MiB)" \
    test "$client_peak_kib" -le $((client_bound_mib * 1024))
check "the client's copies and buffers were in use" test "$client_peak_kib" -ge $((client_before_kib + 8 * 1024))
check "of it $client_idle_mib MiB at most when idle ($((client_idle_kib / 1024)) MiB)" \
    test "$client_idle_kib" -le $((client_idle_mib * 1024))
suite_end
