#!/usr/bin/env bash
# Makes docs/filemr/: Figures 2 and 6 to 10 of the FileMR paper, and the file server's translation beside the paper's, measured here, as tables and plots.
# Figures that are named are made anew, others stay. 7 and 8 are made together.
# Takes some ten minutes with five rounds. The machine should do nothing else. It takes 2 GiB of disk and up to 6 GiB of memory.
# usage: measure-filemr.sh [--seconds N] [--rounds N] [--quick] [FIGURE...]     2, 6, 7, 8, 9, 10, translation, unix (Figures 9 and 10 over a Unix socket)
source "$(dirname "$0")/env.sh"
source "$(dirname "$0")/figures.sh"
cd "$ROOT" || exit 1
set -uo pipefail

seconds=0.5
rounds=5
take_arguments 'seconds rounds' '@(2|[6-9]|10|translation|unix)' "$@"
((${#figures[@]})) || figures=(2 6 7 9 10 translation unix)

build_for_figures
out=docs/filemr
work=$(mktemp -d /var/tmp/cft-filemr.XXXX) || exit 1
trap 'rm -rf --one-file-system "$work"' EXIT
trap 'exit 130' INT TERM

common=(--seconds "$seconds" --rounds "$rounds" "${quick[@]}")
for figure in "${figures[@]}"; do
    case $figure in
        7 | 8) run - "Figures 7 and 8" bench filemr "${common[@]}" --figure 7,8 ;;
        translation) run translation "The file server's translation" bench filemr "${common[@]}" --figure translation ;;
        unix)
            for each in 9 10; do
                run "figure-$each-unix" "Figure $each over a Unix socket" bench filemr "${common[@]}" --figure "$each" --link unix
            done
            ;;
        *) run - "Figure $figure" bench filemr "${common[@]}" --figure "$figure" ;;
    esac
done
say "written: $out"
