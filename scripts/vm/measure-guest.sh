#!/usr/bin/env bash
# Runs in the guest, for measure-iommu.sh: both kinds of windows in one boot, so that they run on the same machine.
# usage: kmod-guest.sh FOLDER measure-guest.sh FOLDER-OF-EXAMPLES
set -u
source "$(dirname "$0")/rdma-device.sh" || exit 1
ulimit -l unlimited
"$KMOD_FOLDER/test/window_bench" && "$1/odp_window" measure 10.9.0.1 || exit 1
# Once more: the difference between two measurements of one kind bounds how far the kinds can be distinguished.
echo "again"
"$KMOD_FOLDER/test/window_bench" && "$1/odp_window" measure 10.9.0.1
