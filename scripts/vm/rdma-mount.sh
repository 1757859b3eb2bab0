#!/usr/bin/env bash
# Runs in the guest: a server and two mounts over rdma_rxe, as a user runs them, and a third mount over another link. Files are written through one
# mount and compared through the others, also after the server is killed. (Packets are lost in rdma-faults.sh: rdma_rxe sends none between addresses
# of one device.)
# usage: run.sh -r -- rdma-mount.sh FOLDER [ENDPOINT]
#   FOLDER has cuttlefsd and cuttlefs, built with the feature `verbs`. Another endpoint, such as tcp://127.0.0.1:7950, is for comparisons.
set -uo pipefail
programs=$1
work=$(mktemp -d)
endpoint=${2:-rdma://10.9.0.1:7950}
listen=(--listen "$endpoint")
# By GID 2, which is another address of the same device.
named="rdma://0.0.0.0:7952?device=rxe0&gid=2"
other="tcp://127.0.0.1:7951"
[[ $endpoint == rdma://* ]] && listen+=(--listen "$other" --listen "$named")
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
    "$programs/cuttlefsd" serve --pool "$work/pool" --memory 64M "${listen[@]}" --trust-clients >>"$work/server.log" 2>&1 &
    server=$!
    for ((i = 0; i < 300; i++)); do
        # The log has the messages of all servers that were started.
        (($(grep -c ": listening endpoint=$endpoint" "$work/server.log") >= launches)) && return 0
        kill -0 "$server" || return 1
        sleep 0.1
    done
    return 1
}
check "a server listens on $endpoint" serve
mount_at() {
    mkdir -p "$1"
    "$programs/cuttlefs" mount "${2:-$endpoint}" "$1" --key "$work/pool/key" --foreground >>"$work/client.log" 2>&1 &
    for ((i = 0; i < 300; i++)); do
        mountpoint -q "$1" && return 0
        sleep 0.1
    done
    return 1
}
check "a mount" mount_at "$work/one"
check "another" mount_at "$work/two"
cp -r /usr/include/linux "$work/tree"
status_of() { "$programs/cuttlefs" status "$1" --all; }
# Prints a figure of a mount or its server; if both have it, the server's.
figure() { status_of "$1" | sed -n "s/^ *$2: *//p" | tail -n 1; }
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
# Pages that are read again and again are promoted into frames, and then read one-sidedly: the server answers no request for them. Reads the first 64
# pages so many times, and waits a moment behind each time; before the last $2 times and behind them it asks the server (`status` of its endpoint) how
# many requests it has answered, and prints the two numbers, and the seconds between. For a shell of its own.
read_pages() {
    exec python3 - "$1" "$2" "$3" "$programs/cuttlefs" status "$endpoint" --key "$work/pool/key" --json <<'PYTHON'
import mmap, os, re, subprocess, sys, time
file, times, counted = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT), int(sys.argv[2]), int(sys.argv[3])
page = mmap.mmap(-1, 4096)
def answered():
    status = subprocess.run(sys.argv[4:], stdout=subprocess.PIPE, check=True).stdout.decode()
    return int(re.search(r'"rpc_requests": *(\d+)', status).group(1))
for number in range(times):
    if counted and number == times - counted:
        answered()
        began, before = time.monotonic(), answered()
    for place in range(64):
        os.preadv(file, [page], place * 4096)
    time.sleep(0.05)
if counted:
    print(before, answered(), int(time.monotonic() - began) + 1)
PYTHON
}
# Requests that the server may answer beside these reads, in so many seconds: a heartbeat of each of the two mounts every 1.25 s (a quarter of the
# lease), and for what the second `status` and the opening program ask a few. Reads that the server answers would be 64 for each time that the pages are read, or one for each page
# that is not in a frame. A page may have been evicted a moment ago, so the whole is tried several times.
beside_reads() { echo $((2 * ($1 * 4 / 5 + 1) + 8)); }
hot() {
    local tries told before after seconds
    for ((tries = 0; tries < 5; tries++)); do
        told=$(read_pages "$work/two/large" 60 30) && read -r before after seconds <<<"$told" || return 1
        echo "1920 reads of 4 KiB in $seconds s: the server answered $((after - before)) requests, $(beside_reads "$seconds") may be for other things"
        ((after - before <= $(beside_reads "$seconds"))) && cmp -n 262144 "$work/large" "$work/two/large" && return 0
    done
    return 1
}
check "pages that are read again and again are read one-sidedly: the server answers no request for them" hot
sed 's/^/      /' "$work/output"
# The client counts its one-sided reads, and the server pulls the counts once a second, while one program reads all the time.
read_on() { read_pages "$1" 1200 0; }
heard() {
    local before after reader result=1
    before=$(figure "$work/two" 'onesided counted pages') || return 1
    read_on "$work/two/large" &
    reader=$!
    for ((i = 0; i < 60; i++)); do
        after=$(figure "$work/two" 'onesided counted pages')
        ((after - before > 128)) && { result=0; break; }
        sleep 1
    done
    kill "$reader"
    wait "$reader"
    echo "pages that the server has heard of: $before, behind the reads $after"
    return $result
}
check "and the server hears of it" heard
check "its status" status_of "$work/two"
cat "$work/output" >"$work/status"
grep -E -i 'sided|missing|fetch|pages read' "$work/status" | sed 's/^/      /' | head -30

hardware_is_told() {
    local told
    told=$("$programs/cuttlefs" status "$work/two") || return 1
    echo "$told"
    # The server's counters and the mount's.
    (($(grep -c 'rxe0 port 1 (Ethernet), GID 1 ::ffff:10.9.0.1, path MTU 4096' <<<"$told") == 2)) || return 1
    told=$(status_of "$work/two")
    echo "$told"
    (($(grep -c '^ *retry exceeded err: [0-9]' <<<"$told") == 2)) && (($(figure "$work/two" 'pinned bytes') > 64 << 20))
}
by_another_link() {
    mount_at "$work/three" "$other" && diff -r "$work/tree" "$work/three/tree" && cmp "$work/large" "$work/three/large" || return 1
    # In both directions: the server pulls a large write over one RNIC and pushes it over the other.
    head -c 5M /dev/urandom >"$work/three/from-tcp" && cp "$work/three/from-tcp" "$work/from-tcp" && cmp "$work/from-tcp" "$work/one/from-tcp" || return 1
    head -c 5M /dev/urandom >"$work/two/from-rdma" && cp "$work/two/from-rdma" "$work/from-rdma" && cmp "$work/from-rdma" "$work/three/from-rdma"
}
by_a_named_gid() {
    mount_at "$work/four" "rdma://10.9.0.2:7952?device=rxe0&gid=2" && cmp "$work/large" "$work/four/large" || return 1
    "$programs/cuttlefs" status "$work/four"
    "$programs/cuttlefs" status "$work/four" | grep -q 'its RNIC .*GID 2 ::ffff:10.9.0.2' || return 1
    timeout 30 umount "$work/four" || return 1
    # A device that does not exist is reported.
    "$programs/cuttlefs" status "rdma://10.9.0.2:7952?device=rxe7" --key "$work/pool/key" >"$work/refused" 2>&1 && return 1
    grep 'there is no RDMA device rxe7 here; there are rxe0' "$work/refused"
}
if [[ $endpoint == rdma://* ]]; then
    check "both sides' devices are told" hardware_is_told
    check "a mount of the same server by tcp:// sees the same, and others see its files" by_another_link
    check "a device and its GID can be named" by_a_named_gid
fi

again_after_a_kill() {
    kill -9 "$server"
    wait "$server"
    serve && echo more >>"$work/one/tree/types.h" && echo more >>"$work/tree/types.h" && diff -r "$work/tree" "$work/two/tree"
}
check "the server is killed and started again: mounts go on" again_after_a_kill
if ((failed)); then
    for log in server client; do
        echo "---- $log"
        tail -n 30 "$work/$log.log"
    done
fi
stop() {
    for mounted in one two three; do
        ! mountpoint -q "$work/$mounted" || timeout 30 umount "$work/$mounted" || return 1
    done
    kill "$server" && wait "$server"
}
check "all ends" stop
check "the pool is sound" "$programs/cuttlefsd" fsck --pool "$work/pool"
# This is the last check: rdma_rxe's connection manager may never answer again once its interface went down (6.12: its queue pair 1). A client that
# connects then is told so at its deadline.
no_answer_is_said() {
    serve && mount_at "$work/five" || return 1
    dd if=/dev/zero of="$work/five/during" bs=64k count=300 status=none &
    sleep 0.3
    ip link set rnic0 down
    sleep 5
    ip link set rnic0 up
    local ended
    timeout 120 "$programs/cuttlefs" status "$endpoint" --key "$work/pool/key" >"$work/said" 2>&1
    ended=$?
    cat "$work/said"
    # The server answers, or the client reports that it does not.
    ((ended == 0)) || { ((ended != 124)) && grep -q 'no answer came in time\|no way there was found in time' "$work/said"; }
}
# Only on request: after it the kernel may never release the connections in its connection manager, and the machine may not turn itself off.
if [[ $endpoint == rdma://* && -n ${CUTTLEFS_RDMA_DOWN:-} ]]; then
    check "an interface goes down: a client that connects then is answered, or told that nothing came" no_answer_is_said
    "$programs/cuttlefs" umount -f "$work/five" >/dev/null 2>&1
    kill -9 "$server"
fi
echo "$passed passed, $failed failed"
exit $((failed > 0))
