#!/usr/bin/env bash
# flock and fcntl locks between two mounts of one server: conflicts, waits and their lengths, ends of locks; kills of the server and of a mount that
# holds locks; SQLite through both mounts.
# usage: locks.sh [shm|tcp|unix]
source "$(dirname "$0")/lib.sh"
suite_begin locks "${1:-shm}"
needs_server
need_command python3
readonly LEASE_S=4
start_server 512M 64M
# A lease that is short enough to wait for.
stop_server
sed -i -E "s/^lease_ms = [0-9]+/lease_ms = $((LEASE_S * 1000))/" "$POOL/cuttlefs.toml"
grep -q "^lease_ms = ${LEASE_S}000" "$POOL/cuttlefs.toml" || die "cuttlefs.toml has no lease to change"
launch_server
OTHER=$WORK/other
mount_fs
mount_fs "$OTHER"
programs() { timeout 60 python3 "$(dirname "${BASH_SOURCE[0]}")/locks.py" "$@"; }
# As a job, so that ending the job ends the program.
programs_beside() { exec timeout 60 python3 "$(dirname "${BASH_SOURCE[0]}")/locks.py" "$@"; }

check "what conflicts with what, and what ends a lock" programs semantics "$MNT" "$OTHER"
check "waiting: promptness, signals, deadlocks, a mount full of waiters" programs waits "$MNT" "$OTHER"

check "a lock's next holder sees what the last one appended, while others open the file" programs appended "$MNT" "$OTHER" 10

# Several processes on each mount increment one number, while the server is killed. $1: the kind of lock.
counting() {
    local file=count.$1 paths=() i pid
    for i in 1 2 3; do paths+=("$MNT/$file" "$OTHER/$file"); done
    programs_beside count "$1" "${paths[@]}" 200 &
    pid=$!
    sleep 0.3
    kill_server
    launch_server
    wait "$pid"
}
check "six processes count under fcntl, the server is killed" counting fcntl
check "six processes count under flock, the server is killed" counting flock
check "six processes count under locks of open files, the server is killed" counting ofd

# A lock that is held over two kills: nobody else gets it meanwhile, and nobody sees an error.
held_over_kills() {
    local pid status waited
    export STOP_FILE=$WORK/stop
    programs_beside pause "$MNT/pause" "$OTHER/pause" >"$WORK/pause.out" 2>&1 &
    pid=$!
    for ((waited = 0; waited < 100; waited++)); do
        grep -q held "$WORK/pause.out" && break
        sleep 0.1
    done
    for _ in 1 2; do
        kill_server
        sleep 0.2
        launch_server
        sleep 0.3
    done
    restart_server
    touch "$STOP_FILE"
    wait "$pid"
    status=$?
    cat "$WORK/pause.out"
    return $status
}
: >"$MNT/pause"
check "a lock is held over kills and a restart of the server, and nobody else gets it" held_over_kills

# SQLite with a rollback journal through both mounts, and a kill.
database() {
    local pid
    programs_beside sqlite "$MNT/base" "$OTHER/base" "$MNT/base" "$OTHER/base" 20 &
    pid=$!
    sleep 0.5
    kill_server
    launch_server
    wait "$pid"
}
check "SQLite through two mounts, the server is killed" database

# A mount is killed: its locks are free within the lease period.
mount_dies() {
    local pid waited
    programs_beside hold "$OTHER/orphaned" >"$WORK/hold.out" 2>&1 &
    pid=$!
    for ((waited = 0; waited < 100; waited++)); do
        grep -q held "$WORK/hold.out" && break
        sleep 0.1
    done
    kill -KILL "${CLIENT_PIDS[$OTHER]}" && wait "${CLIENT_PIDS[$OTHER]}" 2>/dev/null
    # Twice the lease: it may have been renewed just before the kill, and leases are checked four times in each period.
    programs take "$MNT/orphaned" $((LEASE_S * 2))
    local taken=$?
    force_unmount "$OTHER"
    unset "CLIENT_PIDS[$OTHER]"
    kill "$pid" 2>/dev/null
    wait "$pid" 2>/dev/null
    return $taken
}
check "locks of a killed mount are free within the lease" mount_dies

# Locks of one mount only, with locks=local.
mount_fs "$OTHER" locks=local
local_locks() {
    programs_beside hold "$MNT/local" >"$WORK/local.out" 2>&1 &
    local pid=$! waited
    for ((waited = 0; waited < 100; waited++)); do
        grep -q held "$WORK/local.out" && break
        sleep 0.1
    done
    programs take "$OTHER/local" 1
    local taken=$?
    kill "$pid"
    wait "$pid" 2>/dev/null
    return $taken
}
check "locks=local: locks are those of one mount" local_locks
nothing_left() {
    local waited
    for ((waited = 0; waited < 50; waited++)); do
        [[ $(status_json | python3 -c 'import json, sys; l = json.load(sys.stdin)["locks"]; print(l["held"], l["waiting"])') == "0 0" ]] && return 0
        sleep 0.1
    done
    status_json | grep -A6 '"locks"'
    return 1
}
check "no lock is left at the server" nothing_left
suite_end
