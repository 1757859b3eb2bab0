#!/usr/bin/env bash
# Makes docs/rpc.md and docs/rpc/: every figure of the durable RPC paper's evaluation and its Table 2, measured here, as tables and plots.
# Figures that are named are made anew, others stay. Table 2 is made from Figures 9, 14, 17 and 20.
# Takes about half an hour with five rounds. The machine should do nothing else.
# usage: measure-rpc.sh [--seconds N] [--rounds N] [--quick] [FIGURE...]     8a, 8b, 9 to 20, shm (writes over shared memory), table2
source "$(dirname "$0")/env.sh"
source "$(dirname "$0")/figures.sh"
cd "$ROOT" || exit 1
set -uo pipefail

seconds=0.4
rounds=5
take_arguments 'seconds rounds' '@(8a|8b|9|1[0-9]|20|shm|table2)' "$@"
((${#figures[@]})) || figures=(8a 8b 9 10 11 12 13 14 15 16 17 18 19 20 shm table2)

build_for_figures
out=docs/rpc
work=$(mktemp -d /var/tmp/cft-rpc.XXXX) || exit 1
trap 'rm -rf --one-file-system "$work"' EXIT
trap 'exit 130' INT TERM

common=(--seconds "$seconds" --rounds "$rounds" "${quick[@]}")
# In one run, so that their common parts are measured once.
together=()
for figure in "${figures[@]}"; do
    [[ $figure == 8? || $figure == 9 || $figure == 1[3478] ]] && together+=("$figure")
done
if ((${#together[@]})); then
    list=$(IFS=, && echo "${together[*]}")
    run - "Figures $list" bench rpc "${common[@]}" --figure "$list"
fi
for figure in "${figures[@]}"; do
    case $figure in
        shm) run shm "Writes whose processing takes 100 us, over shm" bench rpc "${common[@]}" --link shm ;;
        table2)
            mkdir -p "$work/parts"
            for part in 9 14 17 20; do
                [[ -e $out/figure-$part.json ]] || die "Table 2 is of Figures 9, 14, 17 and 20; Figure $part is not there yet"
                cp "$out/figure-$part.json" "$work/parts/rpc-figure-$part.json"
            done
            say "Table 2"
            {
                echo "# Table 2"
                echo
                # shellcheck disable=SC2016
                printf 'From Figures 9, 14, 17 and 20 (`cuttlefs bench rpc --figure table2`).\n\n```\n'
                "$bench" bench rpc --figure table2 --out "$work/parts" || die "Table 2 failed"
                echo '```'
            } >"$out/table-2.md"
            cat "$out/table-2.md"
            ;;
        10 | 11 | 12 | 15 | 16 | 19 | 20) run - "Figure $figure" bench rpc "${common[@]}" --figure "$figure" ;;
    esac
done

{
    echo "# Durable RPC beside other RPCs, as its paper measures them"
    echo
    echo "Made by \`scripts/measure-rpc.sh\`; what the figures mean stands in [durable-rpc.md](durable-rpc.md). Each page says of which commit, day and machine it is."
    echo
    for name in figure-{8a,8b,9,10,11,12,13,14,15,16,17,18,19,20} shm table-2; do
        [[ -e $out/$name.md ]] && echo "* [$(sed -n '1s/^# //p' "$out/$name.md")](rpc/$name.md)"
    done
} >docs/rpc.md
say "written: docs/rpc.md and $out"
