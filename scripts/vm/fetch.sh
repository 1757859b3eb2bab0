#!/usr/bin/env bash
# Gets a kernel for scripts/vm/run.sh, once, into $CUTTLEFS_TOOLS/vm: Debian's newest 6.12 for bookworm, or the version that is named.
# Nothing is installed: packages are downloaded and unpacked there. Prints the kernel's folder.
# usage: fetch.sh [--headers] [VERSION]       for example 6.12.117+deb12-amd64; --headers: also what building a module needs
# Exit status 3: this machine cannot have one (no apt, no network); the last line on stderr, `skipped: ...`, says why.
source "$(dirname "$0")/../env.sh"
set -uo pipefail

unavailable() {
    printf 'skipped: no virtual machine: %s\n' "$*" >&2
    exit 3
}

headers=
if [[ ${1:-} == --headers ]]; then
    headers=1
    shift
fi
for command in apt-get dpkg-deb depmod cpio qemu-system-x86_64; do
    command -v "$command" >/dev/null || unavailable "$command is missing; install qemu-system-x86, busybox-static, cpio and kmod"
done
[[ -x /bin/busybox ]] || unavailable "/bin/busybox is missing; install busybox-static"

store=$CUTTLEFS_TOOLS/vm
mkdir -p "$store" || exit 1
# One at a time: what is there is complete.
exec 9>"$store/lock"
flock 9

version=${1:-}
if [[ -z $version ]]; then
    # What is there already will do.
    version=$(find "$store" -maxdepth 1 -name '6.12.*' -printf '%f\n' | sort -V | tail -n 1)
fi
newest() { apt-cache pkgnames linux-image-6.12. | sed -n 's/^linux-image-\(6\.12\.[0-9]*+deb12-amd64\)$/\1/p' | sort -V | tail -n 1; }
if [[ -z $version ]]; then
    version=$(newest)
    if [[ -z $version ]]; then
        as_root=()
        [[ $(id -u) == 0 ]] || as_root=(sudo -n)
        "${as_root[@]}" apt-get update -q >&2 || unavailable "apt-get update failed"
        version=$(newest)
    fi
    [[ -n $version ]] || unavailable "apt knows no linux-image-6.12.*+deb12-amd64"
fi
folder=$store/$version

# unpack PACKAGE FOLDER
unpack() {
    local package=$1 to=$2 work
    work=$(mktemp -d "$store/get.XXXXXX") || return 1
    chmod 755 "$work"
    if ! (cd "$work" && apt-get download -q "$package" >&2) || ! dpkg-deb -x "$work"/*.deb "$to"; then
        rm -rf "$work"
        return 1
    fi
    rm -rf "$work"
}

if [[ ! -e $folder/complete ]]; then
    rm -rf "$folder"
    say "fetching kernel $version into $store (once)"
    unpack "linux-image-$version" "$folder" || unavailable "linux-image-$version cannot be downloaded"
    # busybox's insmod reads no compressed modules.
    find "$folder/lib/modules" -name '*.ko.xz' -exec xz -d {} + || exit 1
    depmod -b "$folder" "$version" || exit 1
    # The initramfs: what mounts this machine's root over 9p.
    root=$(mktemp -d "$store/root.XXXXXX") || exit 1
    mkdir -p "$root"/{bin,dev,proc,sys,m,lower,rw,new}
    cp /bin/busybox "$root/bin/busybox"
    cp "$ROOT/scripts/vm/init" "$root/init"
    chmod 755 "$root/init"
    number=10
    modules=$folder/lib/modules/$version
    for name in netfs 9pnet 9p 9pnet_virtio overlay; do
        file=$(find "$modules" -name "$name.ko" | head -n 1)
        [[ -n $file ]] || continue
        cp "$file" "$root/m/$number-$name.ko"
        number=$((number + 1))
    done
    (cd "$root" && find . | cpio -o -H newc --quiet) >"$folder/initrd.cpio" || exit 1
    rm -rf "$root"
    touch "$folder/complete"
fi
# The guest's init may be newer than the one that is packed.
if ! cmp -s <(cpio -i --to-stdout --quiet init <"$folder/initrd.cpio" 2>/dev/null) "$ROOT/scripts/vm/init"; then
    root=$(mktemp -d "$store/root.XXXXXX") || exit 1
    (cd "$root" && cpio -id --quiet --no-absolute-filenames <"$folder/initrd.cpio" 2>/dev/null)
    install -m 755 "$ROOT/scripts/vm/init" "$root/init"
    (cd "$root" && find . | cpio -o -H newc --quiet) >"$folder/initrd.cpio" || exit 1
    rm -rf "$root"
fi
if [[ -n $headers && ! -e $folder/headers-complete ]]; then
    say "fetching headers of $version (once)"
    for package in "linux-headers-$version" "linux-headers-${version%-amd64}-common" linux-kbuild-"${version%-amd64}"; do
        unpack "$package" "$folder" || unavailable "$package cannot be downloaded"
    done
    # Debian's makefile includes another by its installed path.
    sed -i "s|/usr/src/|$folder/usr/src/|" "$folder/usr/src/linux-headers-$version/Makefile" || exit 1
    touch "$folder/headers-complete"
fi
echo "$folder"
