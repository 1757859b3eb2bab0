#!/usr/bin/env bash
# Real programs under `cuttlefs swap`, with a memory node of its own and with `cuttlefsd memory`: right results within a limit, and an end with a message
# where memory is lost. What the library does with a process's memory is tested by cuttlefs-swapped's test `swapped`.
# usage: swap.sh [LINK]      links make no difference to it
source "$(dirname "$0")/lib.sh"
need_command python3
need_command jq
suite_begin swap "${1:-shm}"
on_directory && needs_server
[[ -e $CUTTLEFS_BIN/libcuttlefs_swapped.so ]] ||
    die "no libcuttlefs_swapped.so in $CUTTLEFS_BIN; build it: cargo build --release -p cuttlefs-swapped"
[[ -x $CUTTLEFS_BIN/cuttlefs-bench ]] || die "no cuttlefs-bench in $CUTTLEFS_BIN; build it: cargo build --release -p cuttlefs-bench"
HERE=$(cd "$(dirname "$0")" && pwd)
JOB=$HERE/swap.py

swap() { timeout --kill-after=10 120 "$CUTTLEFS_BIN/cuttlefs" swap "$@"; }
if ! swap --size 4M true 2>"$WORK/first.log"; then
    if grep -qE 'needs root|needs Linux' "$WORK/first.log"; then
        echo "skipped: $(head -n 1 "$WORK/first.log")"
        exit 3
    fi
fi

# report LOG WORDS: the first number of the line with these words.
report() { awk -v words="$2" 'index($0, words) {print $1; exit}' "$1"; }

# same LIMIT SIZE PROGRAM...: under a limit, and without one: the same output.
same() {
    local limit=$1 size=$2
    shift 2
    "$@" >"$WORK/plain" || return 1
    swap --limit "$limit" --size "$size" --report "$@" >"$WORK/swapped" 2>"$WORK/report.log" || {
        cat "$WORK/report.log"
        return 1
    }
    cmp "$WORK/plain" "$WORK/swapped"
}
check "a dictionary of four times the limit, read in random order" same 3M 256M python3 "$JOB" dictionary
cat "$WORK/report.log"
check "its pages went out and came back" test "$(report "$WORK/report.log" "pages out")" -ge 1000
check "no page came beyond the limit" grep -q ' 0 pages came beyond the limit' "$WORK/report.log"
# Twelve and a half megabytes, of which all but the limit's are out at one time; each page was out once.
check "the same, in a swap space that holds only what is out at one time" same 4M 10M python3 "$JOB" dictionary
cat "$WORK/report.log"
check "pages that had come back gave their places up" grep -q ' [1-9][0-9]* places passed on' "$WORK/report.log"
check "quicksort of numbers beyond the limit" same 3M 256M python3 "$JOB" quicksort
check "threads, forks and mappings" same 4M 256M python3 "$JOB" forks
check "processes that fork at the same time" same 4M 256M python3 "$JOB" crowd
# Jobs in the background, and a pipe's first and second process: all of them begin as copies of the same shell.
# shellcheck disable=SC2016
readonly PIPES='lost=0
    for round in $(seq 100); do
        jobs=()
        for job in 1 2 3; do
            (true) & jobs+=($!)
        done
        [[ $(echo "v$round" | cat) == "v$round" ]] || lost=$((lost + 1))
        for job in "${jobs[@]}"; do wait "$job" || lost=$((lost + 1)); done
    done
    echo "lost: $lost"'
