#!/usr/bin/env bash
# Runs one command in a virtual machine with a kernel of its own (QEMU without KVM; about 8 s in addition to the command). The guest sees this
# machine's files, read-only with a tmpfs above them; programs of this machine run there unchanged. The exit status is that of the command.
# usage: run.sh [-r] [-l] [-n MIB] [-t SECONDS] [-m MIB] [-c CORES] [-k VERSION] [-K KERNEL-ARGUMENTS] [-M MACHINE] [-D DEVICE]... [-o FOLDER] [--] COMMAND...
#   -r  with an RDMA device: soft-RoCE (rdma_rxe) on a dummy interface, rdma-device.sh says how
#   -l  with a newer libibverbs than this machine's, which knows FLUSH (fetch-verbs.sh): the command is a program
#   -n  with an emulated NVDIMM of so many MiB as /dev/dax0.0 (nvdimm-device.sh)
#   -t  the whole run's limit (300 s)      -m  memory (3072)      -c  cores (2, or $CUTTLEFS_VM_CORES)
#   -k  kernel: 6.12 (unless told otherwise), 7.2, or as fetch.sh names it       -K  more kernel arguments
#   -M  QEMU's machine, for example q35    -D  a device of QEMU, for example edu
#   -o  a folder that the guest can write, at the same path there
# Variables whose names begin with CUTTLEFS_ or RUST_ are passed on, except CUTTLEFS_SUITE_TMP: the guest has its own /tmp and /var/tmp.
# Exit status 3: this machine can run no virtual machine; 124: the time limit was reached.
source "$(dirname "$0")/../env.sh"
set -uo pipefail

limit=300 memory=3072 cores=${CUTTLEFS_VM_CORES:-2} version= arguments= machine=pc out= rdma= nvdimm= verbs=
devices=()
while getopts rln:t:m:c:k:K:M:D:o: option; do
    case $option in
        r) rdma=1 ;;
        l) verbs=1 ;;
        n) nvdimm=$OPTARG ;;
        t) limit=$OPTARG ;;
        m) memory=$OPTARG ;;
        c) cores=$OPTARG ;;
        k) version=$OPTARG ;;
        K) arguments=$OPTARG ;;
        M) machine=$OPTARG ;;
        D) devices+=(-device "$OPTARG") ;;
        o) out=$(readlink -f "$OPTARG") ;;
        *) die "unknown option; see the head of $0" ;;
    esac
done
shift $((OPTIND - 1))
(($#)) || die "no command; see the head of $0"

kernel=$("$ROOT/scripts/vm/fetch.sh" ${version:+"$version"}) || exit $?
if [[ -n $verbs ]]; then
    verbs=$("$ROOT/scripts/vm/fetch-verbs.sh") || exit $?
fi
# Below scripts/test.sh's own directory, so that it finds a machine that an interrupted run left.
work=$(mktemp -d "${CUTTLEFS_SUITE_TMP:-/var/tmp}/cft-vm.XXXXXX") || exit 1
machine_pid=
trap '[[ -z $machine_pid ]] || kill "$machine_pid" 2>/dev/null; rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
[[ -n $out ]] || out=$work/out
mkdir -p "$out" && rm -f "$out/status"
if [[ -n $nvdimm ]]; then
    truncate -s "${nvdimm}M" "$work/nvdimm" || exit 1
    # A memory slot of its own for the NVDIMM, and twice its size, because QEMU aligns it.
    machine+=,nvdimm=on memory+=,slots=2,maxmem=$((memory + 2 * nvdimm))M
    devices+=(-object "memory-backend-file,id=nvdimm,share=on,mem-path=$work/nvdimm,size=${nvdimm}M" -device nvdimm,memdev=nvdimm)
fi
{
    # The variables that the caller has set.
    while IFS= read -r name; do
        printf 'export %s=%q\n' "$name" "${!name}"
    done < <(compgen -e | grep -E '^(CUTTLEFS_|RUST_)' | grep -v '^CUTTLEFS_SUITE_TMP$')
    [[ -n $rdma ]] && printf 'source %q || exit 70\n' "$ROOT/scripts/vm/rdma-device.sh"
    [[ -n $nvdimm ]] && printf 'source %q || exit 70\n' "$ROOT/scripts/vm/nvdimm-device.sh"
    printf 'cd %q || exit 70\n' "$PWD"
    [[ -n $verbs ]] && printf '%q %q ' "$ROOT/scripts/vm/with-verbs.sh" "$verbs"
    printf '%q ' "$@"
    echo
} >"$out/job"
# Line by line, to show the progress of a long run; without the kernel's last words, which it says at any end.
exec {console}> >(sed -u -e 's/\r$//' -e '/^\[ *[0-9.]*\] reboot: Power down$/d')
console_pid=$!
# 9p has no socket files and no room to write: commands write to /tmp.
# -erms: QEMU's `rep movsb` goes byte by byte, and kernel and C library take it for the fastest way to copy if the processor has this flag.
# no_timer_check: on a busy machine the kernel finds that its timer does not tick, and gives up.
timeout -k 5 "$limit" qemu-system-x86_64 -accel tcg,thread=multi -cpu max,-erms -smp "$cores" -m "$memory" -machine "$machine" \
    -nographic -no-reboot -nodefaults -serial stdio \
    -kernel "$kernel"/boot/vmlinuz-* -initrd "$kernel/initrd.cpio" \
    -append "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off no_timer_check kernel=$kernel job=$out/job out=$out $arguments" \
    -fsdev local,id=host,path=/,security_model=none,readonly=on,multidevs=remap -device virtio-9p-pci,fsdev=host,mount_tag=host \
    -fsdev local,id=out,path="$out",security_model=none -device virtio-9p-pci,fsdev=out,mount_tag=out \
    ${devices[@]+"${devices[@]}"} </dev/null >&"$console" &
machine_pid=$!
wait "$machine_pid"
ended=$?
machine_pid=
exec {console}>&-
wait "$console_pid"
((ended == 124 || ended == 137)) && { say "the virtual machine took more than $limit s"; exit 124; }
[[ -e $out/status ]] || die "the virtual machine ended without an answer (QEMU: $ended)"
exit "$(<"$out/status")"
