#!/usr/bin/env bash
# The examples that docs/native.md, docs/np-rdma.md and the headings of cuttlefs.h and cuttlefs.py show, run as they stand there against a real server: what they print,
# and what a mount of the same server has of it then, to the byte.
# usage: examples.sh [shm|tcp|unix]
source "$(dirname "$0")/lib.sh"
need_command python3
need_command cc
suite_begin examples "${1:-shm}"
needs_server
EXAMPLES=$CUTTLEFS_BIN/examples
HERE=$(cd "$(dirname "$0")" && pwd)
CAPI=$HERE/../../fs-client/capi
for name in native_table native_log native_matrix remote_memory; do
    [[ -x $EXAMPLES/$name ]] || die "no $name in $EXAMPLES; build it: cargo build --release -p cuttlefs-client --examples"
done
[[ -e $CUTTLEFS_BIN/libcuttlefs.so ]] ||
    die "no libcuttlefs.so in $CUTTLEFS_BIN; build it: cargo build --release -p cuttlefs-capi"

# of_header, of_binding: the program in the heading of cuttlefs.h or cuttlefs.py: its indented lines.
of_header() { sed -n '/^ \*\/$/q; s/^ \*     //p' "$CAPI/include/cuttlefs.h"; }
of_binding() { sed -n '2,${/^"""$/q; s/\\\\/\\/g; s/^    //p}' "$CAPI/python/cuttlefs.py"; }
compile_header() {
    of_header >"$WORK/begin.c"
    cc -std=c11 -Wall -Wextra -Werror -o "$WORK/begin" "$WORK/begin.c" -I "$CAPI/include" -L "$CUTTLEFS_BIN" -lcuttlefs
}

start_server 512M 64M
mount_fs
export LD_LIBRARY_PATH=$CUTTLEFS_BIN${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export PYTHONPATH=$CAPI/python CUTTLEFS_LIBRARY=$CUTTLEFS_BIN/libcuttlefs.so PYTHONDONTWRITEBYTECODE=1
of_binding >"$WORK/begin.py"
check "the program in the heading of cuttlefs.h compiles" compile_header

# Over shm nothing is changed one-sidedly: there changes are requests. The table is filled over unix as well.
example() { python3 "$HERE/examples.py" "$WORK" "$EXAMPLES" "$(server_url)" "unix://$WORK/unix.sock" "$MNT" "$1"; }
check "native_matrix: the product of three processes, to the bit" example matrix
check "native_log: three processes, C and Python append at once; each line is there, whole, once" example log
check "native_table: three processes put the same keys at once; no put is lost, the last one counts" example table
check "native_table: a slot whose writer is gone is let go, to readers and writers" example abandoned
check "what they refuse names the next step, and nothing is changed" example refused
umount_fs
stop_server
check "remote_memory: 16 MiB of another process's, 4 of them in memory, are as written, twice; a part that fits is read one-sidedly" example memory
check "fsck finds nothing" "$CUTTLEFS_BIN/cuttlefsd" fsck --pool "$POOL"
suite_end
