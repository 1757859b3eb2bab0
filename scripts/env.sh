# shellcheck shell=bash
# Paths and settings. Sourced by every script; sets variables, starts nothing.
#
#   CUTTLEFS_TOOLS        where setup.sh puts cargo tools it had to build     (~/.cache/cuttlefs/tools)
#   CUTTLEFS_BIN          directory of the binaries under test                (target/release)
#   CARGO_TARGET_DIR      as for cargo                                        (target)
#   CUTTLEFS_RDMA=no      builds without RDMA hardware, also where its libraries are

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export CUTTLEFS_TOOLS=${CUTTLEFS_TOOLS:-$HOME/.cache/cuttlefs/tools}
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$ROOT/target}
export CUTTLEFS_BIN=${CUTTLEFS_BIN:-$CARGO_TARGET_DIR/release}
export PATH="$CUTTLEFS_TOOLS/bin:$HOME/.cargo/bin:$PATH"
# Messages that scripts compare must not depend on the user's language.
export LC_ALL=C.UTF-8

say() { printf '== %s\n' "$*" >&2; }
die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# Prints the Debian packages that a build with RDMA hardware needs and that are missing; nothing if none is.
rdma_lacks() {
    local lacks=() library minimum
    # The versions that rdma-sys asks for.
    for library in libibverbs=1.8.28 librdmacm=1.2.28; do
        minimum=${library#*=} library=${library%=*}
        pkg-config --atleast-version="$minimum" "$library" 2>/dev/null || lacks+=("$library-dev")
    done
    # bindgen loads libclang. These are the most usual of the places where clang-sys looks for it.
    [[ -n ${LIBCLANG_PATH:-} ]] || compgen -G '/usr/lib/llvm-*/lib/libclang*.so*' >/dev/null ||
        compgen -G '/usr/lib*/libclang*.so*' >/dev/null || compgen -G '/usr/lib/*/libclang*.so*' >/dev/null ||
        lacks+=(libclang-dev)
    echo "${lacks[*]}"
}

# Sets FEATURES, cargo's arguments: RDMA hardware if its libraries are installed. A feature cannot look for a library, so each script that builds
# calls this first. All builds in a target directory use the same features: with others cargo would build everything again.
set_features() {
    FEATURES=()
    [[ ${CUTTLEFS_RDMA:-} != no && -z $(rdma_lacks) ]] || return 0
    FEATURES=(--features "cuttlefs-server/verbs,cuttlefs-client/verbs")
}

# In a new mount namespace: drops its copies of the mounts that other suites have at this moment. The kernel ends a FUSE mount with its last copy, so
# a copy here would keep an unmounted file system, and its client, alive.
drop_copied_mounts() {
    local at
    awk '/ - fuse\.cuttlefs / {print $5}' /proc/self/mountinfo | while read -r at; do umount -l "$(printf %b "$at")" 2>/dev/null; done
}
