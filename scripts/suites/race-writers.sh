#!/usr/bin/env bash
# Four mounts and 32 writers race: buffered, O_DIRECT, mapped and appending writes, in files of their own and in shared files whose pages lie in the
# same zones of the pool; bursts, with idle time between them that is longer than marks are kept. The server is killed. The power is cut: the disk
# below the pool is copied in one moment, under load, and the copy is served. Each block names its writer and place (race_writers.py).
# usage: race-writers.sh [shm|tcp|unix]      CUTTLEFS_RACE_SECONDS=N (bursts and idle time)   CUTTLEFS_RACE_SEED=N (drawn and printed)
source "$(dirname "$0")/lib.sh"
suite_begin race-writers "${1:-shm}"
needs_server
need_command python3
seconds=${CUTTLEFS_RACE_SECONDS:-58}
seed=${CUTTLEFS_RACE_SEED:-$((RANDOM * 32768 + RANDOM))}
say "seed $seed"
race=$(dirname "$0")/race_writers.py
# Seconds of bursts in one zone, and of other bursts (race_writers.py, burst).
readonly NARROW_S=1
readonly BURST_S=4
# A mark without further writes is cleared by the second sweep after it; sweeps are five seconds apart.
readonly IDLE_S=11
readonly HANG_S=60
# Files that are appended to grow all the time.
readonly POOL_MIB=$((256 + ${CUTTLEFS_RACE_SECONDS:-0} / 5))
logs=$WORK/logs
go=$WORK/go
stop=$WORK/stop
mkdir "$logs"

# The pool lies on a file system in a file, which lies on one that can copy a file in one moment (XFS, reflink). The copy has all writes that were
# done, and perhaps those in flight, but not what is only in the page cache: as after a power loss of a disk without a cache. (For disks with a cache,
# which lose and tear unsynced writes, there is the suite crash-points.)
cuts=false
# Unmounts file systems below a server that has ended: the kernel releases its io_uring, and so its files, a moment later.
unmount_below() {
    local waited
    for ((waited = 0; waited < HANG_S * 10; waited++)); do
        ! mountpoint -q "$1" || umount "$1" 2>/dev/null || { sleep 0.1 && continue; }
        return 0
    done
    return 1
}
suite_leave() {
    local at
    # Finally unmounts lazily, without a message, since the last line must be the summary.
    for at in cut pool outer; do
        unmount_below "$WORK/$at" || umount -l "$WORK/$at"
    done
}
make_disks() {
    ((EUID == 0)) && command -v mkfs.xfs >/dev/null && [[ -e /dev/loop-control ]] || return 1
    mkdir -p "$WORK/outer" "$WORK/pool" "$WORK/cut"
    truncate -s 4G "$WORK/outer.xfs" && mkfs.xfs -q -m reflink=1 "$WORK/outer.xfs" &&
        mount -o loop "$WORK/outer.xfs" "$WORK/outer" &&
        truncate -s $((POOL_MIB + 384))M "$WORK/outer/disk" && mkfs.xfs -q "$WORK/outer/disk" &&
        mount -o loop "$WORK/outer/disk" "$WORK/pool"
}
if make_disks >"$WORK/disks.log" 2>&1; then
    cuts=true
else
    say "no loop devices with XFS here: no power is cut"
    suite_leave
fi

start_server "${POOL_MIB}M" 64M
mounts=()
for number in 1 2 3 4; do
    mounts+=("$WORK/mnt$number")
    mount_fs "$WORK/mnt$number"
done
check "files are made" python3 "$race" prepare "${mounts[0]}" || exit 1
python3 "$race" write "$logs" "$go" "$stop" "$seed" "${mounts[@]}" >"$WORK/writers.log" 2>&1 &
writers=$!

now_ns() { python3 -c 'import time; print(time.monotonic_ns())'; }

# Copies the disk while all writers write; notes the times before and after.
cut_power() {
    local from
    from=$(now_ns)
    cp --reflink=always "$WORK/outer/disk" "$WORK/outer/copy" || return 1
    echo "$from $(now_ns)" >"$WORK/cut.moments"
}

