#!/usr/bin/env bash
# Programs under `cuttlefs preload` read the same bytes as without it, and read them past FUSE: the requests of the mount do not move meanwhile.
# usage: preload.sh [shm|tcp|unix]
source "$(dirname "$0")/lib.sh"
need_command python3
need_command git
need_command jq
suite_begin preload "${1:-shm}"
needs_server
[[ -e $CUTTLEFS_BIN/libcuttlefs_preload.so ]] ||
    die "no libcuttlefs_preload.so in $CUTTLEFS_BIN; build it: cargo build --release -p cuttlefs-preload"
start_server 512M 128M
mount_fs
HERE=$(cd "$(dirname "$0")" && pwd)

# Most checks read what was just written, and so is in the page cache: they are to try the library, over each link.
under() { "$CUTTLEFS_BIN/cuttlefs" preload --cached --mount "$MNT" "$@"; }
# taken LOG: the reads that a report says were taken.
taken() { awk '/ reads taken$/ {print $1}' "$1"; }

head -c 8M /dev/urandom >"$WORK/local"
check "write 8 MiB" cp "$WORK/local" "$MNT/file"

dd_under() { under --report dd if="$MNT/file" of="$WORK/copy" bs="$1" "${@:2}" 2>"$WORK/report.log"; }
check "dd in blocks of 4 KiB" dd_under 4k
check "dd brings the bytes" cmp "$WORK/local" "$WORK/copy"
check "most reads were taken (were $(taken "$WORK/report.log"))" test "$(taken "$WORK/report.log")" -ge 1900

# Without --cached a page comes from where it comes the fastest.
dd_plain() {
    "$CUTTLEFS_BIN/cuttlefs" preload --report --mount "$MNT" dd if="$MNT/file" of="$WORK/copy" bs=4k 2>"$WORK/report.log" &&
        cmp "$WORK/local" "$WORK/copy"
}
cat "$MNT/file" >/dev/null
check "dd of what the page cache has" dd_plain
if [[ $LINK == shm ]]; then
    check "its reads were taken: a copy is faster by either way (were $(taken "$WORK/report.log"))" test "$(taken "$WORK/report.log")" -ge 1900
else
    check "its reads are the page cache's (taken were $(taken "$WORK/report.log"))" test "$(taken "$WORK/report.log")" -eq 0
    check "and the report says why" grep -q "[0-9] *reads left: in the kernel's page cache" "$WORK/report.log"
    # In no order, so that the kernel does not read ahead.
    pages_plain() {
        "$CUTTLEFS_BIN/cuttlefs" preload --report --mount "$MNT" python3 - "$MNT/file" >"$WORK/copy" 2>"$WORK/report.log" <<'PY' && cmp "$WORK/local" "$WORK/copy"
import os, random, sys
file = os.open(sys.argv[1], os.O_RDONLY)
places = list(range(0, os.fstat(file).st_size, 4096))
random.Random(7).shuffle(places)
pages = {place: os.pread(file, 4096, place) for place in places}
sys.stdout.buffer.write(b"".join(pages[place] for place in sorted(pages)))
PY
    }
    dd if="$MNT/file" iflag=nocache count=0 2>/dev/null
    check "pages in no order, which it has not" pages_plain
    check "its reads were taken (were $(taken "$WORK/report.log"))" test "$(taken "$WORK/report.log")" -ge 1000
fi

# The mount's own counts: what is read past FUSE is read by another session. Direct IO leaves nothing to the kernel's page cache.
onesided_before=$(counter onesided_reads "$MNT")
rpc_before=$(counter rpc_requests)
check "dd of direct IO in blocks of 4 KiB" dd_under 4k iflag=direct
check "dd of direct IO brings the bytes" cmp "$WORK/local" "$WORK/copy"
direct=$(taken "$WORK/report.log")
of_mount=$(($(counter onesided_reads "$MNT") - onesided_before))
rpcs=$(($(counter rpc_requests) - rpc_before))
echo "over $LINK: $direct reads taken, $of_mount one-sided reads of the mount, $rpcs RPCs of the server"
check "direct reads were taken (were $direct)" test "$direct" -ge 1900
# The first reads of the file, and pulls of bitmaps.
check "the mount read next to nothing (was $of_mount)" test "$of_mount" -le 100
# Opens, attaches, heartbeats, and the status requests of this script; a thousandth of the reads would be two.
check "the server had next to no requests (were $rpcs)" test "$rpcs" -le 100