check "a shell's pipes beside its jobs in the background" same 4M 64M bash -c "$PIPES"
seq 30000 | awk '{print ($1 * 7919) % 1000003, "some text behind it", $1}' >"$WORK/lines"
check "sort(1), with threads" same 1M 256M sort --parallel=2 -S 64M "$WORK/lines"
# A program makes the socket of its command's own node open to all, and another user tries to join: the node itself turns that one away.
# shellcheck disable=SC2016
readonly BY_SEVEN='
    socket=${CUTTLEFS_SWAP##* }
    socket=${socket%.swap}.memory
    [[ $(stat -c %a "$socket") == 600 ]] && chmod 666 "$socket" || exit 1
    exec env -u LD_PRELOAD -u CUTTLEFS_SWAP setpriv --reuid=7 --regid=7 --clear-groups "$0" swap --memory "unix://$socket" --size 4M true'
others_turned_away() {
    swap --limit 1M --size 4M bash -c "$BY_SEVEN" "$CUTTLEFS_BIN/cuttlefs" 2>&1 | tee "$WORK/joined"
    grep -q "for another user's programs only" "$WORK/joined"
}
check "another user does not get into a command's own node" others_turned_away
check "a shell, pipes and its exit code" bash -c "
    [[ \$('$CUTTLEFS_BIN/cuttlefs' swap --limit 1M sh -c 'seq 1000 | tail -n 1; exit 7'; echo \$?) == \$'1000\n7' ]]"
# The command raises its own limit; the program has its caller's.
few_files() (
    ulimit -Sn 40
    [[ $(swap --size 4M sh -c 'ulimit -Sn') == 40 ]] || exit 1
    ulimit -n 40
    for node in "" "--memory unix://$WORK/none.sock"; do
        # shellcheck disable=SC2086
        ! swap --size 4M $node true 2>"$WORK/few.log" && grep -q 'ulimit -Hn' "$WORK/few.log" || exit 1
    done
)
check "a caller that may open few files" few_files
# A command that is killed can remove nothing; the next one does.
# shellcheck disable=SC2016
readonly TELL_AND_KILL='echo "${CUTTLEFS_SWAP##* }"; kill -KILL $PPID; sleep 60'
swept() {
    local socket
    socket=$("$CUTTLEFS_BIN/cuttlefs" swap --size 4M bash -c "$TELL_AND_KILL" 2>/dev/null)
    [[ -S $socket && -S ${socket%.swap}.memory ]] || return 1
    swap --size 4M true && [[ ! -e $socket && ! -e ${socket%.swap}.memory ]]
}
check "a command removes the sockets of one that was killed" swept
# Each application's result is compared with that of the same run in local memory.
figure() { "$CUTTLEFS_BIN/cuttlefs" bench odrp --figure swap --quick --scratch "$WORK" --out "$WORK/figure" "$@"; }
check "applications of the benchmark's figure find the same under it" figure --app quicksort,kmeans,pagerank,key-value
# With a quarter of an array that they read several times; and none where all of it may stay.
moved() {
    jq -e '[.panels[] | select(.[0] == "PAGES OUT AND IN") | .[1][] | select(.system == "cuttlefs swap")]
        | ([.[] | select(.x | endswith(", 25 % local"))] | length == 4 and all(.value >= 200)) and all(.x | endswith(", all local") | not)
        ' "$WORK/figure/figure-swap.json"
}
check "and it moved their pages" moved

# A node of another process, over tcp with a key and over a Unix socket.
"$CUTTLEFS_BIN/cuttlefsd" key new "$WORK/key" >/dev/null 2>&1 || fail "no key"
PORT=$((20000 + $$ % 10000))
NODE=
start_node() {
    "$CUTTLEFS_BIN/cuttlefsd" memory "$@" >"$WORK/node.log" 2>&1 </dev/null &
    NODE=$!
    for _ in $(seq $((START_TIMEOUT_S * 10))); do
        grep -q 'lending memory' "$WORK/node.log" && return 0
        kill -0 "$NODE" 2>/dev/null || break
        sleep 0.1
    done
    cat "$WORK/node.log"
    return 1
}
stop_node() {
    [[ -n $NODE ]] && end_process "$NODE"
    NODE=
}
check "a node over tcp needs a key" bash -c "! '$CUTTLEFS_BIN/cuttlefsd' memory --size 16M --listen tcp://127.0.0.1:$PORT 2>'$WORK/refused' && grep -q -- '--key FILE, or give --insecure' '$WORK/refused'"
check "cuttlefsd memory over tcp" start_node --size 256M --listen "tcp://127.0.0.1:$PORT" --key "$WORK/key"
TCP=(--memory "tcp://127.0.0.1:$PORT" --key "$WORK/key")
check "a job on it" swap --limit 3M --size 64M "${TCP[@]}" python3 "$JOB" dictionary
check "two jobs on it at once" bash -c "
    '$CUTTLEFS_BIN/cuttlefs' swap --limit 4M --size 64M ${TCP[*]} python3 '$JOB' dictionary & one=\$!
    '$CUTTLEFS_BIN/cuttlefs' swap --limit 4M --size 64M ${TCP[*]} python3 '$JOB' dictionary && wait \$one"
check "without the key there is no job" bash -c "! '$CUTTLEFS_BIN/cuttlefs' swap --memory 'tcp://127.0.0.1:$PORT' true 2>/dev/null"

# ended LOG: a program that was killed, in the way that a shell shows it.
ended() {
    local log=$1 status
    shift
    swap "$@" >"$WORK/out" 2>"$log"
    status=$?
    cat "$log" "$WORK/out"
    ((status == 137)) && ! grep -q 'wrong' "$WORK/out"
}
check "a program with more memory than the swap space is ended" ended "$WORK/full.log" --limit 1M --size 2M "${TCP[@]}" python3 "$JOB" dictionary
check "and told why" grep -q 'takes no more pages' "$WORK/full.log"
# The job makes a file when it has begun to read what is at the node.
begun_then() {
    local pid
    for _ in $(seq $((START_TIMEOUT_S * 10))); do
        [[ -e $WORK/begun ]] && break
        sleep 0.1
    done
    pid=$1
    kill -KILL "$pid"
}
stop_node
check "cuttlefsd memory over a Unix socket, with a budget" start_node --size 256M --budget 4M --listen "unix://$WORK/node.sock"
check "a program beyond the budget is ended" ended "$WORK/budget.log" --limit 1M --size 64M --memory "unix://$WORK/node.sock" python3 "$JOB" dictionary
check "and told why" grep -q 'budget' "$WORK/budget.log"
stop_node
check "cuttlefsd memory over shared memory" start_node --size 256M --listen "shm://$WORK/node.shm"
check "its status says that no RNIC executes there" bash -c "'$CUTTLEFS_BIN/cuttlefs' status --memory 'shm://$WORK/node.shm' | grep -q 'by its processor'"
check "a job on it" swap --limit 3M --size 64M --memory "shm://$WORK/node.shm" python3 "$JOB" dictionary
stop_node
check "cuttlefsd memory once more" start_node --size 256M --listen "unix://$WORK/node.sock"
begun_then "$NODE" &
killer=$!
check "the node is killed: the program is ended" ended "$WORK/gone.log" --limit 4M --size 64M --memory "unix://$WORK/node.sock" python3 "$JOB" endless "$WORK/begun"
check "and told why" grep -q 'memory node is gone' "$WORK/gone.log"
wait "$killer" "$NODE" 2>/dev/null
NODE=
rm -f "$WORK/begun"

# The swapper is killed: so are the programs.
"$CUTTLEFS_BIN/cuttlefs" swap --limit 4M --size 64M python3 "$JOB" endless "$WORK/begun" >"$WORK/orphan" 2>&1 &
swapper=$!
begun_then "$swapper"
wait "$swapper" 2>/dev/null
ends() {
    for _ in $(seq $((STOP_TIMEOUT_S * 10))); do
        # The suite's own directory is in the program's command line, and in no other one.
        grep -lsF -- "$WORK/begun" /proc/[0-9]*/cmdline >/dev/null || return 0
        sleep 0.1
    done
    return 1
}
check "the swapper is killed: its program ends" ends
check "and saw no wrong byte" bash -c "! grep -q wrong '$WORK/orphan'"
suite_end
