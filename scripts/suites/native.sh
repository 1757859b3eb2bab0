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
suite_end
