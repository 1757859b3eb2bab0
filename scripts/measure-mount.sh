#!/usr/bin/env bash
# Measures the settings from which the mount's defaults are chosen: threads, max_background, readahead (fs-client/src/fuse/settings.rs).
# usage: measure-mount.sh [shm|tcp] [ROUNDS]      prints a table; values run in turn, best of the rounds
source "$(dirname "$0")/suites/lib.sh"
need_command fio
suite_begin measure "${1:-shm}"
needs_server
rounds=${2:-3}
start_server 3G 2G

# Figures in MiB/s (buffered sequential reads, one and four readers) and thousands a second (direct 4 KiB, 32 in flight).
run_fio() {
    fio --output-format=json --runtime=2 --time_based --group_reporting --size=256M --directory="$MNT" "$@" |
        jq '.jobs[0].read | [.bw / 1024, .iops / 1000] | map(. * 10 | floor / 10) | join(" ")' -r
}
measure() {
    sync
    [[ -w /proc/sys/vm/drop_caches ]] && echo 1 >/proc/sys/vm/drop_caches
    local one four direct
    one=$(run_fio --name=seq --rw=read --bs=1M --ioengine=psync --invalidate=1 --numjobs=1 | cut -d' ' -f1)
    four=$(run_fio --name=seq --rw=read --bs=1M --ioengine=psync --invalidate=1 --numjobs=4 | cut -d' ' -f1)
    direct=$(run_fio --name=rnd --rw=randread --bs=4k --direct=1 --ioengine=libaio --iodepth=32 | cut -d' ' -f2)
    echo "$one $four $direct"
}

mount_fs
run_fio --name=seq --rw=read --bs=1M --numjobs=4 >/dev/null # lays the files out
run_fio --name=rnd --rw=read --bs=1M >/dev/null
umount_fs

declare -A best=()
keep() {
    local key=$1 n
    shift
    local old=(${best[$key]:-0 0 0}) new=("$@")
    for n in 0 1 2; do
        awk "BEGIN {exit !(${new[n]} > ${old[n]})}" && old[n]=${new[n]}
    done
    best[$key]="${old[*]}"
}
keys=()
for ((round = 0; round < rounds; round++)); do
    for option in threads=2 threads=4 threads=8 threads=16 max_background=12 max_background=64 max_background=256; do
        [[ $round == 0 ]] && keys+=("$option")
        mount_fs "$MNT" "$option"
        keep "$option" $(measure)
        umount_fs
    done
    for kib in 128 1024 4096; do
        [[ $round == 0 ]] && keys+=("readahead=${kib}K")
        mount_fs
        echo "$kib" >"/sys/class/bdi/$(mountpoint -d "$MNT")/read_ahead_kb"
        keep "readahead=${kib}K" $(measure)
        umount_fs
    done
done
printf '%-20s %14s %14s %16s\n' "over $LINK" '1 reader MiB/s' '4 readers MiB/s' 'direct 4K K/s'
for key in "${keys[@]}"; do
    printf '%-20s %14s %14s %16s\n' "$key" ${best[$key]}
done
