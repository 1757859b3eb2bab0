#!/usr/bin/env bash
# Makes docs/np.md and docs/np/: Figures 7 to 11 and Tables 1 to 3 of the NP-RDMA paper, measured here, as tables and plots.
# Figures that are named are made anew, others stay.
# Takes about a quarter of an hour with five rounds. The machine should do nothing else.
# usage: measure-np.sh [--seconds N] [--rounds N] [--quick] [FIGURE...]     7 to 11, table1 to table3, shm (Figures 7 to 10 over shared memory)
source "$(dirname "$0")/env.sh"
source "$(dirname "$0")/figures.sh"
cd "$ROOT" || exit 1
set -uo pipefail

seconds=0.2
rounds=5
take_arguments 'seconds rounds' '@(7|8|9|10|11|table[123]|shm)' "$@"
((${#figures[@]})) || figures=(7 8 9 10 11 table1 table2 table3 shm)

build_for_figures
in_real_time
out=docs/np
work=$(mktemp -d /var/tmp/cft-np.XXXX) || exit 1
trap 'rm -rf --one-file-system "$work"' EXIT
trap 'exit 130' INT TERM

common=(--seconds "$seconds" --rounds "$rounds" "${quick[@]}")
for figure in "${figures[@]}"; do
    case $figure in
        table?) run "table-${figure#table}" "Table ${figure#table}" bench np "${common[@]}" --figure "$figure" ;;
        shm)
            for each in 7 8 9 10; do
                run "figure-$each-shm" "Figure $each over shared memory" bench np "${common[@]}" --figure "$each" --link shm
            done
            ;;
        *) run "figure-$figure" "Figure $figure" bench np "${common[@]}" --figure "$figure" ;;
    esac
done

{
    echo "# Memory that may not be there, as the NP-RDMA paper measures it"
    echo
    echo "Made by \`scripts/measure-np.sh\`; what the figures mean stands in [np-rdma.md](np-rdma.md). Each page says of which commit, day and machine it is."
    echo
    for name in figure-{7,8,9,10}{,-shm} figure-11 table-{1,2,3}; do
        [[ -e $out/$name.md ]] && echo "* [$(sed -n '1s/^# //p' "$out/$name.md")](np/$name.md)"
    done
} >docs/np.md
say "written: docs/np.md and $out"
