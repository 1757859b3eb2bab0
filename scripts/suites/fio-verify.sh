#!/usr/bin/env bash
# Checksummed data, four times as large as the server's memory: read back at once, after a remount, and after a restart.
# usage: fio-verify.sh [shm|tcp|unix]
source "$(dirname "$0")/lib.sh"
need_command fio
suite_begin fio-verify "${1:-shm}"
memory=${CUTTLEFS_FIO_MEMORY:-64M}
total_bytes=$((4 * $(bytes_of "$memory")))
start_server "$((total_bytes * 2 / 1048576))M" "$memory"
mount_fs

# fio cannot verify a last block that is cut short, so this job's size is a multiple of its odd block size.
odd_block=5000

# Four jobs: sequential and random writers, through the page cache and with direct IO. The blocks of the last one straddle pages.
fio_run() {
    fio --directory="$MNT" --eta=never \
        --size=$((total_bytes / 4)) --fallocate=none --end_fsync=1 \
        --verify=crc32c --verify_fatal=1 --verify_state_save=0 --randseed=20260101 "$@" \
        --name=seq --rw=write --bs=1M --direct=1 \
        --name=seq-cached --rw=write --bs=128k --direct=0 \
        --name=random --rw=randwrite --bs=4k --direct=1 \
        --name=mixed --rw=randwrite --bs=$odd_block --size=$((total_bytes / 4 / odd_block * odd_block)) --direct=0
}

check "write $((total_bytes / 1048576)) MiB over $memory of memory and verify" fio_run --do_verify=1
remount_fs
check "verify after a remount" fio_run --verify_only=1
restart_all
check "verify after down and up" fio_run --verify_only=1
suite_end
