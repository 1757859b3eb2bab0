#!/usr/bin/env bash
# Makes docs/native/: random reads by the native API beside those through a mount (`cuttlefs bench native`), and SQLite and LevelDB on a mount, with
# `cuttlefs preload` and without it, in turn. Takes some four minutes a link. The machine should do nothing else.
# usage: measure-native.sh [shm|tcp] [ROUNDS]     five rounds
source "$(dirname "$0")/suites/lib.sh"
source "$(dirname "$0")/figures.sh"
cd "$ROOT" || exit 1
link=${1:-shm} rounds=${2:-5}
build_for_figures libraries
suite_begin measure "$link"
needs_server
start_server 2G 512M
mount_fs
out=docs/native
mkdir -p "$out"

# Debian's module is the system's Python's.
database() { /usr/bin/python3 "$ROOT/scripts/suites/database_load.py" "$1" "$2"; }
preloaded() {
    "$CUTTLEFS_BIN/cuttlefs" preload --report --mount "$MNT" /usr/bin/python3 "$ROOT/scripts/suites/database_load.py" "$1" "$2" 2>"$WORK/report.$1"
}
kinds=(sqlite)
/usr/bin/python3 -c "import plyvel" 2>/dev/null && kinds+=(leveldb) || say "no LevelDB: apt install python3-plyvel"
for ((round = 1; round <= rounds; round++)); do
    for kind in "${kinds[@]}"; do
        ways=(database preloaded)
        ((round % 2)) || ways=(preloaded database)
        for way in "${ways[@]}"; do
            say "round $round: $kind, $way"
            "$way" "$kind" "$MNT/$kind.$way.$round" >"$WORK/$kind.$way.$round" || die "the load failed"
        done
        cmp <(head -n 1 "$WORK/$kind.database.$round") <(head -n 1 "$WORK/$kind.preloaded.$round") || die "the results differ"
    done
done
say "bench native"
"$CUTTLEFS_BIN/cuttlefs" bench native "$MNT" --rounds "$rounds" >"$WORK/native" || die "it failed"
{
    echo "# The native API and preload over $link"
    echo
    # shellcheck disable=SC2016
    printf '`scripts/measure-native.sh %s %s`, commit %s, %s\n\n' "$link" "$rounds" "$commit" "$(date -u +%Y-%m-%d)"
    memory=$(awk '$1 == "MemTotal:" { print int(($2 + 1048575) / 1048576) }' /proc/meminfo)
    echo "$(nproc) cores, ${memory}G, Linux $(uname -r). Operations a second on a mount, medians of $rounds rounds, least and most; a ratio is of the medians."
    echo "The results of all runs are the same. Of the reads by preload, the last round's:"
    echo
    for kind in "${kinds[@]}"; do
        taken=$(awk '/ reads taken$/ {print $1}' "$WORK/report.$kind")
        [[ -n $taken ]] || die "no report of $kind"
        echo "* $kind: $taken reads taken past the kernel$([[ $taken == 0 ]] && echo ': both columns are the kernel, which reads its mappings')"
    done
    echo
    python3 - "$WORK" "$rounds" "${kinds[@]}" <<'PY'
import pathlib, statistics, sys

work, rounds, kinds = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
print("| load | by the kernel | preload | ratio |\n| --- | ---: | ---: | ---: |")
for kind in kinds:
    rates = {}
    for way in ("database", "preloaded"):
        for number in range(1, rounds + 1):
            for part in (work / f"{kind}.{way}.{number}").read_text().splitlines()[1].split(", "):
                rate, name = part.removesuffix(" a second").split(" ", 1)
                rates.setdefault(name, {}).setdefault(way, []).append(int(rate))
    for name, found in rates.items():
        middle = {way: statistics.median(values) for way, values in found.items()}
        shown = [f"{middle[way]:,.0f} ({min(found[way]):,} to {max(found[way]):,})" for way in ("database", "preloaded")]
        print(f"| {kind}: {name} | {shown[0]} | {shown[1]} | {middle['preloaded'] / middle['database']:.2f} |")
PY
    printf '\nRandom reads and changes, `cuttlefs bench native`; a ratio is the median of the ratios of the rounds:\n\n```\n'
    sed -e "s#$MNT#MOUNT#g" "$WORK/native"
    echo '```'
} >"$out/$link.md"
pass "$out/$link.md"
suite_end