check "an odd block size, from within the file" under dd if="$MNT/file" of="$WORK/part" bs=777 skip=3 count=9000
dd if="$WORK/local" of="$WORK/part.local" bs=777 skip=3 count=9000 2>/dev/null
check "its bytes" cmp "$WORK/part" "$WORK/part.local"
check "sha256sum is the same" bash -c "diff <(sha256sum <'$WORK/local') <('$CUTTLEFS_BIN/cuttlefs' preload sha256sum <'$MNT/file')"

check "python: offsets, dup, fork, threads, mappings, own writes, closed descriptors" \
    under --report python3 "$HERE/preload.py" "$MNT" "$WORK/local"

# beside PART TAKEN: other processes of the machine change the file meanwhile, or the program does by a mapping. So many reads have to be taken.
beside() {
    under --report python3 "$HERE/preload.py" "$MNT" "$WORK/local" beside "$1" 2>"$WORK/report.log" || { cat "$WORK/report.log"; return 1; }
    echo "$(taken "$WORK/report.log") reads were taken"
    (($(taken "$WORK/report.log") >= $2))
}
check "another process writes: no read finds bytes of before a write(2) that has returned" beside written 1000
check "another process appends: what it has appended is there" beside appended 500
check "descriptors that are inherited over fork and exec: one offset, and writes of both" beside inherited 2000
check "stores by a mapping that nobody has written back" beside stored 10

if command -v cc >/dev/null && cc -O1 -Wall -pthread -o "$WORK/threads" "$HERE/preload-threads.c"; then
    python3 -c "import array, sys; sys.stdout.buffer.write(array.array('Q', range(1 << 20)).tobytes())" >"$MNT/words"
    check "C: signals and jumps out of their handlers, cancelled threads, a shared offset" under "$WORK/threads" "$MNT/words" "$MNT/tail"
fi

# Another directory as the root, and thus other inode numbers.
mkdir "$MNT/inner" && cp "$WORK/local" "$MNT/inner/file" || fail "cannot copy"
mount_fs "$WORK/sub" subdir=inner
dd_inner() { "$CUTTLEFS_BIN/cuttlefs" preload --cached --mount "$WORK/sub" --report dd if="$WORK/sub/file" of="$WORK/copy" bs=4k 2>"$WORK/report.log"; }
check "dd in a mount of a directory" dd_inner
check "its bytes" cmp "$WORK/local" "$WORK/copy"
check "its reads were taken (were $(taken "$WORK/report.log"))" test "$(taken "$WORK/report.log")" -ge 1900
umount_fs "$WORK/sub"

mount_fs "$WORK/other"
check "files that another mount shortens" under python3 "$HERE/preload.py" "$MNT" "$WORK/local" shortened "$WORK/other"
umount_fs "$WORK/other"
check "a directory that is no mount is refused" bash -c "! '$CUTTLEFS_BIN/cuttlefs' preload --mount '$WORK' true 2>'$WORK/refused' && grep -q 'in no mount of cuttlefs' '$WORK/refused'"

# The library in a program that has more rights than who runs it (which the loader takes from LD_PRELOAD, but programs may be linked with it) does
# nothing that the environment says: it does not count into a file of root's.
cat >"$WORK/reader.c" <<'C'
#include <fcntl.h>
#include <unistd.h>
int main(int count, char **words)
{
	static char bytes[65536];
	int file = open(words[count - 1], O_RDONLY);
	for (int i = 0; i < 100; i++)
		if (pread(file, bytes, sizeof bytes, i % 32 * 65536L) != sizeof bytes) return 1;
	return 0;
}
C
counts_into_root_s() {
    head -c 4096 /dev/zero | tr '\0' A >"$WORK/root-s"
    chmod 600 "$WORK/root-s"
    cp "$WORK/root-s" "$WORK/as-it-was"
    "$@" env CUTTLEFS_PRELOAD="{\"version\":4,\"mounts\":[{$(stat -c '"major":%Hd,"minor":%Ld' "$MNT/file"),\"url\":\"$(server_url)\",\"is_mapped\":false,\"key\":\"$CUTTLEFS_KEY\",\"server_user\":null,\"pool\":\"$(status_json "$MNT" | jq -r .mount.pool_uuid)\",\"subtree\":[]}],\"uid\":0,\"take_cached\":true,\"counts\":\"$WORK/root-s\"}" \
        "$WORK/reader" "$MNT/file" || return 2
    ! cmp -s "$WORK/root-s" "$WORK/as-it-was"
}
if command -v cc >/dev/null && cc -o "$WORK/reader" "$WORK/reader.c" -Wl,--no-as-needed "$CUTTLEFS_BIN/libcuttlefs_preload.so" -Wl,-rpath,"$CUTTLEFS_BIN"; then
    check "a program that is linked with it counts" counts_into_root_s
    chmod 4755 "$WORK/reader"
    not_into_root_s() { counts_into_root_s setpriv --reuid=7 --regid=7 --clear-groups; [[ $? == 1 ]]; }
    check "a set-uid program that is linked with it does not, for another user" not_into_root_s
