#!/usr/bin/env bash
# Runs in the guest, for rdma-suites.sh: a mount over soft-RoCE reads pages that move all the time, while the network makes late answers of the answers
# to its READs (rdma-liar.c). Each block that is read is compared (rdma-liar.py). docs/pages.md says why no wrong one can be accepted.
# usage: rdma-liar.sh      CUTTLEFS_LIAR_S=N: how long (60 s)   CUTTLEFS_LIAR_SEED=N: chance (1)         last line: N passed, N failed
#                          CUTTLEFS_PAGE_WINDOW=odp: the mounts read pages in the window of pages (on a 7.2 kernel)
here=$(cd "$(dirname "$0")" && pwd)
export CUTTLEFS_RDMA_ADDRESS=10.9.0.1
source "$here/rdma-pair.sh" || exit 70
source "$here/../suites/lib.sh"
need_command cc
need_command python3
suite_begin liar rdma
seconds=${CUTTLEFS_LIAR_S:-60} seed=${CUTTLEFS_LIAR_SEED:-1}
cc -O1 -Wall -Wextra -Werror -o "$WORK/network" "$here/rdma-liar.c" || exit 70
ping -c 3 -W 5 10.9.0.1 >/dev/null 2>&1
start_server 64M 4M
mount_fs
WRITING=$WORK/writing
mount_fs "$WRITING"

# Takes the switch away, and puts the other network there. One answer in twelve is lost.
ip link set switch0 down
for end in 0 1; do ip link set "port$end" nomaster; done
"$WORK/network" port0 port1 12 "$seed" >"$WORK/answers" &
network=$!
check "no block that is read is wrong" python3 "$here/rdma-liar.py" "$WRITING" "$MNT" "$seconds" "$seed"
tail -n 1 "$WORK/check.out"
kill "$network"
wait "$network"
for end in 0 1; do ip link set "port$end" master switch0; done
ip link set switch0 up
tail -n 1 "$WORK/answers"

# Without these nothing was tried.
read -r _ _ _ lost _ again _ late _ _ <"$WORK/answers"
check "answers were lost, and sent again" test "${again:-0}" -ge $((seconds / 2))
check "and others came late" test "${late:-0}" -ge $((seconds / 2))
reads=$(counter onesided_reads "$MNT")
check "the mount read one-sidedly" test "${reads:-0}" -ge $((seconds / 2))
if [[ ${CUTTLEFS_PAGE_WINDOW:-} == odp ]]; then
    pages=$(counter window_pages "$MNT")
    check "and in the window of pages (${pages:-0} pages)" test "${pages:-0}" -ge $((seconds / 2))
fi
say "$reads one-sided reads; answers: ${lost:-0} lost, ${again:-0} sent again, ${late:-0} late"
umount_fs "$WRITING"
umount_fs
stop_server
check "the pool is sound" "$CUTTLEFS_BIN/cuttlefsd" fsck --pool "$POOL"
suite_end
