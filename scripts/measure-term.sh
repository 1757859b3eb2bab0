#!/usr/bin/env bash
# Makes docs/term.md and docs/term/: every figure of the TeRM paper's evaluation, measured here, as tables and plots.
# Figures that are named are made anew, others stay.
# Takes about an hour with five rounds. The machine should do nothing else.
# usage: measure-term.sh [--size SIZE] [--seconds N] [--warmup N] [--rounds N] [--quick] [FIGURE...]     8 to 15, octopus, kv, ram, links
#   Without figures, all of them. `ram` and Figure 15 take a loop device over a tmpfs, a stand-in for a fast SSD: root.
source "$(dirname "$0")/env.sh"
source "$(dirname "$0")/figures.sh"
cd "$ROOT" || exit 1
set -uo pipefail

size=256M
seconds=0.5
warmup=1
rounds=5
take_arguments 'size seconds warmup rounds' '@(8|9|1[0-5]|octopus|kv|ram|links)' "$@"
((${#figures[@]})) || figures=(links 8 9 10 11 12 13 14 15 octopus kv ram)

build_for_figures
out=docs/term
work=$(mktemp -d /var/tmp/cft-term.XXXX) || exit 1
loop=
clean_up() {
    [[ -n $loop ]] && losetup -d "$loop"
    mountpoint -q "$work/ram" && umount "$work/ram"
    rm -rf --one-file-system "$work"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

# A block device in RAM, a quarter larger than the data.
ram_device() {
    [[ -n $loop ]] && return 0
    local bytes
    bytes=$(($(numfmt --from=iec "$size") * 5 / 4))
    mkdir -p "$work/ram" && mount -t tmpfs -o size=$((bytes + (64 << 20))) tmpfs "$work/ram" || return 1
    truncate -s "$bytes" "$work/ram/disk" || return 1
    loop=$(losetup -f --show "$work/ram/disk")
}

common=(--size "$size" --seconds "$seconds" --warmup "$warmup" --rounds "$rounds" "${quick[@]}")
# Figures with few points get longer to settle.
settled=(--size "$size" --seconds 1 --warmup 4 --rounds "$rounds" "${quick[@]}")
# These use one pool and run together, so that their common parts are measured once.
together=()
for figure in "${figures[@]}"; do
    [[ $figure == [89] || $figure == 1[0234] ]] && together+=("$figure")
done
if ((${#together[@]})); then
    list=$(IFS=, && echo "${together[*]}")
    run - "Figures $list" bench region "${common[@]}" --figure "$list"
fi
for figure in "${figures[@]}"; do
    case $figure in
        links)
            run link-tcp "4 KiB reads over tcp, settled" bench region "${settled[@]}" --policy pin,term,term-units,hotspot,odp,odp-hardware,rpc --dram 50
            run link-shm "4 KiB reads over shm, settled" bench region "${settled[@]}" --policy pin,term,term-units,rpc --dram 50 --link shm
            ;;
        ram)
            ram_device || die "a loop device over a tmpfs needs root"
            run ram "A RAM-backed block device in place of the SSD" bench region "${settled[@]}" --policy pin,term,rpc --dram 50 --value-size 4K,16K --data "$loop"
            ;;
        15)
            ram_device || die "a loop device over a tmpfs needs root"
            run figure-15 "Figure 15: devices (a file on this disk, RAM)" bench region "${common[@]}" --figure 15 --data "$work/disk,$loop"
            ;;
        # Fifteen seconds before and after the change.
        11) run - "Figure 11" bench region --size "$size" --seconds 30 --warmup "$warmup" --rounds "$rounds" --figure 11 "${quick[@]}" ;;
        octopus) run figure-16 "Figure 16: Octopus" bench octopus "${common[@]}" ;;
        kv) run figure-17 "Figure 17: a key-value table" bench kv "${common[@]}" ;;
    esac
done

{
    echo "# Data larger than memory, as the TeRM paper measures it"
    echo
    echo "Made by \`scripts/measure-term.sh\`; what the figures mean stands in [benchmarks.md](benchmarks.md). Each page says of which commit, day and machine it is."
    echo
    for name in link-tcp link-shm ram figure-{8,9,10,11,12,13,14,15,16,17}; do
        [[ -e $out/$name.md ]] && echo "* [$(sed -n '1s/^# //p' "$out/$name.md")](term/$name.md)"
    done
} >docs/term.md
say "written: docs/term.md and $out"
