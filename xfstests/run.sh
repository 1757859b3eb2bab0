#!/usr/bin/env bash
# Runs xfstests on cuttlefs: two servers on two new pools, the suite's mounts over one link; everything is removed afterwards.
#
#   xfstests/run.sh XFSTESTS-TREE [CHECK-ARGUMENT...]      default: -g quick -g auto
#
#   CUTTLEFS_LINK=shm|tcp|unix      the link (shm)
#   CUTTLEFS_DURABILITY=fsync|ack   as `cuttlefsd serve --durability` (fsync)
#   CUTTLEFS_XFSTESTS_SIZE=SIZE     of each of the two pools (12G, all of it allocated; 3G do for most tests)
#   CUTTLEFS_XFSTESTS_RESULTS=DIR   the suite's results (target/xfstests)
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source "$here/../scripts/env.sh"
(($# >= 1)) || die "usage: $0 XFSTESTS-TREE [-g GROUP | TEST...]"
tree=$(cd "$1" && pwd) || exit 1
shift
(($#)) || set -- -g quick -g auto
[[ $(id -u) == 0 ]] || die "xfstests mounts and must run as root"
[[ -x $tree/check && -x $tree/src/locktest ]] || die "$tree is no built xfstests tree: run make there"
[[ -x $CUTTLEFS_BIN/cuttlefsd && -x $CUTTLEFS_BIN/cuttlefs ]] ||
    die "no binaries in $CUTTLEFS_BIN; build them (cargo build --release) or set CUTTLEFS_BIN"
link=${CUTTLEFS_LINK:-shm}
size=${CUTTLEFS_XFSTESTS_SIZE:-12G}
results=${CUTTLEFS_XFSTESTS_RESULTS:-$CARGO_TARGET_DIR/xfstests}

work=$(mktemp -d /var/tmp/cft-xfstests.XXXX) || exit 1
chmod 755 "$work"
declare -A servers=()
helper=
suite=
cleanup() {
    [[ -n $suite ]] && kill -- "-$suite" 2>/dev/null && wait "$suite" 2>/dev/null
    umount "$work/scratch" 2>/dev/null || umount -l "$work/scratch" 2>/dev/null
    umount "$work/test" 2>/dev/null || umount -l "$work/test" 2>/dev/null
    local pid
    for pid in "${servers[@]}"; do
        kill "$pid" 2>/dev/null
        wait "$pid" 2>/dev/null
    done
    # The servers' logs help to analyse failed tests.
    mkdir -p "$results" && cp "$work"/*.log "$results/" 2>/dev/null
    [[ -n $helper ]] && rm -f "$helper"
    rm -rf --one-file-system "$work"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
mkdir "$work/test" "$work/scratch" "$work/bin"

# mount(8) looks for helpers only in /sbin.
if [[ ! -e /sbin/mount.fuse.cuttlefs ]]; then
    helper=/sbin/mount.fuse.cuttlefs
    ln -s "$CUTTLEFS_BIN/cuttlefs" "$helper" || exit 1
fi
# The suite calls FUSE file systems `fuse`, but df reports `fuse.cuttlefs`.
cat >"$work/bin/df" <<END
#!/bin/sh
$(type -P df) "\$@" | sed 's/ fuse\.cuttlefs / fuse           /'
END
chmod 755 "$work/bin/df"

# Both servers use one key over tcp, so that mounts by mount(8) need no option of their own.
export CUTTLEFS_KEY=$work/key
"$CUTTLEFS_BIN/cuttlefsd" key new "$CUTTLEFS_KEY" >/dev/null || die "cannot make a key"

# serve NAME PORT: starts a server on a pool of its own; sets url_NAME.
serve() {
    local name=$1 port=$2 url waited
    case $link in
        shm | unix) url=$link://$work/$name.sock ;;
        tcp) url=tcp://127.0.0.1:$port ;;
        *) die "unknown link $link; CUTTLEFS_LINK is shm, tcp or unix" ;;
    esac
    "$CUTTLEFS_BIN/cuttlefsd" format --pool "$work/pool-$name" --size "$size" >>"$work/$name.log" 2>&1 ||
        die "format failed: $(tail -3 "$work/$name.log")"
    "$CUTTLEFS_BIN/cuttlefsd" serve --pool "$work/pool-$name" --memory 1G --key "$CUTTLEFS_KEY" --listen "$url" \
        ${CUTTLEFS_DURABILITY:+--durability "$CUTTLEFS_DURABILITY"} \
        >>"$work/$name.log" 2>&1 </dev/null &
    servers[$name]=$!
    for ((waited = 0; waited < 300; waited++)); do
        timeout 5 "$CUTTLEFS_BIN/cuttlefs" status "$url" >/dev/null 2>&1 && break
        kill -0 "${servers[$name]}" 2>/dev/null || die "the server ended while starting: $(tail -3 "$work/$name.log")"
        sleep 0.1
    done
    printf -v "url_$name" %s "$url"
}
port=$((20000 + $$ % 10000))
serve test $port
serve scratch $((port + 1))

# shellcheck disable=SC2154  # url_* are set by serve
sed -e "s|@TEST_DEV@|$url_test|" -e "s|@SCRATCH_DEV@|$url_scratch|" -e "s|@WORK@|$work|" -e "s|@RESULTS@|$results|" \
    "$here/local.config.template" >"$work/local.config"
# Every line needs a reason; check gets only the names.
while IFS= read -r line; do
    [[ -z $line || $line == \#* ]] && continue
    [[ $line =~ ^([a-z]+/[0-9]+)[[:space:]]+\#[[:space:]]*[^[:space:]] ]] || die "exclude: no reason in: $line"
    echo "${BASH_REMATCH[1]}"
done <"$here/exclude" >"$work/exclude.names"

cd "$tree" || exit 1
# In a process group of its own, and waited for: so a signal ends the tests, too.
PATH="$work/bin:$PATH" HOST_OPTIONS="$work/local.config" setsid ./check -fuse -E "$work/exclude.names" "$@" &
suite=$!
wait "$suite"
