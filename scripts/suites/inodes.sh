#!/usr/bin/env bash
# Features of inodes on Linux: ACLs, marks of chattr(1), whiteouts, set-id bits, removed directories, files without a name, handles.
# usage: inodes.sh [shm|tcp|unix]
source "$(dirname "$0")/lib.sh"
need_command python3
suite_begin inodes "${1:-shm}"
needs_server
[[ $(id -u) == 0 ]] || die "who may do what can be tested by root only"
start_server 256M 32M
mount_fs
readonly OTHER=$WORK/other
mount_fs "$OTHER" cache=none
chmod 755 "$WORK"

# at_both NAME: runs a check in a directory of its own that both mounts see; then once more through the other one.
at_both() {
    mkdir "$MNT/$1" "$MNT/$1-back" && "${inodes[@]}" "$1" "$MNT/$1" "$OTHER/$1" &&
        "${inodes[@]}" "$1" "$OTHER/$1-back" "$MNT/$1-back"
}
inodes=(timeout 60 python3 "$(dirname "$0")/inodes.py")

check "a directory that was removed while it was open answers" at_both removed_directory
check "access control lists are checked, and follow the mode" at_both acls
check "default lists are inherited, and the umask counts where there are none" at_both inherited_acls
check "who may not keep set-id bits takes them" at_both set_group_id
check "RENAME_WHITEOUT leaves a device 0:0" at_both whiteouts
check "marks of chattr hold for root, too" at_both marks
check "handles hold when the kernel has forgotten the inode" at_both handles
check "and those of directories" at_both directory_handles

# outlives_kills CHECK LINE...: kills the server each time the check prints the next of these lines and waits.
outlives_kills() {
    local line said name=$1
    shift
    mkdir "$MNT/$name" || return 1
    coproc HOLDER { "${inodes[@]}" "$name" "$MNT/$name"; }
    local pid=$HOLDER_PID
    for line; do
        read -r said <&"${HOLDER[0]}" && [[ $said == "$line" ]] || return 1
        kill_server && launch_server || return 1
        echo >&"${HOLDER[1]}"
    done
    wait "$pid"
}
check "and answers when the server was killed" outlives_kills removed_directory_and_restart open
# The files that remain are small, so hardly any space may be in use.
space_is_back() {
    local waited
    for ((waited = 0; waited < 100; waited++)); do
        (($(df --output=used --block-size=1K "$MNT" | tail -n 1) < 1024)) && return 0
        sleep 0.1
    done
    df "$MNT"
    return 1
}
# Since 6.1 Linux asks FUSE file systems for ACLs.
if "${inodes[@]}" has_nameless "$MNT"; then
    check "a file without a name gets one, or leaves nothing" at_both nameless
    check "also when the server is killed before and behind it" outlives_kills nameless_and_restart open named
    check "what never got a name takes no space" space_is_back
fi
nothing_left() {
    local waited
    for ((waited = 0; waited < 100; waited++)); do
        (($(df --output=iused "$MNT" | tail -n 1) == $(find "$MNT" | wc -l))) && return 0
        sleep 0.1
    done
    df -i "$MNT"
    find "$MNT"
    return 1
}
check "every inode has a name" nothing_left
umount_fs "$OTHER"
umount_fs
stop_server
check "fsck finds nothing" "$CUTTLEFS_BIN/cuttlefsd" fsck --pool "$POOL"
suite_end
