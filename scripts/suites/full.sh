#!/usr/bin/env bash
# A disk is filled to its last page: the only error is ENOSPC, deleting works, the space comes back, df and du are exact.
# usage: full.sh [shm|tcp|unix]
source "$(dirname "$0")/lib.sh"
suite_begin full "${1:-shm}"
needs_server
readonly POOL_MIB=128
start_server "${POOL_MIB}M" 32M
mount_fs

used_pages() { df -B4096 --output=used "$MNT" | tail -1 | tr -d ' '; }
free_pages() { df -B4096 --output=avail "$MNT" | tail -1 | tr -d ' '; }
data_pages() { find "$MNT" -type f -printf '%b\n' | awk '{sum += $1} END {print sum / 8}'; }
exact() {
    local used data
    used=$(used_pages) data=$(data_pages)
    [[ $used == "$data" ]] && return 0
    echo "df says $used pages, the files have $data"
    return 1
}

check "an empty file system has no page in use" test "$(used_pages)" -eq 0
fill() {
    local file
    # More than fits: the last file must fail, and for lack of space.
    for file in $(seq 1 $((POOL_MIB / 8 + 1))); do
        dd if=/dev/urandom of="$MNT/fill$file" bs=64k count=128 status=none 2>"$WORK/dd.err" && continue
        grep -q 'No space left' "$WORK/dd.err" && return 0
        cat "$WORK/dd.err"
        return 1
    done
    echo "nothing refused"
    return 1
}
check "writing ends with ENOSPC" fill
check "not a page is left" test "$(free_pages)" -eq 0
check "df and du agree when full" exact
check "what was written can be synced" sync -f "$MNT"
sum_before=$(cat "$MNT"/fill[1-9] | sha256sum)
overwrite() { dd if=/dev/urandom of="$MNT/fill10" bs=64k count=16 conv=notrunc,fsync status=none; }
check "overwriting needs no space" overwrite
check "names can still be made and renamed" bash -c "touch '$MNT/empty' && mkdir '$MNT/d' && mv '$MNT/empty' '$MNT/d/moved'"
refused() { ! (echo x >"$MNT/one-byte") 2>/dev/null && [[ $(stat -c %s "$MNT/one-byte") == 0 ]]; }
check "one more byte is refused and leaves nothing" refused
check "what is there stays right" test "$(cat "$MNT"/fill[1-9] | sha256sum)" = "$sum_before"
check "deleting works" rm "$MNT/fill1" "$MNT/fill2"
again() { dd if=/dev/urandom of="$MNT/again" bs=64k count=256 conv=fsync status=none; }
check "all that was freed can be written again" again
check "df and du agree" exact
restart_all
check "df and du agree after down and up" exact
check "delete everything" rm -rf "$MNT"/fill* "$MNT/again" "$MNT/d" "$MNT/one-byte"
all_free() {
    local waited
    # The last group's pages stay in quarantine until the flush after it.
    for ((waited = 0; waited < 50; waited++)); do
        (($(used_pages) == 0)) && return 0
        sleep 0.1
    done
    echo "$(used_pages) pages are still in use"
    return 1
}
check "all space is back" all_free

# ---- the metadata's disk -----------------------------------------------------------------------------------------
# The pool's directory is on a small disk of its own, the data file elsewhere.
umount_fs
stop_server
readonly SMALL_MIB=10
POOL=$WORK/small
mkdir "$POOL"
if ((EUID != 0)) || ! mount -t tmpfs -o size="${SMALL_MIB}m" tmpfs "$POOL"; then
    say "the metadata's full disk: skipped, it needs root and a tmpfs"
    suite_end
fi
OTHER_MOUNTS+=("$POOL")
"$CUTTLEFS_BIN/cuttlefsd" format --pool "$POOL" --size 64M --data "$WORK/elsewhere" >>"$WORK/format.log" 2>&1 || die "format failed"
launch_server
mount_fs
free_inodes() { df --output=iavail "$MNT" | tail -1 | tr -d ' '; }
fill_with() {
    local round output
    for round in $(seq 1 200); do
        output=$("$@" "$round" 2>&1) && continue
        grep -q 'No space left' <<<"$output" && return 0
        echo "$output" | tail -3
        return 1
    done
    echo "nothing refused"
    return 1
}
python_fill() {
    python3 - "$MNT" "$1" "$2" <<'PROGRAM'
import os, sys
mnt, kind, number = sys.argv[1:]
for index in range(1000):
    # Long names fill the disk sooner.
    path = f"{mnt}/{kind}/{number}-{index}-".ljust(len(mnt) + 200, "n")
    if kind == "names":
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    elif index < 20:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
        for attribute in range(4):
            os.setxattr(path, f"user.a{attribute}", os.urandom(65536))
PROGRAM
}
deleting_works() {
    local kind=$1 file
    file=$(ls "$MNT/$kind" | head -1)
    rm "$MNT/$kind/$file" && sync -f "$MNT" && truncate -s 0 "$MNT/$kind/$(ls "$MNT/$kind" | head -1)" && mv "$MNT/$kind" "$MNT/moved" && mv "$MNT/moved" "$MNT/$kind"
}
room_is_back() {
    local waited
    for ((waited = 0; waited < 100; waited++)); do
        (($(free_inodes) > 0)) && touch "$MNT/again" && rm "$MNT/again" && return 0
        sleep 0.1
    done
    df -i "$MNT"
    df "$POOL"
    return 1
}
for kind in attributes names; do
    mkdir "$MNT/$kind"
    check "$kind fill the metadata's disk up to ENOSPC" fill_with python_fill "$kind"
    check "df says that no inode is free, or next to none" test "$(free_inodes)" -lt 1024
    check "what is there is read ($kind)" bash -c "ls -l '$MNT/$kind' | wc -l"
    check "unlink, sync, truncate, rename work when it is full of $kind" deleting_works "$kind"
    restart_all
    check "and after a restart on the full disk" deleting_works "$kind"
    check "everything can be deleted ($kind)" rm -rf "$MNT/$kind"
    check "there is room again" room_is_back
done
suite_end
