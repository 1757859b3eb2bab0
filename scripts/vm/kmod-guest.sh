#!/usr/bin/env bash
# In the guest, for kmod-test.sh: loads the modules, runs the tests, and reads the kernel's log.
# usage: kmod-guest.sh FOLDER
set -u
# Swap, so that pages can be taken.
modprobe zram && echo 256M >/sys/block/zram0/disksize && mkswap /dev/zram0 >/dev/null && swapon /dev/zram0 || exit 1
insmod "$1/cuttlefs_iommu.ko" && insmod "$1/test/edu_dma.ko" || exit 1
"$1/test/window_test"
result=$?
# Both go, with all that they had.
rmmod edu_dma && rmmod cuttlefs_iommu || result=1
if dmesg | grep -E -A30 'BUG:|WARNING:|Oops|Call Trace|KASAN|lockdep|possible recursive|memory leak|refcount'; then
    echo "the kernel complained"
    result=1
fi
exit $result
