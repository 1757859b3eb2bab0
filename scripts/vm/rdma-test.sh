#!/usr/bin/env bash
# Runs all tests over RDMA hardware's interface, in a virtual machine with soft-RoCE: the tests that are ignored elsewhere, then a server and two
# mounts (rdma-mount.sh). Last line: N passed, N failed.
# usage: rdma-test.sh [-k VERSION] [-l] [TEST-BINARY-NAME...]       `mount` is one, too. $CUTTLEFS_BIN has the programs. Without names, all but
#                                                                   page_races (its two tests take some minutes) and what -l does.
#   -k  another kernel (run.sh)
#   -l  with a libibverbs that knows FLUSH, and an emulated device of persistent memory; without names, durable_rpc, and of rdma_semantics what flushes
# Exit status 3: this machine can run no virtual machine, or the libraries are missing.
source "$(dirname "$0")/../env.sh"
set -uo pipefail
cd "$ROOT" || exit 1

version=() verbs=
while getopts k:l option; do
    case $option in
        k) version=("$OPTARG") ;;
        l) verbs=1 ;;
        *) die "unknown option; see the head of $0" ;;
    esac
done
shift $((OPTIND - 1))
# By package, so that cargo builds them as it does for the whole workspace.
tests=(rdma_semantics hardware_hostile memory_node np remote_keys shared_receives native reference_model)
with_mount=1
[[ -n $verbs ]] && tests=(durable_rpc rdma_semantics) with_mount=
if (($#)); then
    tests=() with_mount=
    for name; do [[ $name == mount ]] && with_mount=1 || tests+=("$name"); done
fi

set_features
((${#FEATURES[@]})) || {
    echo "skipped: no RDMA libraries; install $(rdma_lacks)" >&2
    exit 3
}
"$ROOT/scripts/vm/fetch.sh" ${version[@]+"${version[@]}"} >/dev/null || exit $?
machine=(-r ${version[@]+-k "${version[@]}"}) guest=()
if [[ -n $verbs ]]; then
    verbs=$("$ROOT/scripts/vm/fetch-verbs.sh") || {
        echo "skipped: no libibverbs that knows FLUSH" >&2
        exit 3
    }
    machine+=(-n 256) guest=(-l "$verbs")
    export CUTTLEFS_DAX_DEVICE=/dev/dax0.0 CUTTLEFS_REQUIRE_FLUSH=1
fi
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
CUTTLEFS_RDMA_ADDRESS=10.9.0.1 "$ROOT/scripts/vm/run.sh" "${machine[@]}" -t "${CUTTLEFS_VM_LIMIT_S:-2640}" -- \
    bash "$ROOT/scripts/vm/rdma-guest.sh" ${guest[@]+"${guest[@]}"} "${binaries[@]}"
status=$?
((status == 0)) && exit 0
((status == 1)) || echo "0 passed, 1 failed"
exit 1
