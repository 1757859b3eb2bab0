#!/usr/bin/env bash
# Random reads, writes, truncates, holes and copies on one file against a model, with mmap and without.
# usage: fsx.sh [shm|tcp|unix|rdma]      CUTTLEFS_FSX_OPS=N operations of each run, CUTTLEFS_FSX_SEED=N
#   CUTTLEFS_FSX_ROUNDS=N: runs everything N times, with consecutive seeds; on a slow machine this shows progress
source "$(dirname "$0")/lib.sh"
need_command fsx
suite_begin fsx "${1:-shm}"
# With fewer frames than the files' pages together, races of resident pages would be missed; with many more, those of eviction: the larger file of 16
# MiB does not fit into 8 MiB of frames, the smaller ones do.
start_server 256M 8M
mount_fs

operations=${CUTTLEFS_FSX_OPS:-50000}
seed=${CUTTLEFS_FSX_SEED:-$RANDOM$RANDOM}
say "fsx: seed $seed"

# config NAME MMAP-WEIGHT FLEN OPSIZE-MAX
# Lengths start at 1: posix_fallocate of length 0 is EINVAL on every file system, and fsx takes that for a fault.
config() {
    cat >"$WORK/$1.toml" <<TOML
flen = $3
[opsize]
min = 1
max = $4
[weights]
close_open = 2
invalidate = $([[ $2 == 0 ]] && echo 0 || echo 1)
read = 10
write = 10
mapread = $2
mapwrite = $2
truncate = 3
fsync = 0.2
fdatasync = 0.2
posix_fallocate = 2
punch_hole = 3
sendfile = 3
posix_fadvise = 1
copy_file_range = 3
TOML
}

config mmap 10 262144 65536
config nommap 0 262144 65536
config large 5 16777216 1048576

# run NAME OPERATIONS
run() {
    check "fsx $1, $2 operations, seed $seed" \
        fsx -f "$WORK/$1.toml" -N "$2" -S "$seed" -P "$WORK" "$MNT/fsx-$1"
}
for ((round = 0; round < ${CUTTLEFS_FSX_ROUNDS:-1}; round++)); do
    run mmap "$operations"
    run nommap "$operations"
    run large $((operations / 20))
    seed=$((seed + 1))
done
suite_end
