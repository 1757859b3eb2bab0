#!/usr/bin/env bash
# Builds kmod-iommu with the tests' driver for edu, for a kernel of fetch.sh, without warnings, in a copy.
# usage: kmod-build.sh VERSION FOLDER       the copy becomes FOLDER, which must not be there yet
# Exit status 3: this machine cannot get that kernel.
source "$(dirname "$0")/../env.sh"
set -uo pipefail

[[ $# == 2 ]] || die "usage: scripts/vm/kmod-build.sh VERSION FOLDER (such as 7.2 /tmp/kmod; the folder must not be there yet)"
kernel=$("$ROOT/scripts/vm/fetch.sh" --headers "$1") || exit $?
version=${kernel##*/}
folder=$2
mkdir -p "$folder" && cp -r "$ROOT"/kmod-iommu/. "$folder" || exit 1
# pahole, which writes debugging types, may be missing.
flags=(CUTTLEFS_TEST=m CONFIG_DEBUG_INFO_BTF_MODULES= W=1)

# In the tree of the kernel's own compiler and C library, as root directory, with this machine's devices and the copy.
build_in_tree() {
    local tree=$1
    mkdir -p "$tree/dev" "$tree/proc" "$tree/work"
    local namespace=(--mount --propagation private)
    [[ $(id -u) == 0 ]] || namespace+=(--map-root-user)
    export -f drop_copied_mounts
    # shellcheck disable=SC2016
    unshare "${namespace[@]}" bash -c '
        drop_copied_mounts
        mount --rbind /dev "$1/dev" && mount --rbind /proc "$1/proc" && mount --bind "$2" "$1/work" || exit 1
        exec chroot "$1" /usr/bin/env -i PATH=/usr/bin:/usr/sbin LC_ALL=C make -s -C /work "${@:3}"
    ' bash "$tree" "$folder" "KDIR=/usr/src/linux-headers-$version" "${flags[@]}"
}
if [[ -d $kernel/tree ]]; then
    build_in_tree "$kernel/tree" >"$folder/log" 2>&1
else
    make -s -C "$folder" KDIR="$kernel/usr/src/linux-headers-$version" "${flags[@]}" >"$folder/log" 2>&1
fi || {
    cat "$folder/log" >&2
    die "kmod-iommu does not build for $version"
}
if grep -q warning: "$folder/log"; then
    cat "$folder/log" >&2
    die "kmod-iommu builds with warnings for $version"
fi
