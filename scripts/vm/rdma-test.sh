#!/usr/bin/env bash
# Runs all tests over RDMA hardware's interface, in a virtual machine with soft-RoCE: the tests that are ignored elsewhere, then a server and two
# mounts (rdma-mount.sh). Last line: N passed, N failed.
# usage: rdma-test.sh [TEST-BINARY-NAME...]       `mount` is one, too; without names, all but page_races, which without KVM hardly races in ten
#                                                 minutes. $CUTTLEFS_BIN has the programs.
# Exit status 3: this machine can run no virtual machine, or the libraries are missing.
source "$(dirname "$0")/../env.sh"
set -uo pipefail
cd "$ROOT" || exit 1

# By package, so that cargo builds them as it does for the whole workspace.
tests=(rdma_semantics hardware_hostile remote_keys shared_receives native reference_model)
with_mount=1
if (($#)); then
    tests=() with_mount=
    for name; do [[ $name == mount ]] && with_mount=1 || tests+=("$name"); done
fi

set_features
((${#FEATURES[@]})) || {
    echo "skipped: no RDMA libraries; install $(rdma_lacks)" >&2
    exit 3
}
"$ROOT/scripts/vm/fetch.sh" >/dev/null || exit $?
binaries=()
if ((${#tests[@]})); then
    say "building tests"
    built=$(cargo test --workspace --locked "${FEATURES[@]}" "${tests[@]/#/--test=}" --no-run --quiet --message-format=json) || die "the tests do not build"
    mapfile -t binaries < <(jq -r 'select(.executable != null and .profile.test) | .executable' <<<"$built")
    ((${#binaries[@]} == ${#tests[@]})) || die "not all of these are tests: ${tests[*]}"
fi
if [[ -n $with_mount ]]; then
    [[ -x $CUTTLEFS_BIN/cuttlefsd && -x $CUTTLEFS_BIN/cuttlefs ]] || die "no binaries in $CUTTLEFS_BIN; build them (cargo build --release) or set CUTTLEFS_BIN"
    binaries+=(mount)
fi
# A failure in the guest is a failure, whatever its exit status.
CUTTLEFS_RDMA_ADDRESS=10.9.0.1 "$ROOT/scripts/vm/run.sh" -r -t "${CUTTLEFS_VM_LIMIT_S:-1740}" -- bash "$ROOT/scripts/vm/rdma-guest.sh" "${binaries[@]}"
status=$?
((status == 0)) && exit 0
((status == 1)) || echo "0 passed, 1 failed"
exit 1
