#!/usr/bin/env bash
# Makes the figures of docs/kmod-iommu.md, in virtual machines: the costs of windows behind an Intel and an AMD IOMMU
# (kmod-iommu/test/window_bench.c), and, in the same machine, the costs of a window by on-demand paging beside pinned memory, over rdma_rxe
# (fs-common/examples/odp_window.rs). Medians of five rounds, with the least and the most; what is compared is measured in turn.
# usage: measure-iommu.sh         on 7.2, which has on-demand paging
# Exit status 3: this machine can run no virtual machine.
source "$(dirname "$0")/../env.sh"
set -uo pipefail

cd "$ROOT" || exit 1
cargo build -q -p cuttlefs-common --features verbs --example odp_window || exit 1
echo "commit $(git rev-parse --short HEAD)$(git diff --quiet HEAD || echo ', changed'), load $(cut -d' ' -f1 /proc/loadavg) on $(nproc) cores"
"$ROOT/scripts/vm/kmod-test.sh" -k 7.2 -p "bash $ROOT/scripts/vm/measure-guest.sh $CARGO_TARGET_DIR/debug/examples" intel amd
