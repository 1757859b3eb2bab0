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

# run NAME TITLE COMMAND...: a page with the command's tables and plot. Where NAME is `-` one for each of the paper's figures that it makes.
run() {
    local as=$1 what=$2 text name title kind
    shift 2
    say "$what"
    mkdir -p "$out"
    if ! "$bench" "$@" --scratch "$work" --out "$work/out" >"$work/table" 2>"$work/progress"; then
        tail -n 5 "$work/progress" >&2
        die "$what failed"
    fi
    for text in "$work"/out/*.txt; do
        name=$as title=$what
        if [[ $as == - ]]; then
            name=$(basename "$text" .txt)
            name=${name#rpc-}
            title="Figure ${name#figure-}"
        fi
        {
            echo "# $title"
            echo
            # shellcheck disable=SC2016
            printf '`cuttlefs %s`, commit %s, %s\n\n```\n' "${*//${loop:-no loop device}/DEVICE}" "$commit" "$(date -u +%Y-%m-%d)"
            cat "$text"
            printf '```\n\n![%s](%s.svg)\n' "$title" "$name"
        } >"$out/$name.md"
        for kind in svg json; do
            mv "${text%.txt}.$kind" "$out/$name.$kind"
        done
        # Where the pool was is of no interest.
        sed -i -e "s#$work/disk#FILE#g" "$out/$name".{md,svg,json}
    done
    cat "$work/table"
    rm -rf "$work/out"
}