# Starts a server on a copy: it must serve everything that was promised, and fsck must find nothing.
look_at_cut() {
    local url=unix://$WORK/cut.sock pid waited from to status
    read -r from to <"$WORK/cut.moments"
    mount -o loop,nouuid "$WORK/outer/copy" "$WORK/cut" || return 1
    "$CUTTLEFS_BIN/cuttlefsd" serve --pool "$WORK/cut" --memory 64M --listen "$url" >>"$WORK/cut-server.log" 2>&1 </dev/null &
    pid=$!
    for ((waited = 0; waited < START_TIMEOUT_S * 10; waited++)); do
        timeout 5 "$CUTTLEFS_BIN/cuttlefs" status "$url" >/dev/null 2>&1 && break
        kill -0 "$pid" 2>/dev/null || { tail "$WORK/cut-server.log" && return 1; }
        sleep 0.1
    done
    mkdir -p "$WORK/look"
    "$CUTTLEFS_BIN/cuttlefs" mount "$url" "$WORK/look" --foreground >>"$WORK/client.log" 2>&1 </dev/null &
    CLIENT_PIDS[$WORK/look]=$!
    for ((waited = 0; waited < START_TIMEOUT_S * 10; waited++)); do
        mountpoint -q "$WORK/look" && break
        sleep 0.1
    done
    python3 "$race" check "$logs" "$WORK/look" "$from" "$to"
    status=$?
    umount_fs "$WORK/look"
    end_process "$pid" || status=1
    "$CUTTLEFS_BIN/cuttlefsd" fsck --pool "$WORK/cut" || status=1
    unmount_below "$WORK/cut" || status=1
    rm "$WORK/outer/copy"
    return "$status"
}

# The server is still the one that was started, and reports no panic.
serves_on() {
    ! grep -a "panicked at" "$WORK"/*.log || return 1
    kill -0 "$SERVER_PID"
}

ended=$((SECONDS + seconds))
for ((round = 1; SECONDS < ended; round++)); do
    python3 "$race" burst "$go" "$round"
    if ((round % 2)); then
        sleep "$NARROW_S"
    else
        sleep "$((BURST_S / 2))"
        if ((round % 4)); then
            ! $cuts || check "round $round: the power is cut" cut_power
        else
            kill_server
            launch_server
        fi
        sleep "$((BURST_S / 2))"
    fi
    rm "$go"
    serves_on || { fail "round $round: the server ended by itself" && break; }
    idle_until=$((SECONDS + IDLE_S))
    if [[ -e $WORK/cut.moments ]]; then
        check "round $round: what the power left is what was promised" look_at_cut
        rm "$WORK/cut.moments"
    fi
    ((idle_until > SECONDS)) && sleep "$((idle_until - SECONDS))"
done
# A last burst after the idle time, and its clean end.
python3 "$race" burst "$go" "$((round + round % 2))"
sleep "$BURST_S"
rm "$go"
touch "$stop"
writers_end() {
    local waited
    for ((waited = 0; waited < HANG_S * 10; waited++)); do
        kill -0 "$writers" 2>/dev/null || {
            wait "$writers"
            return
        }
        sleep 0.1
    done
    echo "after $HANG_S s some writers still wait for an answer"
    kill -TERM "$writers"
    return 1
}
writers_end
status=$?
tail -n 5 "$WORK/writers.log"
check "$((round - 1)) rounds: no writer saw an error or waits for ever" test "$status" -eq 0
check "the server served on" serves_on
remount_fs "${mounts[1]}"
check "what was written is there" python3 "$race" check "$logs" "${mounts[1]}"
kill_server
launch_server
remount_fs "${mounts[2]}"
check "what was written is there after a kill" python3 "$race" check "$logs" "${mounts[2]}"
for at in "${mounts[@]}"; do umount_fs "$at"; done
stop_server
check "fsck finds nothing" "$CUTTLEFS_BIN/cuttlefsd" fsck --pool "$POOL"
suite_end
