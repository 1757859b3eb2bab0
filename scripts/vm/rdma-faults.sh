#!/usr/bin/env bash
# Runs in the guest, for rdma-suites.sh: a server and two mounts over two soft-RoCE devices and a switch (rdma-pair.sh). While files are written, read
# and compared, packets are lost, delayed, duplicated, reordered and damaged, the switch is turned off, cables are pulled, and the server is killed.
# usage: rdma-faults.sh            CUTTLEFS_FAULT_OPS=N: fsx operations under each fault (500); last line: N passed, N failed
here=$(cd "$(dirname "$0")" && pwd)
export CUTTLEFS_RDMA_ADDRESS=10.9.0.1
source "$here/rdma-pair.sh" || exit 70
source "$here/../suites/lib.sh"
need_command fsx
suite_begin faults rdma
ping -c 3 -W 5 10.9.0.1 >/dev/null 2>&1
start_server 256M 16M
mount_fs
OTHER=$WORK/other
mount_fs "$OTHER"
operations=${CUTTLEFS_FAULT_OPS:-500}
cp -r /usr/include/linux/netfilter* "$WORK/" 2>/dev/null
mkdir -p "$WORK/tree" && mv "$WORK"/netfilter* "$WORK/tree/"
cat >"$WORK/fsx.toml" <<TOML
flen = 262144
[opsize]
min = 1
max = 65536
[weights]
close_open = 2
invalidate = 1
read = 10
write = 10
mapread = 5
mapwrite = 5
truncate = 3
fsync = 1
posix_fallocate = 2
punch_hole = 3
copy_file_range = 3
TOML

# Compares a file with fsx's model through one mount, and a tree through both. `$1` names the files that are left.
work() {
    fsx -f "$WORK/fsx.toml" -N "$operations" -S "$RANDOM" -P "$WORK" "$MNT/fsx-$1" || return 1
    cp -r "$WORK/tree" "$MNT/tree-$1" && diff -r "$WORK/tree" "$OTHER/tree-$1"
}
check "without a fault" work calm

# on_both netem ARGUMENTS: affects packets in both directions.
bad_cables() {
    local name=$1 end status
    shift
    for end in 0 1; do tc qdisc add dev "port$end" root netem "$@" || return 1; done
    work "$name"
    status=$?
    for end in 0 1; do tc qdisc del dev "port$end" root; done
    return $status
}
check "one packet in a hundred is lost each way" bad_cables lost loss 1%
check "packets are 2 ms late, more or less" bad_cables late delay 2ms 1ms
check "one in five overtakes others" bad_cables order delay 1ms reorder 20% 50%
check "one in fifty comes twice" bad_cables twice duplicate 2%
check "one in two hundred has a wrong bit" bad_cables damaged corrupt 0.5%

# Waits until no queue pair has come or gone for three seconds. Soft-RoCE (6.12) sends no message of connections any more, for as long as the device
# is there, once it could not send one; and who connects at the moment in which a port goes down cannot know that it does.
no_connects() {
    local before='' now same=0 looked
    for ((looked = 0; looked < 60; looked++)); do
        now=$(rdma res show qp | grep -c 'type RC')
        if [[ $now == "$before" ]]; then same=$((same + 1)); else same=0; fi
        ((same == 3)) && return 0
        before=$now
        sleep 1
    done
}

# away SECONDS DEVICE: takes the device down in the middle of the work.
away() {
    local seconds=$1 device=$2 worker status
    work "$device-$seconds" &
    worker=$!
    sleep 2
    [[ $device == switch0 ]] || no_connects
    ip link set "$device" down
    sleep "$seconds"
    ip link set "$device" up
    wait "$worker"
    status=$?
    return $status
}
check "the switch is off for a second" away 1 switch0
check "the switch is off for 20 seconds" away 20 switch0
check "the server's cable is pulled for 10 seconds" away 10 port0
check "the mounts' cable is pulled for 10 seconds" away 10 port1

# With a dead network and no program at work: a mount says that its server is away, and no more when it is back. Idle connections are looked at
# every ten seconds.
says_away() { [[ $(timeout 60 "$CUTTLEFS_BIN/cuttlefs" status "$MNT" --json 2>/dev/null | jq '.mount.server_is_away') == "$1" ]]; }
is_told() {
    local status=1
    ip link set switch0 down
    for ((waited = 0; waited < 60; waited++)); do
        says_away true && status=0 && break
        sleep 1
    done
    ip link set switch0 up
    ((status == 0)) || { echo "after a minute nothing is said"; return 1; }
    for ((waited = 0; waited < 120; waited++)); do
        says_away false && return 0
        sleep 1
    done
    echo "the server is back for two minutes, and is said to be away"
    return 1
}
check "an idle mount says that its network is gone" is_told

killed() {
    local worker
    work killed &
    worker=$!
    sleep 3
    kill_server
    sleep 1
    launch_server
    wait "$worker"
}
check "the server is killed and started again" killed
check "reconnects were counted" test "$(timeout 60 "$CUTTLEFS_BIN/cuttlefs" status "$MNT" --json | jq '[.. | objects | .reconnects? // empty] | add')" -gt 0
check "all of it is the same through both mounts" diff -r "$MNT" "$OTHER"
umount_fs "$OTHER"
umount_fs
stop_server
check "the pool is sound" "$CUTTLEFS_BIN/cuttlefsd" fsck --pool "$POOL"
suite_end
