#!/usr/bin/env bash
# Runs in the guest, in kmod-guest.sh: what `cuttlefsd serve --page-window iommu` refuses, and says to do. The RNIC is soft-RoCE's, which is no PCI device
# and registers no dma-bufs. For what comes behind the first of the two, its folder in sysfs is shown with edu's PCI device, for which the module makes windows.
# usage: iommu-switch.sh FOLDER      it has cuttlefsd, built with the feature `verbs`; $KMOD_FOLDER has the module, which is loaded
# Last line: N passed, N failed.
set -u
programs=$1
source "$(dirname "$0")/rdma-device.sh" || { echo "no soft-RoCE"; exit 1; }
ulimit -l unlimited
work=$(mktemp -d)
passed=0 failed=0
"$programs/cuttlefsd" format --pool "$work/pool" --size 64M >"$work/format.log" 2>&1 || { cat "$work/format.log"; exit 1; }

# refused WHAT WORDS [OPTION...]: the server does not start, and its error has the words.
refused() {
    local what=$1 words=$2 status
    shift 2
    timeout 120 "$programs/cuttlefsd" serve --pool "$work/pool" --memory 16M --listen rdma://10.9.0.1:7950 --page-window iommu "$@" >"$work/said" 2>&1
    status=$?
    if ((status != 0 && status < 124)) && grep -q -- "$words" "$work/said" && grep -q -- '--page-window' "$work/said"; then
        passed=$((passed + 1))
        echo "ok    refused: $what"
        grep -- "$words" "$work/said" | tail -n 1 | sed 's/^/      /'
    else
        failed=$((failed + 1))
        echo "FAIL  not refused as it should be ($status): $what"
        cat "$work/said"
    fi
}

# rxe0, with this PCI device below it.
as_device() {
    local file
    umount /sys/class/infiniband 2>/dev/null
    rm -rf "$work/class" && mkdir -p "$work/class/rxe0"
    for file in /sys/class/infiniband/rxe0/*; do
        ln -s "$(readlink -f "$file")" "$work/class/rxe0/"
    done
    ln -sfn "$1" "$work/class/rxe0/device"
    mount --bind "$work/class" /sys/class/infiniband
}
edu=$(readlink -f /sys/bus/pci/drivers/edu_dma/*:*)

refused "clients that are not trusted" '--trust-clients'
refused "soft-RoCE, which is no PCI device" 'rxe0 is no PCI device' --trust-clients
as_device "$edu"
refused "an RNIC that registers no dma-bufs" 'rxe0 registers no dma-bufs' --trust-clients
as_device /sys/bus/pci/devices/0000:00:00.0
refused "a device without a driver" 'it has no driver' --trust-clients
as_device "$edu"
# The first may still have a window that a test registered.
rmmod edu_dma && rmmod cuttlefs_iommu || failed=$((failed + 1))
refused "a machine without the module" 'modprobe cuttlefs_iommu' --trust-clients
insmod "$KMOD_FOLDER/cuttlefs_iommu.ko" && insmod "$KMOD_FOLDER/test/edu_dma.ko" || failed=$((failed + 1))
umount /sys/class/infiniband
# The refusals left nothing behind: the pool is served as ever.
"$programs/cuttlefsd" serve --pool "$work/pool" --memory 16M --listen rdma://10.9.0.1:7950 --trust-clients \
    >"$work/server.log" 2>&1 &
server=$!
for ((i = 0; i < 600; i++)); do
    grep -q ': serving ' "$work/server.log" && break
    kill -0 "$server" 2>/dev/null || break
    sleep 0.1
done
if grep ': serving .*page_window=pinned' "$work/server.log"; then
    passed=$((passed + 1))
    echo "ok    and without the option the same pool is served"
else
    failed=$((failed + 1))
    echo "FAIL  the pool is not served"
    cat "$work/server.log"
fi
kill "$server" && wait "$server"
rdma link delete rxe0
echo "$passed passed, $failed failed"
((failed == 0))
