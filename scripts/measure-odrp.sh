#!/usr/bin/env bash
# Makes docs/odrp/: figures of the ODRP paper's evaluation (7 to 12) and applications under `cuttlefs swap`, measured here, as tables and plots. Figures
# that are named are made anew, others stay.
# Takes some seven minutes with five rounds. The machine should do nothing else.
# usage: measure-odrp.sh [--seconds N] [--rounds N] [--quick] [FIGURE...]     7 to 12, unix (Figure 10 over a Unix socket), swap (needs root, Linux 6.8)
source "$(dirname "$0")/env.sh"
source "$(dirname "$0")/figures.sh"
cd "$ROOT" || exit 1
set -uo pipefail

seconds=0.5
rounds=5
take_arguments 'seconds rounds' '@(7|8|9|1[0-2]|unix|swap)' "$@"
((${#figures[@]})) || figures=(7 8 9 10 11 12 unix swap)

build_for_figures libraries
in_real_time
out=docs/odrp
work=$(mktemp -d /var/tmp/cft-odrp.XXXX) || exit 1
trap 'rm -rf --one-file-system "$work"' EXIT
trap 'exit 130' INT TERM

common=(--seconds "$seconds" --rounds "$rounds" "${quick[@]}")
for figure in "${figures[@]}"; do
    case $figure in
        unix) run figure-10-unix "Figure 10 over a Unix socket" bench odrp "${common[@]}" --figure 10 --link unix ;;
        swap) run figure-swap "Applications under cuttlefs swap" bench odrp "${common[@]}" --figure swap ;;
        *) run - "Figure $figure" bench odrp "${common[@]}" --figure "$figure" ;;
    esac
done
say "written: $out"
