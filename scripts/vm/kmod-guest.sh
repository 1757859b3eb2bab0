#!/usr/bin/env bash
# Runs in the guest, for kmod-test.sh: loads the modules, runs a program that makes windows, and checks the kernel's log.
# usage: kmod-guest.sh FOLDER [PROGRAM [ARGUMENT]...]      FOLDER has the modules; without a program, its test/window_test
set -u
folder=$1
shift
# For programs that need other files of that directory.
export KMOD_FOLDER=$folder
(($#)) || set -- "$folder/test/window_test"
# Swap, so that the kernel can take pages.
modprobe zram && echo 256M >/sys/block/zram0/disksize && mkswap /dev/zram0 >/dev/null && swapon /dev/zram0 || exit 1
insmod "$folder/cuttlefs_iommu.ko" && insmod "$folder/test/edu_dma.ko" || exit 1
"$@"
result=$?
# Unloads both modules, with everything that they had.
rmmod edu_dma && rmmod cuttlefs_iommu || result=1
if dmesg | grep -E -A30 'BUG:|WARNING:|Oops|Call Trace|KASAN|lockdep|possible recursive|memory leak|refcount'; then
    echo "the kernel complained"
    result=1
fi
exit $result
