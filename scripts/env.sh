# shellcheck shell=bash
# Where things are. Sourced by every script; sets variables, starts nothing.
#
#   CUTTLEFS_TOOLS        where setup.sh puts cargo tools it had to build     (~/.cache/cuttlefs/tools)
#   CUTTLEFS_BIN          directory of the binaries under test                (target/release)
#   CARGO_TARGET_DIR      as cargo knows it                                   (target)

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
