#!/usr/bin/env bash
# Runs xfstests on two cuttlefs servers. usage: run.sh XFSTESTS-TREE TEST-URL SCRATCH-URL [CHECK-ARGUMENT...]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}
(($# >= 3)) || die "usage: $0 XFSTESTS-TREE TEST-URL SCRATCH-URL [-g GROUP | TEST...]"
tree=$1 test_url=$2 scratch_url=$3
shift 3
[[ $(id -u) == 0 ]] || die "xfstests mounts and must run as root"
[[ -x $tree/check && -x $tree/src/locktest ]] || die "$tree is no built xfstests tree"
command -v mount.fuse.cuttlefs >/dev/null || die "mount.fuse.cuttlefs is not in the PATH; install it in /sbin"

work=$(mktemp -d /var/tmp/cuttlefs-xfstests.XXXXXX)
mkdir "$work/test" "$work/scratch"
cleanup() {
    umount "$work/test" "$work/scratch" 2>/dev/null || true
    rm -rf --one-file-system "$work"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

sed -e "s|@TEST_DEV@|$test_url|" -e "s|@SCRATCH_DEV@|$scratch_url|" -e "s|@WORK@|$work|" \
    "$here/local.config.template" >"$work/local.config"
# Every line needs a reason; check takes the names only.
while IFS= read -r line; do
    [[ -z $line || $line == \#* ]] && continue
    [[ $line =~ ^([a-z]+/[0-9]+)[[:space:]]+\#[[:space:]]*[^[:space:]] ]] || die "exclude: no reason in: $line"
    echo "${BASH_REMATCH[1]}"
done <"$here/exclude" >"$work/exclude.names"

(($#)) || set -- -g quick
cd "$tree"
HOST_OPTIONS="$work/local.config" ./check -fuse -E "$work/exclude.names" "$@"
