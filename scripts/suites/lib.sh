# shellcheck shell=bash
# Shared by the mount suites: a server on a temporary pool, mounts over one link, and an end that leaves nothing behind.
#
#   source lib.sh
#   suite_begin NAME "$@"          # takes the link (shm, tcp, unix or rdma) from the command line
#   start_server SIZE MEMORY       # cuttlefsd format + serve
#   mount_fs                       # mounts; $MNT is the mount point
#   check "what holds" COMMAND...  # one test: passes if the command succeeds
#   suite_end                      # last line: N passed, N failed; exits non-zero if any failed
#
# With CUTTLEFS_SUITE_DIR=DIR a suite runs on that directory instead, on any file system, to see the suite's result for a known one. Then no server
# and no mount is started, and needs_server skips.
#
# `rdma` needs an RNIC, and CUTTLEFS_RDMA_ADDRESS, an address of its interface: scripts/vm/rdma-suites.sh provides both.
#
# Only processes that this shell started are ever signalled. On any exit (failure, Ctrl-C, TERM from `timeout`) mounts are removed, processes ended
# and, if something failed, the ends of the logs shown.

set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"

# Longest time until a server or mount answers, before the suite gives up.
START_TIMEOUT_S=60
# Longest time that a process may take to end, before it is killed.
STOP_TIMEOUT_S=60
# Longest time that the server may take to tell its status.
STATUS_TIMEOUT_S=15
# Lines of each log shown after a failure.
readonly LOG_TAIL_LINES=40

SUITE=unnamed
LINK=
WORK=
MNT=
PASSED=0
FAILED=0
SERVER_PID=
SERVER_LAUNCHES=0
# Pids of `cuttlefs mount --foreground`, by mount point.
declare -A CLIENT_PIDS=()
# Other file systems that the suite mounted in $WORK.
OTHER_MOUNTS=()

suite_begin() {
    SUITE=$1
    LINK=${2:-shm}
    case $LINK in
        shm | tcp | unix) ;;
        rdma)
            # On a virtual machine without KVM.
            START_TIMEOUT_S=180 STOP_TIMEOUT_S=120 STATUS_TIMEOUT_S=60
            [[ -n ${CUTTLEFS_RDMA_ADDRESS:-} ]] || die "CUTTLEFS_RDMA_ADDRESS must be an address of an RNIC's interface"
            ;;
        *) die "unknown link $LINK; usage: $0 [shm|tcp|unix|rdma]" ;;
    esac
    # Not /tmp, which may be a tmpfs: O_DIRECT must reach a disk.
    WORK=$(mktemp -d "${CUTTLEFS_SUITE_TMP:-/var/tmp}/cft-$SUITE.XXXX") || die "cannot make a directory in ${CUTTLEFS_SUITE_TMP:-/var/tmp}"
    # Tests switch users, and all of them must be able to reach the mount.
    chmod 755 "$WORK"
    trap 'suite_cleanup $?' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    if on_directory; then
        MNT=$CUTTLEFS_SUITE_DIR/cuttlefs-suite.$$
        mkdir "$MNT" || exit 1
        LINK=directory
    else
        [[ -x $CUTTLEFS_BIN/cuttlefsd && -x $CUTTLEFS_BIN/cuttlefs ]] ||
            die "no binaries in $CUTTLEFS_BIN; build them (cargo build --release) or set CUTTLEFS_BIN"
        MNT=$WORK/mnt
    fi
    say "$SUITE over $LINK"
}

on_directory() { [[ -n ${CUTTLEFS_SUITE_DIR:-} ]]; }

# Ends the suite without a verdict if there is no server to look at.
needs_server() {
    on_directory || return 0
    say "$SUITE: skipped, it needs a server of its own"
    echo "0 passed, 0 failed"
    exit 0
}

need_command() { command -v "$1" >/dev/null || die "$1 is missing; run scripts/setup.sh --tests"; }

pass() {
    PASSED=$((PASSED + 1))
    printf 'ok    %s/%s: %s\n' "$SUITE" "$LINK" "$*"
}

fail() {
    FAILED=$((FAILED + 1))
    printf 'FAIL  %s/%s: %s\n' "$SUITE" "$LINK" "$*"
}

# check "description" COMMAND...: shows the command's output only if it fails.
check() {
    local started=$SECONDS
    local what=$1 output=$WORK/check.out status
    shift
    "$@" >"$output" 2>&1 && {
        pass "$what ($((SECONDS - started)) s)"
        return 0
    }
    status=$?
    fail "$what (exit status $status)"
    tail -n "$LOG_TAIL_LINES" "$output" | sed 's/^/      | /'
    return 1
}

suite_end() {
    echo "$PASSED passed, $FAILED failed"
    ((FAILED == 0 && PASSED > 0))
    exit
}

