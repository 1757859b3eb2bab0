#!/usr/bin/env bash
# Gets a kernel for scripts/vm/run.sh, once, into $CUTTLEFS_TOOLS/vm: Debian's newest 6.12 for bookworm, or the one that is named.
# Nothing is installed: packages are downloaded and unpacked there. Prints the kernel's folder.
# usage: fetch.sh [--headers] [VERSION]       6.12, 7.2, or in full, for example 6.12.117+deb12-amd64; --headers: also what building a module needs;
#   debug: 6.12 built here, with KASAN, lockdep and kmemleak (debug-kernel.sh)
# A series without more means what is there of it already, or else its newest. 7.2 is of trixie-backports, which apt has in a folder of its own here:
# the machine's lists of packages stay as they are. Its compiler (gcc 14) and C library come from trixie, too, unpacked as a tree of its own.
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

# Where apt looks: as configured on this machine, or with TRIXIE.
trixie=$store/apt-trixie
apt() {
    local program=$1
    shift
    if [[ $suffix == +deb13-amd64 ]]; then
        APT_CONFIG=$trixie/conf "$program" "$@"
    else
        "$program" "$@"
    fi
}
make_trixie() {
    local keys=/usr/share/keyrings/debian-archive-keyring.gpg mirror
    [[ -e $keys ]] || unavailable "$keys is missing; install debian-archive-keyring"
    # The mirror that the machine uses.
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -E '/debian/?$' | head -n 1)
    mkdir -p "$trixie"/{lists/partial,cache/archives/partial}
    : >"$trixie/status"
    for suite in trixie trixie-backports; do
        echo "deb [signed-by=$keys] ${mirror:-http://deb.debian.org/debian} $suite main"
    done >"$trixie/sources"
    cat >"$trixie/conf" <<CONF
Dir::Etc::SourceList "$trixie/sources";
Dir::Etc::SourceParts "/dev/null";
Dir::State "$trixie";
Dir::State::status "$trixie/status";
Dir::Cache "$trixie/cache";
Acquire::Languages "none";
APT::Sandbox::User "";
CONF
}
update() {
    local as_root=()
    if [[ $suffix == +deb13-amd64 ]]; then
        make_trixie
    elif [[ $(id -u) != 0 ]]; then
        as_root=(sudo -n)
    fi
    apt ${as_root[@]+"${as_root[@]}"} apt-get update -q >&2 || unavailable "apt-get update failed"
}

version=${1:-6.12}
case $version in
    # Before the others: 6.12.117-debug is none of Debian's.
    debug | *-debug) suffix=-debug ;;
    6.12* | *+deb12-amd64) suffix=+deb12-amd64 ;;
    7.2* | *+deb13-amd64) suffix=+deb13-amd64 ;;
    *) unavailable "no kernel $version; the head of $0 names those that there are" ;;
esac
# One fetch of a kind at a time, so that everything that is there is complete. Others go on while a debug kernel is built.
exec 9>"$store/lock.${suffix#?}"
flock 9
if [[ $version == debug ]]; then
    version=$(find "$store" -maxdepth 1 -type d -name "*-debug" -printf '%f\n' | sort -V | tail -n 1)
    # What Debian's package of the source is called: 6.12.117-1~deb12u1.
    newest() { apt-cache policy linux-source-6.12 | sed -n 's/^  Candidate: \([0-9.]*\)-.*/\1-debug/p'; }
    if [[ -z $version ]]; then
        version=$(newest)
        if [[ -z $version ]]; then
            update
            version=$(newest)
        fi
        [[ -n $version ]] || unavailable "apt knows no linux-source-6.12"
    fi
elif [[ $version != *"$suffix" ]]; then
    series=$version
    # A kernel that is there already is good enough.
    version=$(find "$store" -maxdepth 1 -name "$series.*$suffix" -printf '%f\n' | sort -V | tail -n 1)
    newest() { apt apt-cache pkgnames "linux-image-$series." | sed -n "s/^linux-image-\\($series\\.[0-9]*$suffix\\)\$/\\1/p" | sort -V | tail -n 1; }
    if [[ -z $version ]]; then
        version=$(newest 2>/dev/null)
        if [[ -z $version ]]; then
            update
            version=$(newest)
        fi
        [[ -n $version ]] || unavailable "apt knows no linux-image-$series.*$suffix"
    fi
