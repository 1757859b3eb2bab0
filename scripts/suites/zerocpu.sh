#!/usr/bin/env bash
# Reads of resident data cost the server no RPC: its counters do not change while a hundred thousand reads are served.
# usage: zerocpu.sh [shm|tcp|unix|rdma]       CUTTLEFS_ZEROCPU_READS=N: of each of two programs (100000)
source "$(dirname "$0")/lib.sh"
need_command fio
need_command jq
suite_begin zerocpu "${1:-shm}"
needs_server
start_server 512M 192M
mount_fs

# 64 MiB of 192 MiB of frames: everything is resident after it was written and read once.
readonly FILE=hot SIZE_MIB=64 READS=${CUTTLEFS_ZEROCPU_READS:-100000}
fio_hot() { fio --directory="$MNT" --filename=$FILE --size=${SIZE_MIB}M --eta=never --direct=1 "$@"; }
check "write $SIZE_MIB MiB" fio_hot --name=fill --rw=write --bs=1M --end_fsync=1
check "read it once" fio_hot --name=warm --rw=read --bs=1M

# Requests that one run of fio may cost beside its reads: path walks, open and close of each job, the status requests of this script, and a heartbeat
# every 1.25 s.
readonly RPC_ALLOWANCE=60

ticks_of_server() { awk '{print $14 + $15}' "/proc/$SERVER_PID/stat"; }

rpc_before=$(counter rpc_requests) || fail "status has no rpc_requests"
fetch_before=$(counter sparse_fetches) || fail "status has no sparse_fetches"
onesided_before=$(counter onesided_reads "$MNT") || fail "the mount's status has no onesided_reads"
ticks_before=$(ticks_of_server)
((FAILED == 0)) || suite_end

began=$SECONDS
check "$((READS * 2)) random reads of 4 KiB" \
    fio_hot --name=hit --rw=randread --bs=4k --numjobs=2 --number_ios=$READS --io_size=1T --norandommap --time_based=0

allowance=$((RPC_ALLOWANCE + SECONDS - began))
rpc=$(($(counter rpc_requests) - rpc_before))
fetches=$(($(counter sparse_fetches) - fetch_before))
onesided=$(($(counter onesided_reads "$MNT") - onesided_before))
ticks=$(($(ticks_of_server) - ticks_before))
echo "over $LINK: $onesided one-sided reads, $rpc RPCs, $fetches sparse fetches, $ticks ticks of server CPU"

check "at most $allowance RPCs (were $rpc)" test "$rpc" -le "$allowance"
check "no sparse fetch (were $fetches)" test "$fetches" -eq 0
# Direct IO: each read reaches the client, which must do it one-sidedly.
check "every read went one-sidedly (were $onesided)" test "$onesided" -ge $((READS * 2))
if [[ $LINK == shm ]]; then
    # 50 ticks are half a second: for timers, heartbeats and the status requests. Serving the reads would cost more.
    check "no server CPU (were $ticks ticks)" test "$ticks" -le 50
fi
suite_end
