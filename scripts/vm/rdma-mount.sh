#!/usr/bin/env bash
# In the guest: a server and two mounts over rdma_rxe, as a user has them. Files go through one mount and are compared through the other, behind
# a killed server and lost packets, too.
# usage: run.sh -r -- rdma-mount.sh FOLDER [ENDPOINT]
#   FOLDER has cuttlefsd and cuttlefs, built with the feature `verbs`. Another endpoint, as tcp://127.0.0.1:7950, is for a comparison on any machine.
set -uo pipefail
programs=$1
work=$(mktemp -d)
endpoint=${2:-rdma://10.9.0.1:7950}
passed=0 failed=0
check() {
    local what=$1 begin=$SECONDS
    shift
    if "$@" >"$work/output" 2>&1; then
        passed=$((passed + 1))
        echo "ok    $what ($((SECONDS - begin)) s)"
    else
        failed=$((failed + 1))
        echo "FAIL  $what"
        head -n 20 "$work/output"
    fi
}

ulimit -l unlimited
modprobe fuse 2>/dev/null
"$programs/cuttlefsd" format --pool "$work/pool" --size 256M >"$work/format.log" 2>&1 || { cat "$work/format.log"; exit 1; }
launches=0
serve() {
    launches=$((launches + 1))
    "$programs/cuttlefsd" serve --pool "$work/pool" --memory 64M --listen "$endpoint" --trust-clients >>"$work/server.log" 2>&1 &
    server=$!
    for ((i = 0; i < 300; i++)); do
        # The log is of all that were started.
        (($(grep -c ': listening endpoint=' "$work/server.log") >= launches)) && return 0
        kill -0 "$server" || return 1
        sleep 0.1
    done
    return 1
}
check "a server listens on $endpoint" serve
mount_at() {
    mkdir -p "$1"
    "$programs/cuttlefs" mount "$endpoint" "$1" --key "$work/pool/key" --foreground >>"$work/client.log" 2>&1 &
    for ((i = 0; i < 300; i++)); do
        mountpoint -q "$1" && return 0
        sleep 0.1
    done
    return 1
}
check "a mount" mount_at "$work/one"
check "another" mount_at "$work/two"
cp -r /usr/include/linux "$work/tree"
copy() { cp -r "$work/tree" "$work/one/tree" && sync -f "$work/one"; }
check "a tree of $(find "$work/tree" -type f | wc -l) files is copied" copy
check "and is the same through the other mount" diff -r "$work/tree" "$work/two/tree"
head -c 100M /dev/urandom >"$work/large"
large() { cp "$work/large" "$work/one/large" && sync -f "$work/one"; }
check "a file that is larger than the server's memory is written" large
check "and read" cmp "$work/large" "$work/two/large"
again() { echo 3 >/proc/sys/vm/drop_caches && cmp "$work/large" "$work/two/large"; }
check "and read again" again
direct() { dd if="$work/two/large" of=/dev/null bs=4k count=2000 iflag=direct; }
check "in pieces of 4 KiB past the page cache" direct
# Pages that are read again and again come into frames, and are read one-sidedly then: the client fetches hardly any.
fetches() { "$programs/cuttlefs" status "$work/two" --all | sed -n 's/^ *sparse fetches: *//p' | head -n 1; }
read_often() {
    for ((round = 0; round < $1; round++)); do
        dd if="$work/two/large" of=/dev/null bs=4k count=64 iflag=direct status=none || return 1
        sleep 0.1
    done
}
hot() {
    local before after
    read_often 30 && before=$(fetches) && read_often 10 && after=$(fetches)
    echo "fetches: $before, 640 reads of 4 KiB later $after"
    cmp -n 262144 "$work/large" "$work/two/large" && ((after - before < 64))
}
check "pages that are read again and again are read one-sidedly" hot
status() { "$programs/cuttlefs" status "$work/two" --all 2>/dev/null || "$programs/cuttlefs" status "$work/two"; }
check "its status" status
status >"$work/status"
grep -E -i 'sided|rdma|missing|fetch|pages read' "$work/status" | sed 's/^/      /' | head -30

again_after_a_kill() {
    kill -9 "$server"
    wait "$server"
    serve && echo more >>"$work/one/tree/types.h" && echo more >>"$work/tree/types.h" && diff -r "$work/tree" "$work/two/tree"
}
check "the server is killed and started again: mounts go on" again_after_a_kill
# Packets between addresses of one machine go through lo. Taking the interface down instead leaves rdma_rxe's connection manager in error
# for good (6.12: its queue pair 1), so that nobody connects any more.
lossy() {
    local percent=$1
    shift
    modprobe sch_netem && tc qdisc add dev lo root netem loss "$percent%" || return 1
    "$@"
    local result=$?
    tc qdisc del dev lo root
    return $result
}
some_get_lost() {
    lossy 1 timeout 100 cp -r "$work/tree" "$work/one/copy" && diff -r "$work/tree" "$work/two/copy"
}
all_get_lost() {
    lossy 100 sleep 20
    echo 3 >/proc/sys/vm/drop_caches
    timeout 100 cmp "$work/large" "$work/one/large" && timeout 100 cmp "$work/large" "$work/two/large"
}
if [[ $endpoint == rdma://* ]]; then
    check "one packet in a hundred is lost: files are whole" some_get_lost
    check "all are lost for 20 s: mounts go on" all_get_lost
fi
if ((failed)); then
    for log in server client; do
        echo "---- $log"
        tail -n 30 "$work/$log.log"
    done
fi
stop() { timeout 30 umount "$work/one" && timeout 30 umount "$work/two" && kill "$server" && wait "$server"; }
check "all ends" stop
check "the pool is sound" "$programs/cuttlefsd" fsck --pool "$work/pool"
echo "$passed passed, $failed failed"
exit $((failed > 0))
