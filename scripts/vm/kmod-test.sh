#!/usr/bin/env bash
# Builds kmod-iommu and runs its tests in virtual machines behind an Intel and an AMD IOMMU, with QEMU's edu as the device that does DMA: the module,
# the server's pages behind it, and the server's switch (kmod-tests.sh).
# usage: kmod-test.sh [-k VERSION] [-p "PROGRAM ARGUMENT..."] [intel|amd|intel-scalable]...     without names, the first two (about two minutes each on
#   an idle machine)    -p  instead of all tests a program: `module` is window_test, `bench` window_bench, everything else a command
#   CUTTLEFS_BIN          a folder with cuttlefsd, for the switch (target/release)
#   CUTTLEFS_VM_LIMIT_S   each machine's time (900); `-k debug` takes several times as long as another kernel
# Last line: N passed, N failed.
# Exit status 3: this machine can run no virtual machine.
source "$(dirname "$0")/../env.sh"
set -uo pipefail

version=6.12 program=
while getopts k:p: option; do
    case $option in
        k) version=$OPTARG ;;
        p) program=$OPTARG ;;
        *) die "unknown option; see the head of $0" ;;
    esac
done
shift $((OPTIND - 1))
(($#)) || set -- intel amd
kernel=$("$ROOT/scripts/vm/fetch.sh" --headers "$version") || exit $?
version=${kernel##*/}

# Not in /var/tmp: the guest has its own.
work=$(mktemp -d "${kernel%/*}/kmod.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
"$ROOT/scripts/vm/kmod-build.sh" "$version" "$work" || exit $?
for name in window_test window_bench; do
    cc -O1 -Wall -Wextra -Werror -pthread -o "$work/test/$name" "$work/test/$name.c" || exit 1
done
case $program in
    module) program=("$work/test/window_test") ;;
    bench) program=("$work/test/window_bench") ;;
    ?*) read -r -a program <<<"$program" ;;
    *)
        set_features
        say "building the server's tests"
        # By package, so that cargo builds them as it does for the whole workspace.
        built=$(cd "$ROOT" && cargo test --workspace --locked "${FEATURES[@]}" --lib --no-run --quiet --message-format=json) || die "the tests do not build"
        binary=$(jq -r 'select(.executable != null and .profile.test and (.target.src_path | endswith("/fs-server/src/lib.rs"))) | .executable' <<<"$built")
        [[ -x $binary ]] || die "there is no test of cuttlefs-server"
        program=(bash "$ROOT/scripts/vm/kmod-tests.sh" "$binary")
        # The last part takes an RNIC, and so a kernel with soft-RoCE, which the debug kernel has not.
        if ((!${#FEATURES[@]})); then
            say "without the server's switch: no RDMA libraries; install $(rdma_lacks)"
        elif [[ -z $(find "$kernel/lib/modules/" -name 'rdma_rxe.ko') ]]; then
            say "without the server's switch: kernel $version has no soft-RoCE"
        else
            [[ -x $CUTTLEFS_BIN/cuttlefsd ]] || die "no cuttlefsd in $CUTTLEFS_BIN; build it (cargo build --release) or set CUTTLEFS_BIN"
            program+=("$CUTTLEFS_BIN")
        fi
        ;;
esac

# Some tests cause faults of the device; the guest checks its log itself.
passed=0 failed=0
for name; do
    case $name in
        intel) devices=(-D intel-iommu,intremap=off) arguments="intel_iommu=on" ;;
        intel-scalable) devices=(-D intel-iommu,intremap=off,x-scalable-mode=on) arguments="intel_iommu=on,sm_on" ;;
        amd) devices=(-D amd-iommu) arguments= ;;
        *) die "unknown IOMMU $name; see the head of $0" ;;
    esac
    say "kmod-iommu on $version behind $name"
    "$ROOT/scripts/vm/run.sh" -k "$version" -t "${CUTTLEFS_VM_LIMIT_S:-900}" -m 4096 -M q35,kernel-irqchip=off "${devices[@]}" -D edu,dma_mask=0xffffffff -K "$arguments loglevel=1" -- \
        bash "$ROOT/scripts/vm/kmod-guest.sh" "$work" "${program[@]}" | tee "$work/out-$name"
    status=${PIPESTATUS[0]} of_tests=0
    if [[ $(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$work/out-$name" | tail -n 1) =~ ^([0-9]+)\ passed,\ ([0-9]+) ]]; then
        passed=$((passed + BASH_REMATCH[1])) of_tests=${BASH_REMATCH[2]}
    fi
    # No test failed, but a module could not be removed, the kernel complained, or the machine did not come to the end.
    ((status == 0 || of_tests > 0)) || of_tests=1
    failed=$((failed + of_tests))
done
echo "$passed passed, $failed failed"
((failed == 0))
