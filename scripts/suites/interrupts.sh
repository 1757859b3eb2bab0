#!/usr/bin/env bash
# Programs that wait for a server that is away can be killed, and the operation that they had begun is done once or not at all.
# usage: interrupts.sh [shm|tcp|unix]
source "$(dirname "$0")/lib.sh"
suite_begin interrupts "${1:-shm}"
needs_server
start_server 512M 64M
mount_fs
mkdir "$MNT/dir" && head -c 1000000 /dev/urandom >"$WORK/bytes" && cp "$WORK/bytes" "$MNT/file" || die "cannot begin"
python_part() { python3 "$(dirname "$0")/interrupts.py" "$@"; }

stop() { kill -STOP "$SERVER_PID"; }
continue_() { kill -CONT "$SERVER_PID"; }

# The kernel's cache has nothing of the file or its names, so each program has to ask the server.
forget() { echo 3 >/proc/sys/vm/drop_caches && sleep 1.2; }

# Number of the mount's threads, including those with a request that nobody waits for any more.
threads_of_mount() { ls "/proc/${CLIENT_PIDS[$MNT]}/task" | wc -l; }

killed_while_stopped() {
    forget
    stop
    python_part killed "$MNT"
    local result=$?
    continue_
    return $result
}
threads_before=$(threads_of_mount)
check "programs end at once when they are killed while the server is stopped" killed_while_stopped
check "everything works when the server goes on" cmp "$WORK/bytes" "$MNT/file"
check "what was begun is whole: a directory or none" python_part made "$MNT"

killed_while_away() {
    forget
    kill_server
    python_part killed "$MNT"
    local result=$?
    launch_server
    return $result
}
check "programs end at once when they are killed while there is no server" killed_while_away
check "everything works with the next server" cmp "$WORK/bytes" "$MNT/file"
check "what was begun is whole after it, too" python_part made "$MNT"

signalled() {
    forget
    python_part signalled "$MNT" "$SERVER_PID"
    local result=$?
    continue_
    return $result
}
check "a handled signal ends a direct read and an fsync with EINTR, and no mkdir" signalled

# Writers are killed at random moments, while the server is stopped and continued again and again.
looped() {
    (while sleep 0.$((RANDOM % 3 + 1)); do stop && sleep 0.$((RANDOM % 4 + 1)) && continue_; done) &
    local stopper=$! result
    python_part looped "$MNT" "${CUTTLEFS_INTERRUPT_ROUNDS:-60}"
    result=$?
    kill "$stopper" 2>/dev/null
    wait "$stopper" 2>/dev/null
    continue_
    return $result
}
check "of killed appenders every acknowledged record is there once, and no record twice" looped

nothing_left() {
    local waited
    for ((waited = 0; waited < 100; waited++)); do
        (($(threads_of_mount) <= threads_before + 4)) && break
        sleep 0.1
    done
    echo "threads: $threads_before before, $(threads_of_mount) now"
    (($(threads_of_mount) <= threads_before + 4)) || return 1
    # More programs at once than there are lanes, and each uses all of them.
    seq 1 40 | xargs -P 40 -I{} sh -c "cp '$WORK/bytes' '$MNT/dir/{}' && cmp '$WORK/bytes' '$MNT/dir/{}'"
}
check "no thread, slot or lane stays behind" nothing_left
check "the mount tells of it" counter fuse_interrupted "$MNT"
check "it unmounts" umount_fs
suite_end
