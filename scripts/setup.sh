#!/usr/bin/env bash
# Installs the missing programs and libraries for building and testing cuttlefs. It can be run any number of times.
#
#   scripts/setup.sh            what up.sh needs: compiler, FUSE
#   scripts/setup.sh --tests    also what test.sh needs: fio, sqlite3, pjdfstest, fsx, cargo-deny; and libraries of RDMA hardware, a virtual
#                               machine, and a Python that packs wheels, without which the tests of those are skipped
#
# Debian and Ubuntu packages come from apt-get (through sudo when not root), only if one is missing.
# Cargo tools are built into $CUTTLEFS_TOOLS, not into a system directory.
set -euo pipefail
source "$(dirname "$0")/env.sh"

with_tests=false
case ${1:-} in
    '') ;;
    --tests) with_tests=true ;;
    *) die "unknown option $1; usage: scripts/setup.sh [--tests]" ;;
esac

# package:command pairs; a package is wanted if its command is not found.
packages=(gcc:gcc make:make pkg-config:pkg-config fuse3:fusermount3)
if $with_tests; then
    packages+=(fio:fio acl:setfacl attr:getfattr sqlite3:sqlite3 git:git jq:jq xz-utils:xz
        python3:python3 procps:ps util-linux:flock libcap2-bin:setcap)
fi
# Libraries have no command by which to find them.
libraries=()
# pjdfstest links libacl.
$with_tests && libraries+=(libacl1-dev)

is_installed() { dpkg-query -W -f='${Status}' "$1" 2>/dev/null | grep -q 'ok installed'; }

# missing_of PAIR-OR-LIBRARY...: prints the missing packages of these.
missing_of() {
    local wanted
    for wanted; do
        case $wanted in
            *:*) command -v "${wanted#*:}" >/dev/null || echo "${wanted%%:*}" ;;
            *) is_installed "$wanted" || echo "$wanted" ;;
        esac
    done
}

# install PACKAGE...: returns non-zero if they cannot be installed, with the reason as the last line.
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
    # The usual reason for a failing install is that apt's lists are old, so they are refreshed only when it fails.
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
    # For the phases `rdma` and `kmod`. Without it they are skipped, and all others run.
    mapfile -t missing < <(missing_of libibverbs-dev librdmacm-dev libclang-dev ibverbs-providers rdma-core iproute2:ip \
        qemu-system-x86:qemu-system-x86_64 busybox-static cpio:cpio kmod:depmod perftest:ib_read_bw)
    ((${#missing[@]} == 0)) || install "${missing[@]}" || say "tests of RDMA hardware and of the kernel module will be skipped: ${missing[*]} missing"
fi

if $with_tests; then
    # Suite `preload` runs LevelDB, too. Without it that part is skipped.
    mapfile -t missing < <(missing_of python3-plyvel)
    ((${#missing[@]} == 0)) || install "${missing[@]}" || say "the suite preload will skip LevelDB: ${missing[*]} missing"
fi

[[ -e /dev/fuse ]] || die "/dev/fuse is missing: load the fuse module (modprobe fuse), or give the container --device /dev/fuse --cap-add SYS_ADMIN"
command -v cargo >/dev/null ||
    die "cargo is missing: install Rust 1.90 or newer from https://rustup.rs, then run this again"

# Builds a cargo tool if it is missing. $1: crate, $2: version, $3: command.
cargo_tool() {
    local crate=$1 version=$2 command=$3
    command -v "$command" >/dev/null && return
    say "building $crate $version into $CUTTLEFS_TOOLS (once)"
    # A target directory of its own keeps the project's builds; settings for a fast build, since the speed of these tools does not matter.
    CARGO_TARGET_DIR="$CUTTLEFS_TOOLS/build" CARGO_PROFILE_RELEASE_LTO=false CARGO_PROFILE_RELEASE_DEBUG=0 \
        CARGO_PROFILE_RELEASE_OPT_LEVEL=1 \
        cargo install --quiet --locked --root "$CUTTLEFS_TOOLS" "$crate@$version" >&2
}
if $with_tests; then
    cargo_tool pjdfstest 0.2.2 pjdfstest
    cargo_tool fsx 0.3.2 fsx
    # It checks licences and banned crates; a machine on which it cannot be built can still run everything else.
    cargo_tool cargo-deny 0.20.2 cargo-deny || say "cargo-deny could not be built: check.sh will say so"
    rm -rf "$CUTTLEFS_TOOLS/build"
    # A Python of its own with what packs a wheel.
    python=$CUTTLEFS_TOOLS/python
    "$python/bin/python3" -c 'import setuptools.command.bdist_wheel' 2>/dev/null ||
        { python3 -m venv "$python" && "$python/bin/pip" --quiet install 'setuptools>=70.1'; } >/dev/null 2>&1 ||
        say "the check of the Python wheel will be skipped: python3 has no venv and pip, or setuptools cannot be had"
fi
say "setup: done"