fi

# The exit code is the program's, and standard input, output and error are its own.
check "exit codes" bash -c "'$CUTTLEFS_BIN/cuttlefs' preload sh -c 'exit 7'; [[ \$? == 7 ]] && { '$CUTTLEFS_BIN/cuttlefs' preload --report sh -c 'kill -9 \$\$' 2>/dev/null; [[ \$? == 137 ]]; }"

# What says to the command that it is to end is the program's, and the report comes all the same.
ended_by_sigterm() {
    "$CUTTLEFS_BIN/cuttlefs" preload --report sleep 600 2>"$WORK/ended.log" &
    for _ in $(seq 100); do pgrep -P $! -x sleep >/dev/null && break; sleep 0.1; done
    kill $!
    wait $!
    [[ $? == 143 ]] && grep -q "programs that loaded the library" "$WORK/ended.log"
}
check "SIGTERM is the program's" ended_by_sigterm

sqlite_under() {
    python3 - "$1" <<'PY'
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
print(connection.execute("select count(*), sum(length(text)), sum(number) from t").fetchall())
print(connection.execute("select number, substr(text, 1, 20) from t where number % 997 = 5 order by text").fetchall())
print(connection.execute("pragma integrity_check").fetchall())
PY
}
sqlite_make() {
    python3 - "$1" <<'PY'
import random, sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("create table t (number integer primary key, text text)")
source = random.Random(5)
rows = ((number, "%x" % source.getrandbits(800)) for number in range(20000))
connection.executemany("insert into t values (?, ?)", rows)
connection.commit()
connection.execute("update t set text = text || 'x' where number % 10 = 3")
connection.execute("delete from t where number % 10 = 7")
connection.commit()
PY
}
export -f sqlite_under sqlite_make
export CUTTLEFS_BIN
check "SQLite writes under it" under bash -c "sqlite_make '$MNT/base'"
check "SQLite writes without it" bash -c "sqlite_make '$WORK/base'"
check "SQLite reads the same" bash -c "diff <(sqlite_under '$WORK/base') <('$CUTTLEFS_BIN/cuttlefs' preload --cached --report bash -c \"sqlite_under '$MNT/base'\" 2>'$WORK/report.log')"
check "SQLite's reads were taken (were $(taken "$WORK/report.log"))" test "$(taken "$WORK/report.log")" -ge 100

# The same transactions and queries on a database in the mount, with and without it: the results are the same to the byte, and so are the files.
database_load() { "$DATABASE_PYTHON" "$HERE/database_load.py" "$1" "$2"; }
export -f database_load
export HERE DATABASE_PYTHON=python3
load_beside() {
    local name=$1 kind=$2
    database_load "$kind" "$MNT/$name.fuse" >"$WORK/$name.fuse" &&
        under --report bash -c "database_load $kind '$MNT/$name.preload'" >"$WORK/$name.preload" 2>"$WORK/report.log" &&
        diff <(grep -v ' a second' "$WORK/$name.fuse") <(grep -v ' a second' "$WORK/$name.preload")
}
rates() {
    echo "$1 over $LINK by FUSE:    $(grep ' a second' "$WORK/$2.fuse")"
    echo "$1 over $LINK by preload: $(grep ' a second' "$WORK/$2.preload"); $(taken "$WORK/report.log") reads taken"
}
check "SQLite does the same transactions and queries with and without it" load_beside load sqlite
rates SQLite load
check "its reads were taken (were $(taken "$WORK/report.log"))" test "$(taken "$WORK/report.log")" -ge 100
check "the database files are the same" cmp "$MNT/load.fuse" "$MNT/load.preload"
# Debian's module is the system's Python's.
for python in python3 /usr/bin/python3; do
    "$python" -c "import plyvel" 2>/dev/null && LEVELS=$python && break
