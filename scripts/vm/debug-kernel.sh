#!/usr/bin/env bash
# Builds a kernel that watches itself, for kmod-iommu's tests: Debian's source of 6.12 with KASAN, lockdep, kmemleak and the DMA API's checks.
# Only what a guest of run.sh and those tests need is in it, and nothing is a module. Called by fetch.sh, which adds the initramfs.
# usage: debug-kernel.sh FOLDER      the folder gets boot/, lib/modules/ and what modules are built with; takes a quarter of an hour on two cores
# Exit status 3: this machine cannot build one; the last line on stderr, `skipped: ...`, says why.
source "$(dirname "$0")/../env.sh"
set -uo pipefail

unavailable() {
    printf 'skipped: no debug kernel: %s\n' "$*" >&2
    exit 3
}
folder=$1
for command in gcc make bc flex bison xz; do
    command -v "$command" >/dev/null || unavailable "$command is missing; apt install flex bison bc libelf-dev xz-utils"
done
[[ -e /usr/include/libelf.h ]] || unavailable "libelf.h is missing; apt install libelf-dev"

work=$(mktemp -d "$(dirname "$folder")/get.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
(cd "$work" && apt-get download -q linux-source-6.12 >&2) || unavailable "linux-source-6.12 cannot be downloaded"
dpkg-deb -x "$work"/*.deb "$work/package" || unavailable "linux-source-6.12 cannot be unpacked"

version=${folder##*/}
source=$folder/usr/src/linux-headers-$version
mkdir -p "$source" "$folder/boot" "$folder/lib/modules/$version" || exit 1
tar -xf "$work"/package/usr/src/linux-source-6.12.tar.xz -C "$source" --strip-components=1 || exit 1

# What is looked for, then the machine, the guest's root, what the tests use.
cat >"$work/wanted" <<'CONFIG'
CONFIG_KASAN=y
CONFIG_KASAN_GENERIC=y
CONFIG_KASAN_OUTLINE=y
CONFIG_PROVE_LOCKING=y
CONFIG_DEBUG_ATOMIC_SLEEP=y
CONFIG_DEBUG_KMEMLEAK=y
CONFIG_DEBUG_KMEMLEAK_MEM_POOL_SIZE=40000
CONFIG_DMA_API_DEBUG=y
CONFIG_DEBUG_LIST=y
CONFIG_DEBUG_VM=y
CONFIG_DEBUG_KERNEL=y
CONFIG_DEBUG_FS=y
CONFIG_EXPERT=y
CONFIG_PRINTK=y
CONFIG_BUG=y
CONFIG_KALLSYMS=y
CONFIG_64BIT=y
CONFIG_SMP=y
CONFIG_MODULES=y
CONFIG_MODULE_UNLOAD=y
CONFIG_PCI=y
CONFIG_PCI_MSI=y
CONFIG_ACPI=y
CONFIG_TTY=y
CONFIG_SERIAL_8250=y
CONFIG_SERIAL_8250_CONSOLE=y
CONFIG_UNIX98_PTYS=y
CONFIG_BLK_DEV_INITRD=y
CONFIG_BINFMT_ELF=y
CONFIG_BINFMT_SCRIPT=y
CONFIG_MULTIUSER=y
CONFIG_FUTEX=y
CONFIG_EPOLL=y
CONFIG_SIGNALFD=y
CONFIG_TIMERFD=y
CONFIG_EVENTFD=y
CONFIG_POSIX_TIMERS=y
CONFIG_HIGH_RES_TIMERS=y
CONFIG_MEMBARRIER=y
CONFIG_RSEQ=y
CONFIG_FILE_LOCKING=y
CONFIG_PROC_FS=y
CONFIG_PROC_SYSCTL=y
CONFIG_PROC_PAGE_MONITOR=y
CONFIG_SYSFS=y
CONFIG_SHMEM=y
CONFIG_TMPFS=y
CONFIG_DEVTMPFS=y
CONFIG_NET=y
CONFIG_UNIX=y
CONFIG_INET=y
CONFIG_NETWORK_FILESYSTEMS=y
CONFIG_VIRTIO_MENU=y
CONFIG_VIRTIO_PCI=y
CONFIG_NET_9P=y
CONFIG_NET_9P_VIRTIO=y
CONFIG_9P_FS=y
CONFIG_OVERLAY_FS=y
CONFIG_IOMMU_SUPPORT=y
CONFIG_INTEL_IOMMU=y
CONFIG_INTEL_IOMMU_SVM=y
CONFIG_AMD_IOMMU=y
CONFIG_PCI_ATS=y
CONFIG_PCI_PRI=y
CONFIG_PCI_PASID=y
CONFIG_SYNC_FILE=y
CONFIG_BLOCK=y
CONFIG_BLK_DEV=y
CONFIG_SWAP=y
CONFIG_ZSMALLOC=y
CONFIG_ZRAM=y
CONFIG_ZRAM_BACKEND_LZO=y
CONFIG_CRYPTO=y
CONFIG_ADVISE_SYSCALLS=y
CONFIG_MIGRATION=y
CONFIG_COMPACTION=y
CONFIG_TRANSPARENT_HUGEPAGE=y
CONFIG_MEMFD_CREATE=y
CONFIG_CGROUPS=y
CONFIG_MEMCG=y
CONFIG_IKCONFIG=y
CONFIG_IKCONFIG_PROC=y
CONFIG
say "building a debug kernel (once; about a quarter of an hour)"
make_kernel() { make -s -C "$source" -j"$(nproc)" ARCH=x86_64 "$@"; }
KCONFIG_ALLCONFIG="$work/wanted" make_kernel allnoconfig || exit 1
missing=$(grep -vxFf "$source/.config" "$work/wanted")
[[ -z $missing ]] || die "the kernel's configuration refuses: ${missing//$'\n'/ }"
# The name that modules are looked for under.
release=$(make -s -C "$source" ARCH=x86_64 kernelversion) || exit 1
[[ $version == "$release"-* ]] || die "the source is of $release; the folder must be named $release-debug"
"$source/scripts/config" --file "$source/.config" --set-str LOCALVERSION "${version#"$release"}" || exit 1
{ make_kernel olddefconfig && make_kernel bzImage modules; } >"$work/log" 2>&1 || {
    tail -n 30 "$work/log" >&2
    die "the debug kernel does not build"
}
mv "$source/arch/x86/boot/bzImage" "$folder/boot/vmlinuz-$version" || exit 1
cp "$source"/modules.{order,builtin,builtin.modinfo} "$folder/lib/modules/$version" || exit 1
# Modules need the tree's headers, programs and symbols.
find "$source" \( -name '*.o' -o -name '*.a' -o -name 'vmlinux*' \) ! -path '*/scripts/*' ! -path '*/tools/*' -delete
