#!/usr/bin/env bash
# The mount suites over RDMA hardware's interface: each in a virtual machine with soft-RoCE, one after the other.
# usage: rdma-suites.sh [SUITE...]     without names: pjdfstest, fsx, kill, faults, liar. The last two are rdma-NAME.sh, all others scripts/suites/NAME.sh.
#   CUTTLEFS_BIN          the programs, built with RDMA hardware (target/release)
#   CUTTLEFS_VM_LIMIT_S   each machine's time (7200)
# Without KVM they take hours; fsx half an hour with CUTTLEFS_VM_CORES=1 (57 operations a second on a busy machine), `faults` 10
# minutes, 22 on a busy machine, `liar` two.
# Last line: N passed, N failed. Logs: target/test-logs/NAME-rdma.log.
# Exit status 3: this machine can run no virtual machine.
source "$(dirname "$0")/../env.sh"
set -uo pipefail
cd "$ROOT" || exit 1
(($#)) || set -- pjdfstest fsx kill faults liar
[[ -x $CUTTLEFS_BIN/cuttlefsd && -x $CUTTLEFS_BIN/cuttlefs ]] || die "no binaries in $CUTTLEFS_BIN; build them (cargo build --release) or set CUTTLEFS_BIN"
"$CUTTLEFS_BIN/cuttlefsd" --version | grep -q 'rdma://): yes' || die "the programs in $CUTTLEFS_BIN are built without RDMA hardware; install $(rdma_lacks)"
"$ROOT/scripts/vm/fetch.sh" >/dev/null || exit $?
logs=$CARGO_TARGET_DIR/test-logs
mkdir -p "$logs"
# The devices' counters distinguish a slow link from a lossy one: retransmissions on a link without losses are a fault.
# shellcheck disable=SC2016
in_guest='"$@"; status=$?; grep . /sys/class/infiniband/*/ports/1/hw_counters/* | grep -v ":0$" | sed "s/.*infiniband.//"; exit $status'
passed=0 failed=0
for suite; do
    command=(bash "$ROOT/scripts/suites/$suite.sh" rdma) device=(-r)
    # These make devices of their own.
    [[ $suite == faults || $suite == liar ]] && command=(bash "$ROOT/scripts/vm/rdma-$suite.sh") device=()
    began=$SECONDS
    CUTTLEFS_RDMA_ADDRESS=10.9.0.1 "$ROOT/scripts/vm/run.sh" ${device[@]+"${device[@]}"} -m 4096 -t "${CUTTLEFS_VM_LIMIT_S:-7200}" -- \
        bash -c "$in_guest" _ "${command[@]}" 2>&1 | tee "$logs/$suite-rdma.log"
    status=${PIPESTATUS[0]} of_suite=0
    if [[ $(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$logs/$suite-rdma.log" | tail -n 1) =~ ^([0-9]+)\ passed,\ ([0-9]+) ]]; then
        passed=$((passed + BASH_REMATCH[1])) of_suite=${BASH_REMATCH[2]}
    fi
    ((status == 0 || of_suite > 0)) || of_suite=1
    failed=$((failed + of_suite))
    say "$suite: $((SECONDS - began)) s"
done
echo "$passed passed, $failed failed"
((failed == 0 && passed > 0))