done
if [[ -n ${LEVELS:-} ]]; then
    DATABASE_PYTHON=$LEVELS
    check "LevelDB does the same puts and gets with and without it" load_beside levels leveldb
    rates LevelDB levels
    # It maps its tables. If a later one reads them, docs/native.md and the page of the figures say something else.
    check "its reads are the kernel's, as it maps its tables" test "$(taken "$WORK/report.log")" -eq 0
else
    say "LevelDB: skipped, python3-plyvel is missing; scripts/setup.sh --tests installs it"
fi

git_make() {
    cd "$1" && git init -q repository && cd repository &&
        for number in $(seq 60); do head -c 40000 "$2" | tail -c $((number * 500)) | base64 >"file$number"; done &&
        git add . && git -c user.name=a -c user.email=a@b commit -qm one --date=@1000000000 &&
        for number in $(seq 1 3 60); do echo "$number" >>"file$number"; done &&
        git -c user.name=a -c user.email=a@b commit -qam two --date=@1000000001 && git gc -q
}
git_show() { cd "$1/repository" && git fsck --full 2>&1 && git log -p --format=%s | sha256sum && git status --short; }
export -f git_make git_show
check "git makes a repository under it" under bash -c "git_make '$MNT' '$WORK/local'"
mkdir -p "$WORK/git"
check "git makes one without it" bash -c "git_make '$WORK/git' '$WORK/local'"
check "git reads the same" bash -c "diff <(git_show '$WORK/git') <('$CUTTLEFS_BIN/cuttlefs' preload bash -c \"git_show '$MNT'\")"

# The server goes and comes back beside a program that reads.
under --report python3 "$HERE/preload.py" "$MNT" "$WORK/local" reread "$WORK/begun" >"$WORK/reread.log" 2>&1 &
waiter=$!
for _ in $(seq 600); do
    [[ -e $WORK/begun ]] && break
    sleep 0.1
done
restart_server
wait "$waiter"
status=$?
cat "$WORK/reread.log"
check "the program read the same bytes before, during and after it" test "$status" == 0

# Another pool is served at the address before the program's session is made. Both have a file of the same inode number.
another_pool() {
    local dir=$WORK/pools pid name
    local at=$([[ $LINK == shm ]] && echo shm || echo unix)://$dir/socket
    mkdir -p "$dir/mnt"
    serve() {
        "$CUTTLEFS_BIN/cuttlefsd" serve --pool "$dir/$1" --memory 32M --listen "$at" >>"$dir/log" 2>&1 </dev/null &
        pid=$!
        for _ in $(seq 100); do "$CUTTLEFS_BIN/cuttlefs" status "$at" >/dev/null 2>&1 && return; sleep 0.1; done
        return 1
    }
    for name in other own; do
        "$CUTTLEFS_BIN/cuttlefsd" format --pool "$dir/$name" --size 64M >>"$dir/log" 2>&1 && serve $name || return 1
        "$CUTTLEFS_BIN/cuttlefs" mount "$at" "$dir/mnt" && head -c 800000 < <(yes $name) >"$dir/mnt/file" || return 1
        "$CUTTLEFS_BIN/cuttlefs" umount "$dir/mnt" && end_process "$pid" || return 1
    done
    serve own && "$CUTTLEFS_BIN/cuttlefs" mount "$at" "$dir/mnt" || return 1
    timeout 60 "$CUTTLEFS_BIN/cuttlefs" preload --report --mount "$dir/mnt" python3 - "$dir" >"$dir/found" 2>&1 <<'PYTHON' &
import os, sys, time
file = os.open(sys.argv[1] + "/mnt/file", os.O_RDONLY)
# The first reads of a file are the kernel's: they bring it into the page cache.
own = os.pread(file, 800000, 0)
open(sys.argv[1] + "/begun", "w").close()
while not os.path.exists(sys.argv[1] + "/go"):
    time.sleep(0.05)
wrong = sum(os.pread(file, 4096, at * 4096) != own[at * 4096 :][:4096] for _ in range(3) for at in range(195))
print(f"{wrong} reads of another pool")
sys.exit(wrong > 0 or not own.startswith(b"own"))
PYTHON
    local program=$!
    for _ in $(seq 300); do [[ -e $dir/begun ]] && break; sleep 0.1; done
    end_process "$pid"
    serve other && touch "$dir/go"
    sleep 2
    end_process "$pid"
    serve own
    wait $program
    local status=$?
    cat "$dir/found"
    "$CUTTLEFS_BIN/cuttlefs" umount "$dir/mnt" && end_process "$pid"
    return $status
}
check "no program reads the files of another pool's server" another_pool
suite_end
