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

# The server is killed between two steps of a move.
regions moves "$WORK/moved" "$WORK/dead" >"$WORK/moves.log" 2>&1 &
mover=$!
until_moved() { for _ in $(seq 600); do if "$@"; then return; else sleep 0.1; fi; done; }
until_moved test -e "$WORK/moved"
kill_server
touch "$WORK/dead"
until_moved test ! -e "$WORK/dead"
launch_server
wait "$mover"
status=$?
cat "$WORK/moves.log"
check "pages move over a kill of the server, and a deadline is told" test "$status" == 0

# A program is killed (SIGKILL) between its grant and a sync, with one-sided changes done and under way. Over shm there are none, so it goes by unix.
one_sided_url() { if [[ $LINK == shm ]]; then echo "unix://$WORK/unix.sock"; else server_url; fi; }
by_one_sided_url() {
    PYTHONPATH=$HERE/../../fs-client/capi/python CUTTLEFS_LIBRARY=$CUTTLEFS_BIN/libcuttlefs.so \
        exec python3 "$HERE/native_regions.py" "$(one_sided_url)" "$CUTTLEFS_KEY" "$MNT" "$@"
}
# figure GROUP NAME: one of the server's figures.
figure() {
    timeout "$STATUS_TIMEOUT_S" "$CUTTLEFS_BIN/cuttlefs" status --json "$(server_url)" |
        python3 -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]][sys.argv[2]])' "$@"
}
# becomes GROUP NAME VALUE: within two minutes, for a session ends a lease (20 s) after its last sign.
becomes() {
    local waited value
    for ((waited = 0; waited < 600; waited++)); do
        value=$(figure "$1" "$2") && [[ $value == "$3" ]] && return 0
        sleep 0.2
    done
    echo "$2 is $value, not $3"
    return 1
}
abandon() {
    local name=$1 waited client
    (by_one_sided_url abandon "$name" "$WORK/$name.noted") >"$WORK/$name.log" 2>&1 &
    client=$!
    for ((waited = 0; waited < 600; waited++)); do
        [[ $(wc -l 2>/dev/null <"$WORK/$name.noted") -ge 200 ]] && break
        kill -0 "$client" 2>/dev/null || break
        sleep 0.1
    done
    kill -KILL "$client" && { wait "$client" 2>/dev/null; [[ $(wc -l <"$WORK/$name.noted") -ge 200 ]]; }
}
left_by() { (by_one_sided_url abandoned "$1" "$WORK/$1.noted" "$2"); }
check "grants of programs that have ended are gone" becomes file_regions write_grants 0
used=$(figure pool used_pages)
check "a program is killed that has a grant and unsynced changes" abandon killed
check "its grant goes with its session" becomes file_regions write_grants 0
check "what it had done is there, and others append behind it" left_by killed 0
check "another one is killed" abandon together
kill_server
launch_server
check "with the server: what was synced is there, whole, and others append behind it" left_by together 1
rm "$MNT/killed" "$MNT/together"
sync "$MNT"
check "all of their pages are free again" becomes pool used_pages "$used"

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
umount_fs
stop_server
check "fsck finds nothing" "$CUTTLEFS_BIN/cuttlefsd" fsck --pool "$POOL"
suite_end