# ---- server ----------------------------------------------------------------------------------------------------

# start_server SIZE MEMORY
start_server() {
    on_directory && return 0
    POOL=$WORK/pool
    POOL_SIZE=$1
    SERVER_MEMORY=$2
    "$CUTTLEFS_BIN/cuttlefsd" format --pool "$POOL" --size "$POOL_SIZE" >>"$WORK/format.log" 2>&1 || {
        cat "$WORK/format.log" >&2
        die "format failed"
    }
    launch_server
}

# The URL that a client of this suite's link mounts.
server_url() {
    case $LINK in
        shm) echo "shm://$WORK/shm.sock" ;;
        unix) echo "unix://$WORK/unix.sock" ;;
        tcp) echo "tcp://127.0.0.1:$PORT" ;;
        rdma) echo "rdma://$CUTTLEFS_RDMA_ADDRESS:$PORT" ;;
    esac
}

launch_server() {
    # Over tcp TLS is tested. The server makes the key when it starts.
    export CUTTLEFS_KEY=$POOL/key
    # Below the kernel's range of ephemeral ports, so that no other program gets it by chance between two starts.
    PORT=${PORT:-$((20000 + $$ % 10000))}
    SERVER_LAUNCHES=$((SERVER_LAUNCHES + 1))
    local listen=(--listen "tcp://127.0.0.1:$PORT" --listen "unix://$WORK/unix.sock" --listen "shm://$WORK/shm.sock")
    # Over this link only trusted clients read one-sidedly.
    [[ $LINK != rdma ]] ||
        listen=(--listen "$(server_url)" --trust-clients ${CUTTLEFS_PAGE_WINDOW:+--page-window "$CUTTLEFS_PAGE_WINDOW"})
    "$CUTTLEFS_BIN/cuttlefsd" serve --pool "$POOL" --memory "$SERVER_MEMORY" \
        ${CUTTLEFS_DURABILITY:+--durability "$CUTTLEFS_DURABILITY"} \
        "${listen[@]}" \
        >>"$WORK/server.log" 2>&1 </dev/null &
    SERVER_PID=$!
    local waited
    for ((waited = 0; waited < START_TIMEOUT_S * 10; waited++)); do
        kill -0 "$SERVER_PID" 2>/dev/null || {
            SERVER_PID=
            fail "the server ended while starting"
            exit 1
        }
        timeout "$STATUS_TIMEOUT_S" "$CUTTLEFS_BIN/cuttlefs" status "$(server_url)" >/dev/null 2>&1 && return 0
        sleep 0.1
    done
    fail "the server does not answer after $START_TIMEOUT_S s"
    exit 1
}

# Ends a process of this suite: TERM, then KILL. Returns non-zero if it had to be killed.
end_process() {
    local pid=$1 waited
    kill -TERM "$pid" 2>/dev/null || return 0
    for ((waited = 0; waited < STOP_TIMEOUT_S * 10; waited++)); do
        kill -0 "$pid" 2>/dev/null || {
            wait "$pid" 2>/dev/null
            return 0
        }
        sleep 0.1
    done
    kill -KILL "$pid" 2>/dev/null
    wait "$pid" 2>/dev/null
    return 1
}

# Stops the server cleanly.
stop_server() {
    on_directory && return 0
    [[ -n $SERVER_PID ]] || return 0
    local pid=$SERVER_PID
    SERVER_PID=
    end_process "$pid" || {
        fail "the server did not stop within $STOP_TIMEOUT_S s of SIGTERM"
        return 1
    }
}

# Kills the server, like a crash of the process.
kill_server() {
    kill -KILL "$SERVER_PID"
    wait "$SERVER_PID" 2>/dev/null
    SERVER_PID=
}

restart_server() {
    on_directory && return 0
    stop_server
    launch_server
}

# ---- mounts ----------------------------------------------------------------------------------------------------

# mount_fs [MNT] [OPTIONS]: mounts, at $MNT by default.
mount_fs() {
    on_directory && return 0
    local at=${1:-$MNT} options=() waited
    [[ -n ${2:-} ]] && options=(-o "$2")
    mkdir -p "$at"
    "$CUTTLEFS_BIN/cuttlefs" mount "$(server_url)" "$at" "${options[@]}" --foreground \
        >>"$WORK/client.log" 2>&1 </dev/null &
    CLIENT_PIDS[$at]=$!
    for ((waited = 0; waited < START_TIMEOUT_S * 10; waited++)); do
        mountpoint -q "$at" && return 0
        kill -0 "${CLIENT_PIDS[$at]}" 2>/dev/null || {
            unset "CLIENT_PIDS[$at]"
            fail "the mount ended while starting"
            exit 1
        }
        sleep 0.1
    done
    fail "$at is no mount point after $START_TIMEOUT_S s"
    exit 1
}

