#!/usr/bin/env bash
# Installs what building and testing cuttlefs needs and is missing. Run it as often as you like.
#
#   scripts/setup.sh            what up.sh needs: compiler, FUSE
#   scripts/setup.sh --tests    also what test.sh needs: fio, sqlite3, pjdfstest, fsx, cargo-deny; and libraries of RDMA hardware and a virtual
#                               machine, without which the tests of those are skipped
#
# Debian and Ubuntu packages come from apt-get (through sudo when not root), only if one is missing.
# Cargo tools are built into $CUTTLEFS_TOOLS, in no system directory.
set -euo pipefail
source "$(dirname "$0")/env.sh"

with_tests=false
case ${1:-} in
    '') ;;
    --tests) with_tests=true ;;
    *) die "unknown option $1; usage: scripts/setup.sh [--tests]" ;;
esac

# package:command pairs; a package is wanted when its command is not found.
packages=(gcc:gcc make:make pkg-config:pkg-config fuse3:fusermount3)
if $with_tests; then
    packages+=(fio:fio acl:setfacl attr:getfattr sqlite3:sqlite3 git:git jq:jq xz-utils:xz
        python3:python3 procps:ps util-linux:flock libcap2-bin:setcap)
fi
# Libraries have no command to look for.
libraries=()
# pjdfstest links libacl.
$with_tests && libraries+=(libacl1-dev)

is_installed() { dpkg-query -W -f='${Status}' "$1" 2>/dev/null | grep -q 'ok installed'; }

# missing_of PAIR-OR-LIBRARY...: the packages of these that are not there.
missing_of() {
    local wanted
    for wanted; do
        case $wanted in
            *:*) command -v "${wanted#*:}" >/dev/null || echo "${wanted%%:*}" ;;
            *) is_installed "$wanted" || echo "$wanted" ;;
        esac
    done
}

# install PACKAGE...: returns non-zero, with why as the last line, if they cannot be had.
install() {
    local as_root=()
    command -v apt-get >/dev/null || {
        say "missing: $*; this is neither Debian nor Ubuntu, so install them by hand and run this again"
        return 1
    }
    if [[ $(id -u) != 0 ]]; then
        command -v sudo >/dev/null || {
            say "missing: $*; install them as root, there is no sudo here"
            return 1
        }
        as_root=(sudo)
    fi
    say "installing packages: $*"
    export DEBIAN_FRONTEND=noninteractive
    # Stale lists are the usual reason for a failing install, so they are refreshed only when it fails.
    ${as_root[@]+"${as_root[@]}"} apt-get install -y --no-install-recommends "$@" >/dev/null 2>&1 || {
        ${as_root[@]+"${as_root[@]}"} apt-get update -q >&2
        ${as_root[@]+"${as_root[@]}"} apt-get install -y --no-install-recommends "$@" >&2
    }
}

mapfile -t missing < <(missing_of "${packages[@]}" ${libraries[@]+"${libraries[@]}"})
if ((${#missing[@]})); then
    install "${missing[@]}" || die "these packages are needed: ${missing[*]}"
else
    say "packages: all there"
fi
if $with_tests; then
    # What the phases `rdma` and `kmod` want. Without it they are skipped, and all others run.
    mapfile -t missing < <(missing_of libibverbs-dev librdmacm-dev libclang-dev ibverbs-providers rdma-core iproute2:ip \
        qemu-system-x86:qemu-system-x86_64 busybox-static cpio:cpio kmod:depmod perftest:ib_read_bw)
    ((${#missing[@]} == 0)) || install "${missing[@]}" || say "tests of RDMA hardware and of the kernel module will be skipped: ${missing[*]} missing"
fi

[[ -e /dev/fuse ]] || die "/dev/fuse is missing: load the fuse module (modprobe fuse), or give the container --device /dev/fuse --cap-add SYS_ADMIN"
command -v cargo >/dev/null ||
    die "cargo is missing: install Rust 1.90 or newer from https://rustup.rs, then run this again"

# Builds a cargo tool unless it is there. $1: crate, $2: version, $3: command.
cargo_tool() {
    local crate=$1 version=$2 command=$3
    command -v "$command" >/dev/null && return
    say "building $crate $version into $CUTTLEFS_TOOLS (once)"
    # Its own target directory keeps the project's warm; thin settings because build time matters here
    # and the speed of these tools does not.
    CARGO_TARGET_DIR="$CUTTLEFS_TOOLS/build" CARGO_PROFILE_RELEASE_LTO=false CARGO_PROFILE_RELEASE_DEBUG=0 \
        CARGO_PROFILE_RELEASE_OPT_LEVEL=1 \
        cargo install --quiet --locked --root "$CUTTLEFS_TOOLS" "$crate@$version" >&2
}
if $with_tests; then
    cargo_tool pjdfstest 0.2.2 pjdfstest
    cargo_tool fsx 0.3.2 fsx
    # Checks licences and banned crates; a machine where it cannot be built can still run everything else.
    cargo_tool cargo-deny 0.20.2 cargo-deny || say "cargo-deny could not be built: check.sh will say so"
    rm -rf "$CUTTLEFS_TOOLS/build"
fi
say "setup: done"
