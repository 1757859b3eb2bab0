# shellcheck shell=bash
# What scripts that make pages of figures share; for `source`, behind env.sh. Who uses it sets `out`, the pages' directory, and `work`, one for
# what is made on the way.

# Programs are of this tree: built now, so that the commit on each page is theirs.
build_for_figures() {
    set_features
    cargo build --release --workspace --bins --quiet ${FEATURES[@]+"${FEATURES[@]}"} || die "the programs do not build"
    commit=$(git rev-parse --short HEAD)
    # Pages that this makes change no program.
    git diff --quiet HEAD -- . ':!docs' || commit+=-dirty
    bench=$CUTTLEFS_BIN/cuttlefs
}

# run NAME TITLE COMMAND...: a page with its tables and plot.
run() {
    local name=$1 title=$2 kind file
    shift 2
    say "$title"
    mkdir -p "$out"
    {
        echo "# $title"
        echo
        # shellcheck disable=SC2016
        printf '`cuttlefs %s`, commit %s, %s\n\n```\n' "${*//${loop:-no loop device}/DEVICE}" "$commit" "$(date -u +%Y-%m-%d)"
    } >"$out/$name.md"
    if ! "$bench" "$@" --scratch "$work" --out "$work/out" 2>"$work/progress" | grep -v '^written:' >"$work/table"; then
        tail -n 5 "$work/progress" >&2
        die "$title failed"
    fi
    cat "$work/table"
    cat "$work/table" >>"$out/$name.md"
    echo '```' >>"$out/$name.md"
    for kind in svg json; do
        for file in "$work"/out/*."$kind"; do
            [[ -e $file ]] || continue
            # Where the pool was is of no interest.
            sed -i -e "s#$work/disk#FILE#g" "$file" "$out/$name.md"
            mv "$file" "$out/$name.$kind"
            [[ $kind == svg ]] && printf '\n![%s](%s.svg)\n' "$title" "$name" >>"$out/$name.md"
        done
    done
    rm -rf "$work/out"
}
