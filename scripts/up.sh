#!/usr/bin/env bash
# From a fresh machine to a mounted cuttlefs in one command:
#
#   scripts/up.sh ~/cuttle [options of `cuttlefs up`]
#
# Installs what is missing, builds, formats a pool in ./cuttlefs-data (if there is none), serves it and mounts it.
# Ctrl-C, or `cuttlefs down ~/cuttle` from elsewhere, ends it. The files stay in the pool.
set -euo pipefail
source "$(dirname "$0")/env.sh"

[[ ${1:-} == -* || $# == 0 ]] && die "usage: scripts/up.sh MNT [--pool DIR] [--size 8G] [--memory 1G]"
mount_point=$1
shift
"$ROOT/scripts/setup.sh"
say "building; the first time takes minutes"
set_features
lacks=$(rdma_lacks)
[[ -z $lacks ]] || say "without RDMA hardware; for rdma:// install $lacks, and run this again"
cargo build --release --locked --manifest-path "$ROOT/Cargo.toml" -p cuttlefs-server -p cuttlefs-client -p cuttlefs-preload -p cuttlefs-swapped ${FEATURES[@]+"${FEATURES[@]}"}
say "the programs are in $CUTTLEFS_BIN; to have them in PATH: export PATH=\$PATH:$CUTTLEFS_BIN"
# Makes the mount point without looking into one that hangs, which mkdir(1) would do.
exec "$CUTTLEFS_BIN/cuttlefs" up "$mount_point" "$@" --foreground
