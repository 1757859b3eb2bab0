#!/usr/bin/env bash
# Runs in the guest, in kmod-guest.sh: all tests of kmod-iommu, one part after the other: the module (window_test), the server's pages behind it
# (pages/window/tests/edu.rs), and what `cuttlefsd serve --page-window iommu` refuses (iommu-switch.sh).
# usage: kmod-tests.sh SERVER-TEST-BINARY [FOLDER-OF-CUTTLEFSD]     $KMOD_FOLDER has the modules and window_test; without the folder, not the last part
# Last line: N passed, N failed.
set -u
here=$(dirname "$0")
output=$(mktemp)
passed=0 failed=0
# part NAME PATTERN COMMAND...: adds up what the last line says that has the pattern.
part() {
    local name=$1 pattern=$2 began=$SECONDS status of_part=0
    shift 2
    echo "== $name"
    "$@" 2>&1 | tee "$output"
    status=${PIPESTATUS[0]}
    if [[ $(grep -E "$pattern" "$output" | tail -n 1) =~ $pattern ]]; then
        passed=$((passed + BASH_REMATCH[1])) of_part=${BASH_REMATCH[2]}
        # No test was there to run.
        ((BASH_REMATCH[1] + BASH_REMATCH[2] > 0)) || of_part=1
    fi
    ((status == 0 || of_part > 0)) || of_part=1
    failed=$((failed + of_part))
    echo "      $name: $((SECONDS - began)) s"
}
part "the module" '^([0-9]+) passed, ([0-9]+) failed$' "$KMOD_FOLDER/test/window_test"
# One at a time: they share the device.
part "the server's pages" '^test result: [a-zA-Z]+\. ([0-9]+) passed; ([0-9]+) failed;' \
    "$1" pages::window::tests::edu --ignored --test-threads 1 --nocapture
(($# > 1)) && part "the switch" '^([0-9]+) passed, ([0-9]+) failed$' bash "$here/iommu-switch.sh" "$2"
echo "$passed passed, $failed failed"
((failed == 0))
