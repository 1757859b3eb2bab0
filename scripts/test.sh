#!/usr/bin/env bash
# Every test, in one command. Installs what is missing first.
#
#   scripts/test.sh                all of it
#   scripts/test.sh --quick        checks, cargo tests, and the short suites over one link
#   scripts/test.sh --suites-only [SUITE...]
#
# Ends with a summary; the last line is `N passed, N failed, N skipped`. Phases that this machine cannot run (such as a virtual machine) are skipped.
# Logs stay in target/test-logs.
# Needs no terminal and no input; leaves no process and no mount behind, also when it is interrupted.
#   CUTTLEFS_FUZZ_SECONDS      also run every fuzz target for this number of seconds (0: do not)
#   CUTTLEFS_TEST_LANES        suites that run at a time (3)
#   CUTTLEFS_BIN               programs for the suites; by default they have those that are built with the tests, whose assertions they check, too
#   CUTTLEFS_TEST_DEADLINE_S   after this number of seconds, tests that have not run count as failed (2280)
set -uo pipefail
programs=${CUTTLEFS_BIN:-}
source "$(dirname "$0")/env.sh"
cd "$ROOT" || exit 1
exec </dev/null
CUTTLEFS_SUITE_DIR=${CUTTLEFS_SUITE_DIR:-}

quick=false
suites_only=false
chosen=()
for argument in "$@"; do
    case $argument in
        --quick) quick=true ;;
        --suites-only) suites_only=true ;;
        -*) die "unknown option $argument; usage: scripts/test.sh [--quick] [--suites-only [SUITE...]]" ;;
        *) chosen+=("$argument") ;;
    esac
done

# A job of continuous integration has forty minutes; this leaves two of them to clean up.
deadline_s=${CUTTLEFS_TEST_DEADLINE_S:-2280}
logs=$CARGO_TARGET_DIR/test-logs
mkdir -p "$logs"
# The suites make everything under this directory, so mounts under it, and processes that name it, belong to this run.
# A short path: pjdfstest binds sockets deep below it, and a socket's path has at most 108 bytes.
scratch=$(mktemp -d "${CUTTLEFS_SUITE_TMP:-/var/tmp}/cft.XXXX") || exit 1
chmod 755 "$scratch"
export CUTTLEFS_SUITE_TMP=$scratch
passed=0
failed=0
skipped=0
summary=()
child=
lanes=()

