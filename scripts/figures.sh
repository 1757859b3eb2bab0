# shellcheck shell=bash
# Shared by the scripts that make pages of figures; for `source`, after env.sh. The script sets `out`, the directory of the pages, and `work`, one for
# temporary files; and may set `under`, the command that the benchmark runs under.
under=()

# Has the benchmarks run under real-time priority, where that may be had: one thread of somebody else's in between decides about a run of milliseconds.
in_real_time() { chrt -f 1 true 2>/dev/null && under=(chrt -f 1); }

# build_for_figures [libraries]: builds the programs from this tree, so that the commit on each page is theirs; and, if so asked, the libraries that programs
# load. It is one build of the whole workspace: of single packages cargo would build the crates that they share once more, with fewer features.
build_for_figures() {
    local kinds=(--bins)
    [[ ${1:-} != libraries ]] || kinds+=(--lib)
    set_features
    cargo build --release --workspace "${kinds[@]}" --quiet ${FEATURES[@]+"${FEATURES[@]}"} || die "the programs do not build"
    commit=$(git rev-parse --short HEAD)
    # The pages that this makes are not part of any program.
    git diff --quiet HEAD -- . ':!docs' || commit+=-dirty
    bench=$CUTTLEFS_BIN/cuttlefs
}

# run NAME TITLE COMMAND...: makes a page with the command's tables and plot. If NAME is `-`, it makes one for each of the paper's figures that the
# command runs.
run() {
    local as=$1 what=$2 text name title kind
    shift 2
    say "$what"
    mkdir -p "$out"
    if ! ${under[@]+"${under[@]}"} "$bench" "$@" --scratch "$work" --out "$work/out" >"$work/table" 2>"$work/progress"; then
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
            printf '`%scuttlefs %s`, commit %s, %s\n\n```\n' "${under[*]+${under[*]} }" "${*//${loop:-no loop device}/DEVICE}" "$commit" "$(date -u +%Y-%m-%d)"
            cat "$text"
            printf '```\n\n![%s](%s.svg)\n' "$title" "$name"
        } >"$out/$name.md"
        for kind in svg json; do
            mv "${text%.txt}.$kind" "$out/$name.$kind"
        done
        # The path of the pool is of no interest.
        sed -i -e "s#$work/disk#FILE#g" "$out/$name".{md,svg,json}
    done
    cat "$work/table"
    rm -rf "$work/out"
}

# take_arguments NUMBERS PATTERN ARGUMENT...: sets the variables of the options in NUMBERS (such as `seconds rounds`) that are given, quick (an array:
# --quick or nothing) and figures, those that are named. PATTERN is what names a figure, as of [[ == ]].
take_arguments() {
    local numbers=" $1 " pattern=$2
    shift 2
    quick=() figures=()
    while (($#)); do
        case $1 in
            --quick) quick=(--quick) ;;
            --*)
                [[ $numbers == *" ${1#--} "* ]] || die "unknown argument $1; see the head of $0"
                declare -g "${1#--}=$2"
                shift
                ;;
            # shellcheck disable=SC2053
            *) [[ $1 == $pattern ]] && figures+=("$1") || die "unknown argument $1; see the head of $0" ;;
        esac
        shift
    done
}