# Unmounts cleanly.
umount_fs() {
    on_directory && return 0
    local at=${1:-$MNT} pid waited
    pid=${CLIENT_PIDS[$at]:-}
    timeout "$STOP_TIMEOUT_S" "$CUTTLEFS_BIN/cuttlefs" umount "$at" >>"$WORK/client.log" 2>&1 || {
        fail "cuttlefs umount $at failed"
        return 1
    }
    unset "CLIENT_PIDS[$at]"
    [[ -n $pid ]] || return 0
    for ((waited = 0; waited < STOP_TIMEOUT_S * 10; waited++)); do
        kill -0 "$pid" 2>/dev/null || {
            wait "$pid" 2>/dev/null
            return 0
        }
        sleep 0.1
    done
    fail "the client still runs $STOP_TIMEOUT_S s after its unmount"
    end_process "$pid"
    return 1
}

# Unmounts and mounts again: the caches of client and kernel are empty then.
remount_fs() {
    umount_fs "$@" && mount_fs "$@"
}

# Stops and starts everything: then only bytes on SSD are left.
restart_all() {
    umount_fs && restart_server && mount_fs
}

# Removes a mount, whatever state it is in.
force_unmount() {
    local at=$1 unmounting waited
    # The path of a dead or hung FUSE mount must not be touched, so this reads the mount table.
    awk -v at="$at" '$5 == at {found = 1} END {exit !found}' /proc/self/mountinfo || return 0
    # Not under `timeout`: if no server answers, umount(8) waits in the kernel, and no signal ends it.
    umount "$at" 2>/dev/null &
    unmounting=$!
    for ((waited = 0; waited < 100; waited++)); do
        kill -0 "$unmounting" 2>/dev/null || {
            wait "$unmounting" && return 0
            break
        }
        sleep 0.1
    done
    # -f aborts the connection, which frees every request that waits in it; without it a hung client keeps its users waiting for ever.
    umount -f -l "$at" 2>/dev/null || fusermount3 -uz "$at" 2>/dev/null
}

suite_cleanup() {
    local status=$1 at log
    trap - EXIT INT TERM HUP
    cd /
    if [[ $status != 0 || $FAILED != 0 ]] && ! on_directory; then
        for log in "$WORK"/*.log; do
            [[ -s $log ]] || continue
            echo "---- last lines of ${log##*/}"
            tail -n "$LOG_TAIL_LINES" "$log"
        done >&2
    fi
    if on_directory; then
        [[ -n ${CUTTLEFS_SUITE_KEEP:-} ]] || rm -rf "$MNT"
    else
        for at in "${!CLIENT_PIDS[@]}"; do
            force_unmount "$at"
            end_process "${CLIENT_PIDS[$at]}"
        done
        [[ -n $SERVER_PID ]] && end_process "$SERVER_PID"
    fi
    # Everything else that a suite left running in the background, such as samplers and writers.
    local pid
    for pid in $(jobs -p); do kill -KILL "$pid" 2>/dev/null; done
    wait 2>/dev/null
    for at in "${OTHER_MOUNTS[@]}"; do umount -l "$at"; done
    # --one-file-system: if a mount is still there, its files must not be deleted.
    # File systems that the suite itself mounted below its directory.
    ! declare -F suite_leave >/dev/null || suite_leave
    if [[ -n ${CUTTLEFS_SUITE_KEEP:-} ]]; then
        say "kept: $WORK"
    else
        rm -rf --one-file-system "$WORK"
    fi
    # A suite that dies without its own last line counts as one failure; suite_end has already printed its line.
    exit "$status"
}

# ---- looking at the server -------------------------------------------------------------------------------------

# Prints the server's status as JSON.
status_json() { timeout $((2 * STATUS_TIMEOUT_S)) "$CUTTLEFS_BIN/cuttlefs" status "${1:-$(server_url)}" --json; }

# counter NAME [SERVER-OR-MNT]: prints a counter of the status, wherever in it the name is. For a counter that is kept by kind (an object) it prints
# the sum of the kinds. Fails if there is none: a renamed counter must not look like zero.
counter() {
    status_json "${2:-$(server_url)}" | jq -e --arg name "$1" '
        [.. | objects | select(has($name)) | .[$name] | if type == "object" then [.[] | numbers] | add // 0 else . end]
        | if length == 0 then error("no counter named " + $name) else add end'
}

# Kilobytes of a process's resident memory, shared memory included.
resident_kib() { awk '/^VmRSS:/ {print $2}' "/proc/$1/status"; }

# Converts a size such as 64M to bytes.
bytes_of() { numfmt --from=iec "$1"; }
