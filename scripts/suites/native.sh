#!/usr/bin/env bash
# A native program and mounts see each other's changes as docs/native.md says. The program is Python, through libcuttlefs.so.
# usage: native.sh [shm|tcp|unix]
source "$(dirname "$0")/lib.sh"
need_command python3
suite_begin native "${1:-shm}"
needs_server
[[ -e $CUTTLEFS_BIN/libcuttlefs.so ]] ||
    die "no libcuttlefs.so in $CUTTLEFS_BIN; build it: cargo build --release -p cuttlefs-capi"
HERE=$(cd "$(dirname "$0")" && pwd)
# Less memory than the files of the test have, so that pages go to SSD and come back.
start_server 512M 16M
mount_fs

native() { python3 "$HERE/native.py" "$CUTTLEFS_BIN/libcuttlefs.so" "$(server_url)" "$CUTTLEFS_KEY" "$MNT" "$1"; }
check "a native reader sees a mount's writes at once" native mount-writes
check "a mount sees native writes past its cache at once, and cached at its next open" native native-writes
check "stores through a mapping are seen when they are written back" native mapping
check "appends of native programs and of the mount: each whole, none lost" native appends
check "names, lengths and removed files" native names
check "a queue beside a writer of the mount: every page is of one write" native pages

regions() {
    PYTHONPATH=$HERE/../../fs-client/capi/python CUTTLEFS_LIBRARY=$CUTTLEFS_BIN/libcuttlefs.so \
        python3 "$HERE/native_regions.py" "$(server_url)" "$CUTTLEFS_KEY" "$MNT" "$@"
}
check "one-sided writes, appends and atomics beside the mount, with evictions and truncates" regions walk
check "pages that are written one-sidedly are neither torn nor stale in the mount" regions counters
regions kills "$WORK/begun" "$WORK/over" >"$WORK/kills.log" 2>&1 &
writer=$!
for _ in 1 2 3; do
    for _ in $(seq 600); do
        [[ -e $WORK/begun ]] && break
        sleep 0.1
    done
    sleep 0.5
    kill_server
    launch_server
done
touch "$WORK/over"
wait "$writer"
status=$?
cat "$WORK/kills.log"
check "what was synced outlives kills of the server, and what was lost is told" test "$status" == 0

# A wheel in an environment that has nothing else, and no variable that names the library.
use_wheel() {
    python3 -m venv "$WORK/venv" && "$WORK/venv/bin/pip" --quiet --disable-pip-version-check install --no-index --no-deps "$1" || return
    (cd / && env -u CUTTLEFS_LIBRARY -u PYTHONPATH LD_LIBRARY_PATH= "$WORK/venv/bin/python3" - "$(server_url)" "$CUTTLEFS_KEY") <<'END'
import os, sys, cuttlefs

session = cuttlefs.Session(sys.argv[1], key=sys.argv[2])
with session.open("by-wheel", os.O_RDWR | os.O_CREAT) as file:
    file.append(b"packed")
    file.sync()
    assert file.read(0, 100) == b"packed"
END
}
wheel=$("$HERE/../wheel.sh" "$WORK/wheel")
case $? in
    0) check "a wheel that is installed alone opens a session" use_wheel "${wheel##*$'\n'}" ;;
    3) say "a wheel that is installed alone: $wheel" ;;
    *) fail "a wheel is packed" ;;
esac
suite_end
