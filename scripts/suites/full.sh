#!/usr/bin/env bash
# A disk filled to its last page: ENOSPC and nothing else, deleting works, the space is back, df and du are exact.
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
    # More than fits: the last must fail, and for want of space.
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
    # The last group's pages wait for the flush after it (quarantine).
    for ((waited = 0; waited < 50; waited++)); do
        (($(used_pages) == 0)) && return 0
        sleep 0.1
    done
    echo "$(used_pages) pages are still in use"
    return 1
}
check "all space is back" all_free
suite_end
