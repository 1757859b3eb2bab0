#!/usr/bin/env bash
# The server is killed (SIGKILL) while two mounts and native clients work, and started again, several times: everything that was fsynced is there,
# each operation took effect exactly once, clients wait and go on without an error, and space comes back. A copy that is larger than a mount's copies
# of unsynced changes, and that nobody synced, is complete.
# usage: kill.sh [shm|tcp|unix|rdma]      CUTTLEFS_KILL_ROUNDS=N   CUTTLEFS_KILL_SEED=N (drawn and printed)
source "$(dirname "$0")/lib.sh"
need_command sqlite3
suite_begin kill "${1:-shm}"
needs_server
need_command python3
rounds=${CUTTLEFS_KILL_ROUNDS:-5}
seed=${CUTTLEFS_KILL_SEED:-$((RANDOM * 32768 + RANDOM))}
say "seed $seed"
start_server 1G 64M
mount_fs
OTHER=$WORK/other
mount_fs "$OTHER"
once=$(dirname "$0")/once.py

# Appends numbered records to a file, fsyncs each, then notes its number on the local disk: all noted records must survive. Ends when $WORK/stop
# exists; any error ends it with a status.
cat >"$WORK/fsync_writer.py" <<'PYTHON'
import hashlib, os, sys
directory, noted_path, stop = sys.argv[1:]
noted = open(noted_path, "a", buffering=1)
number = 0
while not os.path.exists(stop):
    number += 1
    name = f"{directory}/file-{number % 50:02}"
    body = (hashlib.sha256(str(number).encode()).hexdigest() * (1 + number % 200)).encode()
    fd = os.open(name + ".new", os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
    done = 0
    while done < len(body):
        done += os.write(fd, body[done:])
    os.fsync(fd)
    os.close(fd)
    os.rename(name + ".new", name)
    dirfd = os.open(directory, os.O_RDONLY)
    os.fsync(dirfd)
    os.close(dirfd)
    noted.write(f"{number}\n")
PYTHON

# Every file holds a complete version, and none older than the one that was noted for it.
cat >"$WORK/fsync_check.py" <<'PYTHON'
import hashlib, os, sys
directory, noted_path = sys.argv[1:]
newest = {}
numbers = [int(line) for line in open(noted_path)]
if not numbers:
    sys.exit("the writer noted nothing")
for number in numbers:
    newest[number % 50] = number
last = numbers[-1]
bad = 0
for index, number in newest.items():
    try:
        body = open(f"{directory}/file-{index:02}", "rb").read()
    except OSError as error:
        print(f"file-{index:02}: {error}")
        bad += 1
        continue
    # The noted version, or the one that was being written at the end.
    allowed = [n for n in (number, number + 50) if n <= last + 1]
    if not any(body == (hashlib.sha256(str(n).encode()).hexdigest() * (1 + n % 200)).encode() for n in allowed):
        print(f"file-{index:02}: {len(body)} bytes that are none of versions {allowed}")
        bad += 1
print(f"{len(numbers)} versions noted, {len(newest)} files, {bad} bad")
sys.exit(bad != 0)
PYTHON

# Unsynced work at the same time: a tree is copied, compared and removed in a loop; errors count, waiting does not.
churn() {
    local round=0
    while [[ ! -e $WORK/stop ]]; do
        round=$((round + 1))
        cp -r "$WORK/tree" "$MNT/churn.$round" || return 1
        diff -r "$WORK/tree" "$MNT/churn.$round" || return 1
        rm -r "$MNT/churn.$round" || return 1
    done
    ((round > 0))
}

sqlite_writer() {
    local n=0
    while [[ ! -e $WORK/stop ]]; do
        n=$((n + 1))
        sqlite3 -cmd '.timeout 60000' "$MNT/rows.db" "INSERT INTO rows VALUES ($n, hex(randomblob(500)))" || return 1
        echo "$n" >"$WORK/rows.noted"
    done
}

mkdir "$MNT/synced"
sqlite3 "$MNT/rows.db" 'PRAGMA synchronous=FULL; CREATE TABLE rows (n INTEGER PRIMARY KEY, body TEXT)' || fail "sqlite: create"
touch "$WORK/noted"
python3 "$WORK/fsync_writer.py" "$MNT/synced" "$WORK/noted" "$WORK/stop" >"$WORK/writer.log" 2>&1 &
writer=$!
# A copy, since somebody may be changing the source tree meanwhile.
cp -r "$ROOT/fs-common" "$WORK/tree" || exit 1
churn >"$WORK/churn.log" 2>&1 &
churner=$!
sqlite_writer >"$WORK/sqlite.log" 2>&1 &
rows=$!

# Changes of names, each exactly once: two workers through one mount, one through the other.
declare -A once_pids=()
for worker in 1 2 3; do
    mkdir "$MNT/once$worker"
    at=$MNT
    ((worker == 3)) && at=$OTHER
    python3 "$once" work "$at/once$worker" "$WORK/once$worker" "$WORK/stop" $((seed + worker)) appends \
        >"$WORK/once$worker.log" 2>&1 &
    once_pids[$worker]=$!
done
# The same, and bytes, without a kernel in between: native clients that now and then compare everything they have.
"$CUTTLEFS_BIN/cuttlefs-recordfs" work --endpoint "$(server_url)" --seed "$seed" --signals "$WORK" \
    --appends >"$WORK/native.log" 2>&1 &
native=$!

for ((round = 1; round <= rounds; round++)); do
    sleep "$((RANDOM % 2)).$((RANDOM % 10))"
    before=$(wc -l <"$WORK/noted")
    kill_server
    sleep "0.$((RANDOM % 10))"
    launch_server
    # The writer makes progress: it notes new versions within the lease and some seconds.
    went_on=false
    for ((waited = 0; waited < 600; waited++)); do
        (($(wc -l <"$WORK/noted") > before + 1)) && went_on=true && break
        sleep 0.1
    done
    # Only one line for all rounds, since there may be hundreds.
    $went_on || { fail "kill $round: clients do not go on" && break; }
done
((round > rounds)) && pass "clients went on after each of $rounds kills"

touch "$WORK/stop"
wait "$writer"
check "the fsyncing writer saw no error" test $? -eq 0
wait "$churner"
check "the copying client saw no error" test $? -eq 0
wait "$rows"
check "SQLite saw no error" test $? -eq 0
for worker in "${!once_pids[@]}"; do
    wait "${once_pids[$worker]}"
    check "worker $worker: each name changed once, without an error" test $? -eq 0
done
native_stopped() {
    local waited
    for ((waited = 0; waited < 600; waited++)); do
        [[ -e $WORK/stopped ]] && return 0
        kill -0 "$native" 2>/dev/null || break
        sleep 0.1
    done
    cat "$WORK/native.log"
    return 1
}
check "native clients: everything they did is there once, without an error" native_stopped

# Nothing is synced here: when the server dies, only the mount has the bytes that cp wrote.
head -c 200M /dev/urandom >"$WORK/large"
copies=0
for ((copy = 1; copy <= rounds; copy++)); do
    killed_at=$(((seed + copy * 7919) % 180 + 10))
    cp "$WORK/large" "$MNT/large" &
    copier=$!
    while kill -0 "$copier" 2>/dev/null && (($(stat -c %s "$MNT/large" 2>/dev/null || echo 0) < killed_at << 20)); do
        sleep 0.01
    done
    kill_server
    launch_server
    wait "$copier" || { fail "a copy whose server was killed at $killed_at MiB: cp failed" && break; }
    # Compared with the server's bytes, not with those of the kernel's cache.
    cmp "$WORK/large" <(dd if="$MNT/large" bs=1M iflag=direct status=none) ||
        { fail "a copy whose server was killed at $killed_at MiB has other bytes" && break; }
    rm "$MNT/large"
    copies=$copy
done
((copies == rounds)) && pass "copies of 200 MiB without a sync were whole behind each of $copies kills"

check "what was fsynced is there" python3 "$WORK/fsync_check.py" "$MNT/synced" "$WORK/noted"
# Once more, when nobody writes and no cache can answer.
kill_server
launch_server
touch "$WORK/look-again"
wait "$native"
check "native clients: what was synced is there after another kill" test $? -eq 0
remount_fs && remount_fs "$OTHER"
for worker in "${!once_pids[@]}"; do
    check "worker $worker: its names are there after another kill and a remount" \
        python3 "$once" look "$OTHER/once$worker" "$WORK/once$worker"
done
check "what was fsynced is there after another kill and a remount" \
    python3 "$WORK/fsync_check.py" "$MNT/synced" "$WORK/noted"
database() {
    [[ $(sqlite3 "$MNT/rows.db" 'PRAGMA integrity_check') == ok ]] || return 1
    [[ $(sqlite3 "$MNT/rows.db" 'SELECT count(*) FROM rows') -ge $(cat "$WORK/rows.noted") ]]
}
check "SQLite database is whole and has every committed row" database

# All space comes back: an empty file system is empty, whatever was lost meanwhile.
all_space_back() {
    rm -rf "$MNT"/* || return 1
    # Neither the other mount nor its kernel may keep a file open.
    umount_fs "$OTHER" && restart_all || return 1
    local used
    for _ in $(seq 1 300); do
        used=$(df --output=used -B4096 "$MNT" | tail -1)
        ((used <= 64)) && return 0
        sleep 0.2
    done
    echo "$used pages are still in use on an empty file system"
    return 1
}
check "all space comes back" all_space_back
suite_end
