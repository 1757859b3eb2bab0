#!/usr/bin/env bash
# Runs in the guest, for rdma-test.sh: runs the tests over RDMA hardware in these test binaries; `mount` stands for rdma-mount.sh.
# usage: rdma-guest.sh [-l FOLDER] TEST-BINARY...             Last line: N passed, N failed.
#   -l  with the libibverbs of a folder (fetch-verbs.sh); of rdma_semantics only what flushes
set -u
here=$(dirname "$0")
ulimit -l unlimited
start=() flush=
if [[ $1 == -l ]]; then
    start=("$here/with-verbs.sh" "$2") flush=1
    shift 2
fi
passed=0 failed=0
output=$(mktemp)
for binary; do
    began=$SECONDS
    if [[ $binary == mount ]]; then
        "$here/rdma-mount.sh" "$CUTTLEFS_BIN" | tee "$output"
        status=${PIPESTATUS[0]}
        pattern='^([0-9]+) passed, ([0-9]+) failed$'
    else
        echo "== ${binary##*/}"
        # The names of such tests contain `rdma`, except that of the device of persistent memory.
        names=(rdma)
        [[ -n $flush && ${binary##*/} == rdma_semantics-* ]] && names=(flush owners_bytes)
        # One at a time: without KVM two would delay each other.
        ${start[@]+"${start[@]}"} "$binary" --ignored --test-threads 1 "${names[@]}" 2>&1 | tee "$output"
        status=${PIPESTATUS[0]}
        pattern='^test result: [a-zA-Z]+\. ([0-9]+) passed; ([0-9]+) failed;'
    fi
    echo "      ${binary##*/}: $((SECONDS - began)) s"
    of_binary=0
    if [[ $(grep -E "$pattern" "$output" | tail -n 1) =~ $pattern ]]; then
        passed=$((passed + BASH_REMATCH[1])) of_binary=${BASH_REMATCH[2]}
        # None of its tests uses hardware: it was built without the feature.
        ((BASH_REMATCH[1] + BASH_REMATCH[2] > 0)) || of_binary=1
    fi
    ((status == 0 || of_binary > 0)) || of_binary=1
    failed=$((failed + of_binary))
done
# The kernel's messages.
if dmesg | grep -E -A20 'BUG:|WARNING:|Oops|Call Trace'; then
    echo "FAIL  the guest's kernel complained"
    failed=$((failed + 1))
fi
echo "$passed passed, $failed failed"
((failed == 0 && passed > 0))
