#!/usr/bin/env bash
# Everything that can be checked without running the code: format, clippy, licences and banned crates, docs, scripts.
# usage: scripts/check.sh         last line: N passed, N failed
set -uo pipefail
source "$(dirname "$0")/env.sh"
cd "$ROOT" || exit 1

passed=0
failed=0
step() {
    local what=$1 output
    shift
    if output=$("$@" 2>&1); then
        passed=$((passed + 1))
        echo "ok    check: $what"
    else
        failed=$((failed + 1))
        echo "FAIL  check: $what: $*"
        tail -n 60 <<<"$output"
    fi
}

step "format" cargo fmt --all --check
if command -v cargo-deny >/dev/null; then
    step "licences, bans, sources" cargo deny --locked check --hide-inclusion-graph licenses bans sources
    # Advisories come from a git repository; if it cannot be reached, this is reported instead of failing.
    if timeout 20 git ls-remote --exit-code -q https://github.com/RustSec/advisory-db HEAD >/dev/null 2>&1; then
        step "advisories" cargo deny --locked check advisories
    else
        echo "note  check: the advisory database cannot be reached, advisories were not checked"
    fi
else
    echo "note  check: cargo-deny is missing (scripts/setup.sh --tests builds it), licences were not checked"
fi
for script in .ci/run scripts/*.sh scripts/suites/*.sh scripts/vm/*.sh xfstests/*.sh; do
    [[ -e $script ]] || continue
    step "syntax of $script" bash -n "$script"
done
# The programs that they need may not be installed here. So faults are only reported, and the exit status is 0.
check_unit() {
    local directory
    directory=$(mktemp -d) || return 1
    sed 's#^\(Exec[A-Za-z]*\)=[^ ]*#\1=/bin/true#' "$1" >"$directory/${1##*/}"
    ! systemd-analyze verify "$directory/${1##*/}" 2>&1 | grep -F "${1##*/}"
    local status=$?
    rm -r "$directory"
    return $status
}
if command -v systemd-analyze >/dev/null; then
    for unit in scripts/systemd/*.service; do step "unit $unit" check_unit "$unit"; done
fi
if command -v shellcheck >/dev/null; then
    step "shellcheck" shellcheck -x -S warning .ci/run scripts/*.sh scripts/suites/*.sh scripts/vm/*.sh xfstests/*.sh
fi

set_features
step "clippy" cargo clippy --workspace --all-targets --locked --quiet ${FEATURES[@]+"${FEATURES[@]}"} -- -D warnings
if ((${#FEATURES[@]})); then
    # This crate has code for both cases.
    step "clippy without RDMA hardware" cargo clippy -p cuttlefs-common --all-targets --locked --quiet -- -D warnings
else
    echo "note  check: RDMA hardware was not checked (scripts/setup.sh --tests installs its libraries)"
fi
# Includes private items, which are most of them: the readers of these docs work on the code.
step "documentation" env RUSTDOCFLAGS="-D warnings -A rustdoc::private-intra-doc-links" cargo doc --workspace --no-deps --document-private-items --locked --quiet ${FEATURES[@]+"${FEATURES[@]}"}

echo "$passed passed, $failed failed"
((failed == 0))
