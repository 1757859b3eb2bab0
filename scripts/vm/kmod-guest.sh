#!/usr/bin/env bash
# Runs in the guest, for kmod-test.sh: loads the modules, runs a program that makes windows, and checks the kernel's log.
# usage: kmod-guest.sh FOLDER PROGRAM [ARGUMENT]...      FOLDER has the modules
set -u
folder=$1
shift
# For programs that need other files of that directory.
export KMOD_FOLDER=$folder
# What the kernel says at its start is not of the modules; a debug kernel names there what it looks for.
dmesg -C
# Swap, so that pages can be taken.
{ [[ -e /sys/block/zram0 ]] || modprobe zram; } && echo 256M >/sys/block/zram0/disksize && mkswap /dev/zram0 >/dev/null && swapon /dev/zram0 || exit 1
insmod "$folder/cuttlefs_iommu.ko" && insmod "$folder/test/edu_dma.ko" || exit 1
"$@"
result=$?
# Unloads both modules, with everything that they had.
rmmod edu_dma && rmmod cuttlefs_iommu || result=1
# A debug kernel: what nobody refers to any more. The second scan knows what the first one saw while it was moved.
if mount -t debugfs debugfs /sys/kernel/debug 2>/dev/null && [[ -e /sys/kernel/debug/kmemleak ]]; then
    for _ in 1 2; do
        echo scan >/sys/kernel/debug/kmemleak || result=1
        sleep 6
    done
    # Such a file has no length.
    leaks=$(cat /sys/kernel/debug/kmemleak)
    if [[ -n $leaks ]]; then
        printf '%s\n' "$leaks" "memory leaked"
        result=1
    fi
    # lockdep turns itself off when it has found something, or has no room for more.
    if ! grep -q 'debug_locks: *1$' /proc/lockdep_stats; then
        echo "lockdep is off"
        result=1
    fi
    echo "KASAN, lockdep and kmemleak: $(zgrep -c -E '^CONFIG_(KASAN|PROVE_LOCKING|DEBUG_KMEMLEAK)=y' /proc/config.gz) of 3 are on"
fi
if dmesg | grep -E -A30 'BUG:|WARNING:|Oops|Call Trace|KASAN|lockdep|possible recursive|possible circular|suspicious|DMA-API|memory leak|refcount'; then
    echo "the kernel complained"
    result=1
fi
exit $result
