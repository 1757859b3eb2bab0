#!/usr/bin/env bash
# In the guest, for measure-iommu.sh: both kinds of windows in one boot, so that they meet the same machine.
# usage: kmod-guest.sh FOLDER measure-guest.sh FOLDER-OF-EXAMPLES
set -u
source "$(dirname "$0")/rdma-device.sh" || exit 1
ulimit -l unlimited
"$KMOD_FOLDER/test/window_bench" && "$1/odp_window" measure 10.9.0.1 || exit 1
# Once more: how far the two are from themselves says how far they may be from each other.
echo "again"
"$KMOD_FOLDER/test/window_bench" && "$1/odp_window" measure 10.9.0.1
