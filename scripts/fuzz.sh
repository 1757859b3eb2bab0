#!/usr/bin/env bash
# Runs every fuzz target for a while.
# usage: scripts/fuzz.sh [SECONDS-EACH] [TARGET...]         default: 60 s each
#
# libFuzzer's instrumentation needs flags that stable rustc keeps back. A nightly toolchain is taken if there is
# one; otherwise RUSTC_BOOTSTRAP=1 opens the flags of the stable one.
set -euo pipefail
source "$(dirname "$0")/env.sh"

seconds=${1:-60}
shift $(($# ? 1 : 0))
[[ $seconds =~ ^[0-9]+$ ]] || die "usage: scripts/fuzz.sh [SECONDS-EACH] [TARGET...]"
command -v cargo-fuzz >/dev/null || die "cargo-fuzz is missing: cargo install --locked cargo-fuzz --root $CUTTLEFS_TOOLS"
export RUSTC_BOOTSTRAP=1
# The workspace's target directory holds no sanitised builds.
unset CARGO_TARGET_DIR
cd "$ROOT/fuzz"

targets=("$@")
((${#targets[@]})) || mapfile -t targets < <(cargo fuzz list)
passed=0
failed=0
for target in "${targets[@]}"; do
    cargo fuzz build --sanitizer address "$target" >&2 || { failed=$((failed + 1)); echo "FAIL  fuzz: $target does not build"; continue; }
    mkdir -p "corpus/$target"
    # A parser that needs more than a gigabyte or ten seconds for a message has lost already.
    if cargo fuzz run --sanitizer address "$target" -- -max_total_time="$seconds" -rss_limit_mb=1024 -timeout=10 \
        -max_len=66000 -print_final_stats=1 >"target/$target.log" 2>&1; then
        passed=$((passed + 1))
        echo "ok    fuzz: $target, $(sed -n 's/^stat::number_of_executed_units: *//p' "target/$target.log") inputs in $seconds s"
    else
        failed=$((failed + 1))
        echo "FAIL  fuzz: $target"
        tail -n 40 "target/$target.log"
    fi
done
echo "$passed passed, $failed failed"
((failed == 0))