# Suites clean up after themselves; this is for a suite that was killed.
sweep() {
    local at pid
    awk -v under="$scratch/" 'index($5, under) == 1 {print $5}' /proc/self/mountinfo | sort -r | while read -r at; do
        umount -l "$at" 2>/dev/null || fusermount3 -uz "$at" 2>/dev/null
    done
    # Only processes with this run's own directory in their command line.
    for pid in $(grep -lsF -- "$scratch/" /proc/[0-9]*/cmdline | cut -d/ -f3); do
        [[ $pid != "$$" ]] && kill -KILL "$pid" 2>/dev/null
    done
}
finish() {
    trap - EXIT INT TERM HUP
    if [[ -n $child ]] || ((${#lanes[@]})); then
        kill -TERM $child "${lanes[@]}" 2>/dev/null
        wait $child "${lanes[@]}" 2>/dev/null
    fi
    sweep
    rm -rf --one-file-system "$scratch"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# phase NAME TIMEOUT_S COMMAND...: runs it in a process group of its own, and copies its output to a log. Its last line `N passed, N failed` is added
# up; a phase that fails without one counts as one failure. Exit status 3, and a line that begins with `skipped: `, mean that this machine cannot run
# it.
phase() {
    local name=$1 limit_s=$2 log=$logs/$1.log left_s status line phase_passed=0 phase_failed=0 began=$SECONDS
    shift 2
    left_s=$((deadline_s - SECONDS))
    if ((left_s < 10)); then
        failed=$((failed + 1))
        summary+=("$(printf '%-28s not run: the time is up' "$name")")
        return 1
    fi
    ((limit_s > left_s)) && limit_s=$left_s
    say "$name"
    timeout --kill-after=60 "$limit_s" "$@" >"$log" 2>&1 &
    child=$!
    wait "$child"
    status=$?
    child=
    flock "$logs" cat "$log"
    if ((status == 3)) && line=$(grep '^skipped: ' "$log" | tail -n 1); then
        skipped=$((skipped + 1))
        summary+=("$(printf '%-28s %s' "$name" "$line")")
        return 0
    fi
    # The words around the figures, as cargo test, nextest and the project's scripts print them.
    line=$(tail -n 1 "$log")
    if [[ $line =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed$ ]]; then
        phase_passed=${BASH_REMATCH[1]}
        phase_failed=${BASH_REMATCH[2]}
    else
        phase_passed=$(sed 's/\x1b\[[0-9;]*m//g' "$log" | sed -nE \
            -e 's/^test result: [a-zA-Z]+\. ([0-9]+) passed.*/\1/p' \
            -e 's/^ *Summary .* tests? run: ([0-9]+) passed.*/\1/p' | awk '{n += $1} END {print n + 0}')
        phase_failed=$(sed 's/\x1b\[[0-9;]*m//g' "$log" | sed -nE \
            -e 's/^test result: [a-zA-Z]+\. [0-9]+ passed; ([0-9]+) failed.*/\1/p' \
            -e 's/^ *Summary .* tests? run: .* ([0-9]+) failed.*/\1/p' \
            -e 's/^ *Summary .* tests? run: .* ([0-9]+) timed out.*/\1/p' | awk '{n += $1} END {print n + 0}')
    fi
    ((status != 0 && phase_failed == 0)) && phase_failed=1
    passed=$((passed + phase_passed))
    failed=$((failed + phase_failed))
    local how=
    ((status == 124 || status == 137)) && how=", ended after $limit_s s"
    # Tests that nextest repeated (.config/nextest.toml), and that then passed.
    how+=$(sed -nE 's/^ *FLAKY .*\] *(\([^)]*\) *)?(.*)/, flaky: \2/p' "$log" | sort -u | tr -d '\n')
    summary+=("$(printf '%-28s %5d passed %5d failed %5d s%s' "$name" "$phase_passed" "$phase_failed" $((SECONDS - began)) "$how")")
    ((phase_failed == 0)) && return 0
    # What failed, by name: a log may be far away when the summary is read.
    local failures
    mapfile -t failures < <(sed 's/\x1b\[[0-9;]*m//g' "$log" | grep -E '^ *(TRY [0-9]+ )?(FAIL|TIMEOUT|SIG[A-Z]+|error:|not ok|test .* FAILED)' |
        sed -E 's/^ *//; s/\[ *[0-9.]+s\] *//' | sort -u | cut -c 1-200 | head -n 12)
    summary+=("${failures[@]/#/        }")
    return 1
}

# Suites and tests that ask about contents, crashes and models: a byte that is wrong once is wrong. Any other job that fails is run once more at the
# end, when nothing else runs: suites have deadlines, and a machine shared with others can stand still for longer. The summary names such a job `flaky`.
lasting=" checks build doc-tests models cargo-tests crash-points fsx fio-verify race-writers twomounts kill kill-ack applications-kill soak "

# Suite, its time limit in seconds, whether --quick runs it, and `once` if links make no difference to it, or `vm`: scripts/vm/NAME-test.sh, which
# boots virtual machines. The longest come first: three run at a time.
all_suites="
rdma        2700 full vm
kmod        900 full vm
realwork    720 full
attack      480 quick once
crash-points 600 quick once
pjdfstest   600 quick
fsx         900 quick
restart     300 quick
flush       600 full vm
full        240 quick
twomounts   240 quick
locks       240 quick
race-writers 240 quick
interrupts  300 quick
zerocpu     240 quick
mounts      240 quick
inodes      240 quick
preload     240 quick
swap        300 quick once
native      240 quick
examples    240 quick
defragment  300 quick
fio-verify  480 full
soak        240 full
memory      480 full
kill        480 full
kill-ack    480 full once
applications-kill 300 full
"

say "setup"
"$ROOT/scripts/setup.sh" --tests >&2 || {
    echo "0 passed, 1 failed"
    exit 1
}
# After the set-up, which may install libraries.
set_features

# lane N: takes jobs until there are none, in a directory of its own. What came of them is left in $logs/lane-N.
lane() {
    local job name limit_s command passed_before failed_before lines_before
    trap '[[ -n $child ]] && kill -TERM "$child" 2>/dev/null; exit 143' TERM
    scratch=$scratch/$1
    mkdir -p -m 755 "$scratch"
    export CUTTLEFS_SUITE_TMP=$scratch
    passed=0 failed=0 skipped=0 summary=()
    while job=$(flock "$scratch/.." sed -i -e '1{w /dev/stdout' -e 'd}' "$scratch/../next") && [[ -n $job ]]; do
        read -r name limit_s command <<<"$job"
        passed_before=$passed failed_before=$failed lines_before=${#summary[@]}
        # shellcheck disable=SC2086
        if ! phase "$name" "$limit_s" $command && [[ $lasting != *" ${name%-*} "* && $lasting != *" $name "* ]]; then
            passed=$passed_before failed=$failed_before
            printf '%s\n' "${summary[@]:lines_before}" >"$logs/$name.first-summary"
            summary=("${summary[@]:0:lines_before}")
            mv "$logs/$name.log" "$logs/$name.first.log" 2>/dev/null
            echo "$job" >>"$scratch/../again"
        fi
        sweep
    done
    printf '%s\n' "$passed $failed $skipped" "${summary[@]}" >"$logs/lane-$1"
}

# side_by_side LANES JOB...: so many at a time. A job is `NAME LIMIT_S COMMAND...`, in words without spaces.
side_by_side() {
    local count=$1 number lane_passed lane_failed lane_skipped lane_summary
    shift
    printf '%s\n' "$@" >"$scratch/next"
    for number in $(seq "$count"); do
        rm -f "$logs/lane-$number"
        lane "$number" &
        lanes+=($!)
    done
    wait "${lanes[@]}"
    for number in $(seq "$count"); do
        if ! { read -r lane_passed lane_failed lane_skipped && mapfile -t lane_summary; } <"$logs/lane-$number"; then
            lane_passed=0 lane_failed=1 lane_skipped=0 lane_summary=("lane $number ended before its jobs did")
        fi
        passed=$((passed + lane_passed))
        failed=$((failed + lane_failed))
        skipped=$((skipped + lane_skipped))
        summary+=("${lane_summary[@]}")
    done
    lanes=()
    local job name limit_s command again
    mapfile -t again < <(cat "$scratch/again" 2>/dev/null)
    rm -f "$scratch/again"
    for job in "${again[@]}"; do
        read -r name limit_s command <<<"$job"
        # shellcheck disable=SC2086
        phase "$name" "$limit_s" $command
        mapfile -t lane_summary <"$logs/$name.first-summary"
        summary+=("    first run (flaky if the second one passed):" "${lane_summary[@]/#/    }")
        sweep
    done
}

flags="--locked --color never"
of_workspace="--workspace ${FEATURES[*]}"
# One build for the tests and for the suites' programs. What the checks need of libraries is the same folder's, too, so they come after it.
build="cargo build $flags $of_workspace --lib --bins --examples"
first=() tests=() checks=() models=() last=()
if ! $suites_only; then
    build+=" --tests"
    first+=("build 1800 $build")
    checks+=("checks 1500 scripts/check.sh")
    if command -v cargo-nextest >/dev/null; then
        # More at once than there are processors: many wait for deadlines.
        tests+=("cargo-tests 1800 cargo nextest run $flags $of_workspace --no-fail-fast --test-threads $((2 * $(nproc)))")
        last+=("doc-tests 600 cargo test $flags $of_workspace --no-fail-fast --doc")
    else
        tests+=("cargo-tests 1800 cargo test $flags $of_workspace --no-fail-fast")
    fi
    # Code of the product under every interleaving of a few threads. With the features of all packages, so that libraries of others are not built again.
    models+=("models 1500 cargo test $flags --workspace --features cuttlefs-models/model-check${FEATURES[1]:+,${FEATURES[1]}} --test change_model --test page_model --test paged_model")
elif [[ -z $programs$CUTTLEFS_SUITE_DIR ]]; then
    first+=("build 1800 $build")
fi

links=(shm tcp)
$quick && links=(shm)
[[ -n ${CUTTLEFS_SUITE_DIR:-} ]] && links=(shm)
# The suites, in their order.
suites=()
while read -r suite limit_s when links_of; do
    [[ -n $suite ]] || continue
    $quick && [[ $when != quick ]] && continue
    ((${#chosen[@]})) && [[ " ${chosen[*]} " != *" $suite "* ]] && continue
    for link in "${links[@]}"; do
        [[ -n $links_of && $link != "${links[0]}" ]] && continue
        command="scripts/suites/$suite.sh $link"
        if [[ $links_of == vm ]]; then
            [[ -n ${CUTTLEFS_SUITE_DIR:-} ]] && continue
            link=vm command=scripts/vm/$suite-test.sh
        fi
        suites+=("$suite-$link $limit_s $command")
    done
done <<<"$all_suites"
$quick && export CUTTLEFS_FSX_OPS=${CUTTLEFS_FSX_OPS:-20000}

((${#first[@]})) && side_by_side 1 "${first[@]}"
if [[ -z $programs ]]; then
    [[ -n $CUTTLEFS_SUITE_DIR ]] || $build --quiet || suites=()
    export CUTTLEFS_BIN=$CARGO_TARGET_DIR/debug
fi
# Asked for only: the sanitised build alone takes longer than everything else together.
if ! $suites_only && ((${CUTTLEFS_FUZZ_SECONDS:-0} > 0)); then
    phase fuzz 3600 scripts/fuzz.sh "$CUTTLEFS_FUZZ_SECONDS"
fi
# The longest first. Checks and models hold cargo's lock while they build, one after the other, so whoever needs it for a moment comes before them.
jobs=(${suites[@]+"${suites[0]}"} "${tests[@]}" "${checks[@]}" "${models[@]}" ${suites[1]+"${suites[@]:1}"} "${last[@]}")
((${#jobs[@]})) && side_by_side "${CUTTLEFS_TEST_LANES:-3}" "${jobs[@]}"

echo
echo "---- summary ($SECONDS s)"
printf '%s\n' "${summary[@]}"
echo
finish
echo "$passed passed, $failed failed, $skipped skipped"
((failed == 0 && passed > 0))