elif [[ $suffix == +deb13-amd64 && ! -e $trixie/conf && ! -e $store/$version/headers-complete ]]; then
    update
fi
folder=$store/$version

# unpack PACKAGE FOLDER
unpack() {
    local package=$1 to=$2 work
    work=$(mktemp -d "$store/get.XXXXXX") || return 1
    chmod 755 "$work"
    if ! (cd "$work" && apt apt-get download -q "$package" >&2) || ! dpkg-deb -x "$work"/*.deb "$to"; then
        rm -rf "$work"
        return 1
    fi
    rm -rf "$work"
}

if [[ ! -e $folder/complete ]]; then
    rm -rf "$folder"
    # Since 7.x the image is in several packages, and linux-image- names them.
    packages=("linux-image-$version")
    [[ $suffix == +deb13-amd64 ]] && packages=("linux-binary-$version" "linux-modules-$version" "linux-base-$version")
    if [[ $suffix == -debug ]]; then
        packages=()
        "$ROOT/scripts/vm/debug-kernel.sh" "$folder" || exit $?
        touch "$folder/headers-complete"
    else
        say "fetching kernel $version into $store (once)"
    fi
    for package in ${packages[@]+"${packages[@]}"}; do
        unpack "$package" "$folder" || unavailable "$package cannot be downloaded"
    done
    # The image then lies beside its modules.
    [[ -d $folder/lib/modules ]] || ln -s usr/lib "$folder/lib" || exit 1
    [[ -d $folder/boot ]] || { mkdir "$folder/boot" && ln -s "../lib/modules/$version/vmlinuz" "$folder/boot/vmlinuz-$version"; } || exit 1
    # busybox's insmod reads no compressed modules.
    find "$folder/lib/modules/" -name '*.ko.xz' -exec xz -d {} + || exit 1
    depmod -b "$folder" "$version" || exit 1
    # The initramfs, which mounts this machine's root over 9p.
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
# The guest's init may be newer than the packed one.
if ! cmp -s <(cpio -i --to-stdout --quiet init <"$folder/initrd.cpio" 2>/dev/null) "$ROOT/scripts/vm/init"; then
    root=$(mktemp -d "$store/root.XXXXXX") || exit 1
    (cd "$root" && cpio -id --quiet --no-absolute-filenames <"$folder/initrd.cpio" 2>/dev/null)
    install -m 755 "$ROOT/scripts/vm/init" "$root/init"
    (cd "$root" && find . | cpio -o -H newc --quiet) >"$folder/initrd.cpio" || exit 1
    rm -rf "$root"
fi
if [[ -n $headers && ! -e $folder/headers-complete ]]; then
    say "fetching what builds modules for $version (once)"
    if [[ $suffix == +deb13-amd64 ]]; then
        # A tree to change root into (kmod-build.sh): apt takes nothing as installed, so it names everything that the headers and a shell need.
        rm -rf "$folder/tree" "$trixie"/cache/archives/*.deb
        apt apt-get install -q -y --download-only --no-install-recommends "linux-headers-$version" gcc-14 make base-files bash dash \
            coreutils findutils grep sed mawk >&2 || unavailable "linux-headers-$version cannot be downloaded"
        mkdir -p "$folder/tree"
        # First the package in which /bin is a link to /usr/bin.
        for file in "$trixie"/cache/archives/base-files_*.deb "$trixie"/cache/archives/*.deb; do
            dpkg-deb -x "$file" "$folder/tree" || exit 1
        done
        ln -sf mawk "$folder/tree/usr/bin/awk"
        rm -f "$trixie"/cache/archives/*.deb
    else
        for package in "linux-headers-$version" "linux-headers-${version%-amd64}-common" linux-kbuild-"${version%-amd64}"; do
            unpack "$package" "$folder" || unavailable "$package cannot be downloaded"
        done
        # Debian's makefile includes another by its installed path.
        sed -i "s|/usr/src/|$folder/usr/src/|" "$folder/usr/src/linux-headers-$version/Makefile" || exit 1
    fi
    touch "$folder/headers-complete"
fi
echo "$folder"
