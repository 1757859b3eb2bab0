#!/usr/bin/env bash
# A server works on a pool whose every write, rename and sync is recorded, and is stopped and killed meanwhile: its clients may lose unsynced one-sided
# changes by a kill, and are told. Then disks are made that a crash at some point of the record could have left; each is served, and compared with the
# promises to clients.
# usage: crash-points.sh [shm|tcp|unix]      CUTTLEFS_CRASH_IMAGES=N   CUTTLEFS_CRASH_SEED=N (drawn and printed)
source "$(dirname "$0")/lib.sh"
suite_begin crash-points "${1:-shm}"
needs_server
images=${CUTTLEFS_CRASH_IMAGES:-300}
seed=${CUTTLEFS_CRASH_SEED:-$((RANDOM * 32768 + RANDOM))}
# Records in which something was found are kept, to look at the finding.
kept=${CUTTLEFS_CRASH_KEEP:-$CARGO_TARGET_DIR/test-logs}
mkdir -p "$kept" || exit 1
# Thousands of images are written, which need no disk.
scratch=$WORK
[[ -w /dev/shm ]] && scratch=/dev/shm

# Each run works for some time and looks at this number of crashes of it, with as many kills in a row as the run's number modulo three, and a clean
# stop before them in every second run; the long form is many runs, with consecutive seeds. An image takes a tenth of a second on a quiet machine,
# half a second on a busy one.
per_run=$((images / 3 < 300 ? images / 3 : 300))
((per_run > 0)) || per_run=1
recordfs() {
    RUST_BACKTRACE=0 "$CUTTLEFS_BIN/cuttlefs-recordfs" run --server "$CUTTLEFS_BIN/cuttlefsd" \
        --scratch "$scratch" --keep "$kept" "$@"
}
for ((looked = 0, run = 0; looked < images; looked += per_run, run++)); do
    check "seed $((seed + run)): what $per_run crashes leave is what was promised" \
        recordfs --seed $((seed + run)) --images $per_run --kills $((run % 3)) --stops $((run % 2))
done
for ((looked = 0, run = 0; looked < images / 2; looked += per_run, run++)); do
    check "seed $((seed + run)), durability=ack: what $per_run crashes leave is what was answered" \
        recordfs --ack --seed $((seed + run)) --images $per_run --kills $((run % 3)) --stops $((run % 2))
done
# The same check must notice a disk that reports every sync as done and does none. (After a clean stop: until a checkpoint is made, the log has
# everything.)
for file in data records direct-0; do
    check "seed $seed: a disk that lies about syncs of $file is noticed" \
        recordfs --seed "$seed" --images 600 --steps 300 --stops 1 --kills 0 --lie $file
done
suite_end
