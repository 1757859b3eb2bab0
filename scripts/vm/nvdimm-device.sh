# shellcheck shell=bash
# In the guest, for `source`: makes the emulated NVDIMM a device /dev/dax0.0 (mode devdax, alignment 2 MiB), as `ndctl create-namespace -m devdax`
# does. Its bytes are in a file of the host, and survive the guest if QEMU is not killed.
for module in nfit nd_pmem dax_pmem device_dax; do
    modprobe "$module" || return 1
done
(
    bus=/sys/bus/nd
    seed=$(<"$bus/devices/region0/dax_seed") || exit 1
    # At first the namespace is bound to the driver for block devices.
    [[ -e $bus/devices/namespace0.0/driver ]] && echo namespace0.0 >"$bus/devices/namespace0.0/driver/unbind"
    device=$bus/devices/$seed
    echo ram >"$device/mode" && echo $((2 << 20)) >"$device/align" && cat /proc/sys/kernel/random/uuid >"$device/uuid" \
        && echo namespace0.0 >"$device/namespace" && echo "$seed" >"$bus/drivers/dax_pmem/bind"
) || return 1
[[ -c /dev/dax0.0 ]] || { echo 'no /dev/dax0.0' >&2; return 1; }
