#!/usr/bin/env bash
# Runs every fuzz target for some time.
# usage: scripts/fuzz.sh [SECONDS-EACH] [TARGET...]         default: 60 s each
#
# The target `sessions` is fs-client's test wire_sessions: hostile peers of a real server, and a model of sessions. It needs root but no
# instrumentation. It runs like the tests, half of the time with durable answers and half without.
#
# libFuzzer's instrumentation needs unstable flags of rustc. A nightly toolchain is used if there is one; otherwise RUSTC_BOOTSTRAP=1 allows the flags
# in the stable one.
set -euo pipefail
source "$(dirname "$0")/env.sh"

seconds=${1:-60}
shift $(($# ? 1 : 0))
[[ $seconds =~ ^[0-9]+$ ]] || die "usage: scripts/fuzz.sh [SECONDS-EACH] [TARGET...]"

fuzz_sessions() {
    local log="$ROOT/target/fuzz-sessions.log"
    if (cd "$ROOT" && CUTTLEFS_SESSIONS_SECONDS=$((seconds / 2)) cargo test --quiet -p cuttlefs-client --test wire_sessions \
        -- --nocapture --test-threads=1) >"$log" 2>&1; then
        echo "ok    fuzz: sessions, $(awk '/^hostile_peers.*episodes/ { for (at = 1; at <= NF; at++) if ($at == "episodes") sum += $(at - 1) } END { print sum }' "$log") episodes in $seconds s"
    else
        echo "FAIL  fuzz: sessions"
        grep -v '^  *[0-9]*: \|^  *at ' "$log" | tail -n 40
        return 1
    fi
}

if [[ ${1-} == sessions && $# == 1 ]]; then
    fuzz_sessions
    exit
fi
command -v cargo-fuzz >/dev/null || die "cargo-fuzz is missing: cargo install --locked cargo-fuzz --root $CUTTLEFS_TOOLS"
targets=("$@")
passed=0
failed=0
if ((${#targets[@]} == 0)) || [[ " ${targets[*]} " == *" sessions "* ]]; then
    if fuzz_sessions; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
fi
export RUSTC_BOOTSTRAP=1
# Not the workspace's target directory, which should hold no sanitised builds.
unset CARGO_TARGET_DIR
cd "$ROOT/fuzz"

((${#targets[@]})) || mapfile -t targets < <(cargo fuzz list)
for target in "${targets[@]}"; do
    [[ $target == sessions ]] && continue
    cargo fuzz build --sanitizer address "$target" >&2 || { failed=$((failed + 1)); echo "FAIL  fuzz: $target does not build"; continue; }
    mkdir -p "corpus/$target"
    lengths=(-max_len=66000)
    # Its bytes are many steps, of which each takes time: it would hardly get past the short inputs that libFuzzer begins with.
    [[ $target == np_target ]] && lengths=(-max_len=2000 -len_control=0)
    # A parser must not need more than a gigabyte or ten seconds for a message.
    if cargo fuzz run --sanitizer address "$target" -- -max_total_time="$seconds" -rss_limit_mb=1024 -timeout=10 \
        "${lengths[@]}" -print_final_stats=1 >"target/$target.log" 2>&1; then
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
