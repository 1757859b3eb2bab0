#!/usr/bin/env bash
# Compares the numbers of perftest and of this library, in a virtual machine with soft-RoCE: READ, WRITE and SEND of 64 B, 4 KiB and 1 MiB, bandwidth
# and latency, in turn. Prints medians of the rounds, their spread, and ratios. A round takes some three minutes on an idle machine.
# usage: perftest.sh [ROUNDS]          five rounds by default; CUTTLEFS_PROFILE=dev uses a build that is quick to make
# Exit status 3: this machine can run no virtual machine, or the libraries or perftest are missing.
source "$(dirname "$0")/../env.sh"
set -uo pipefail
cd "$ROOT" || exit 1
rounds=${1:-5}
set_features
((${#FEATURES[@]})) || { echo "skipped: no RDMA libraries; install $(rdma_lacks)" >&2; exit 3; }
command -v ib_read_bw >/dev/null || { echo "skipped: perftest is not installed" >&2; exit 3; }
"$ROOT/scripts/vm/fetch.sh" >/dev/null || exit $?
profile=${CUTTLEFS_PROFILE:-release}
cargo build --profile "$profile" --locked --quiet -p cuttlefs-common --features verbs --example rnic_perf || die "rnic_perf does not build"
exec "$ROOT/scripts/vm/run.sh" -r -t 3600 -- python3 "$ROOT/scripts/vm/perftest.py" \
    "$CARGO_TARGET_DIR/${profile/#dev/debug}/examples/rnic_perf" "$rounds"
