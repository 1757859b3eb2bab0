#!/usr/bin/env bash
# Mounts in daily use: options, rules of an export, a server that is away.
# usage: mounts.sh [shm|tcp|unix]
source "$(dirname "$0")/lib.sh"
need_command jq
suite_begin mounts "${1:-shm}"
needs_server
[[ $(id -u) == 0 ]] || die "root squash can be tested by root only"
start_server 256M 32M
mount_fs
readonly OTHER=$WORK/other

# refused WORDS COMMAND...: succeeds if the command fails and prints these words.
refused() {
    local words=$1 said
    shift
    said=$("$@" 2>&1) && {
        echo "succeeded: $*"
        return 1
    }
    [[ $said == *"$words"* ]] || {
        echo "said: $said"
        return 1
    }
}
cuttlefs() { "$CUTTLEFS_BIN/cuttlefs" "$@"; }

# export_as SED-SCRIPT: restarts the server with a changed configuration of its export.
export_as() {
    umount_fs && stop_server && sed -i "$1" "$POOL/cuttlefs.toml" && launch_server && mount_fs
}

mkdir -p "$MNT/a/b" "$MNT/open" && chmod 777 "$MNT/open" && mkdir -m 1777 "$MNT/sticky" || exit 1
echo deep >"$MNT/a/b/f" && echo root >"$MNT/sticky/f" && chmod 700 "$MNT/a" || exit 1

mount_fs "$OTHER" subdir=a/b,cache=none
uncached_subdir() {
    [[ $(ls "$OTHER") == f ]] || return 1
    local round
    for round in $(seq 1 50); do
        echo "version $round" >"$MNT/a/b/f" && [[ $(cat "$OTHER/f") == "version $round" ]] || return 1
        touch "$MNT/a/b/new" && [[ -e $OTHER/new ]] && rm "$MNT/a/b/new" && [[ ! -e $OTHER/new ]] || return 1
    done
}
check "a subtree without caches shows every change at once" uncached_subdir
check "a mount point in use is refused" refused "cuttlefs umount $OTHER" cuttlefs mount "$(server_url)" "$OTHER"
check "status shows the mount's own figures" test "$(status_json "$OTHER" | jq -r .mount.mountpoint)" == "$OTHER"
umount_fs "$OTHER"
check "a missing subtree is refused" refused "does not exist" \
    cuttlefs mount "$(server_url)" "$OTHER" -o subdir=none

# For a write past the page cache the kernel leaves this to the file system.
privileges_lost() {
    local file=$MNT/open/run direct
    for direct in direct append; do
        : >"$file" && chown root:root "$file" && chmod 6777 "$file" && setcap cap_net_raw+ep "$file" || return 1
        chmod 6777 "$file"
        setpriv --reuid=65534 --regid=65534 --clear-groups \
            dd if=/dev/zero of="$file" bs=4k count=1 conv=notrunc oflag=$direct status=none || return 1
        [[ $(stat -c %a "$file") == 777 && -z $(getcap "$file") ]] || {
            echo "oflag=$direct left $(stat -c %a "$file") $(getcap "$file")"
            return 1
        }
    done
    rm "$file"
}
check "a write by somebody else takes set-id bits and capabilities away" privileges_lost

check "reads through the cache see what was written past it" \
    python3 "$(dirname "$0")/direct_seen.py" "$MNT/direct" 400

remounted() {
    cuttlefs mount "$(server_url)" "$MNT" -o remount,ro && refused "Read-only" touch "$MNT/new" &&
        cuttlefs mount "$(server_url)" "$MNT" -o remount,rw && touch "$MNT/new" && rm "$MNT/new"
}
check "remounted read-only and back" remounted

export_as 's/^read_only = false/read_only = true/'
read_only() {
    [[ -r $MNT/sticky/f ]] && refused "Read-only" touch "$MNT/new" && refused "Read-only" rm "$MNT/sticky/f" &&
        refused "Read-only" truncate -s 0 "$MNT/sticky/f" && refused "Read-only" chmod 600 "$MNT/sticky/f"
}
check "a read-only export refuses changes" read_only

export_as 's/^read_only = true/read_only = false/; s/^# root_squash/root_squash/'
squashed() {
    touch "$MNT/open/own" && [[ $(stat -c %u:%g "$MNT/open/own") == 65534:65534 ]] &&
        refused "Permission denied" touch "$MNT/new" &&
        refused "Permission denied" cat "$MNT/a/b/f" &&
        refused "not permitted" chmod 600 "$MNT/sticky/f" &&
        refused "not permitted" rm "$MNT/sticky/f" &&
        refused "not permitted" mv "$MNT/open/own" "$MNT/sticky/f" &&
        refused "not permitted" mknod "$MNT/open/device" c 1 3 &&
        refused "not permitted" chown 1 "$MNT/open/own"
}
check "a squashed root is a plain user" squashed
export_as 's/^root_squash/# root_squash/'

# An export without its directory refuses its own clients until the directory is made, and affects nobody else.
export_as '0,/^\[\[export\]\]/s//[[export]]\nfor = ["uid:7"]\npath = "\/later"\n\n[[export]]/'
readonly SEVENS=$WORK/sevens
mkdir -p "$SEVENS/home" "$SEVENS/mnt" && chown 7:7 "$SEVENS/home" "$SEVENS/mnt" || exit 1
by_seven() { setpriv --reuid=7 --regid=7 --clear-groups "$CUTTLEFS_BIN/cuttlefs" "$@"; }
mount_by_seven() { HOME=$SEVENS/home XDG_RUNTIME_DIR=$SEVENS/home by_seven mount "unix://$WORK/unix.sock" "$SEVENS/mnt"; }
# Only the server's answer counts here, not whether this user may mount.
let_in() {
    local said
    said=$(mount_by_seven 2>&1)
    umount -l "$SEVENS/mnt" 2>/dev/null
    [[ $said != *"does not exist there"* ]]
}
# Root's status tells that the directory is missing. Who has a directory only is not told the rules.
told_that_it_is_there() {
    [[ $(cuttlefs status "unix://$WORK/unix.sock" --json | jq '.exports.rules[0].is_there') == "$1" ]] &&
        [[ $(by_seven status "unix://$WORK/unix.sock" --json | jq -c .exports) == '{"count":2,"rules":null}' ]]
}
export_made_later() {
    refused "does not exist there" mount_by_seven && told_that_it_is_there false && mkdir -m 755 "$MNT/later" &&
        told_that_it_is_there true && let_in && rmdir "$MNT/later" && refused "does not exist there" mount_by_seven
}
check "an export waits for its directory, and nobody else for it" export_made_later

check "a pool in use is refused" refused "in use by process $SERVER_PID" \
    "$CUTTLEFS_BIN/cuttlefsd" serve --pool "$POOL" --listen "unix://$WORK/second.sock"

# After a kill of the server only the mount has the changes that no sync has covered.
only_in_the_mount() {
    local at=$WORK/stranded.mnt log=$WORK/stranded.log pid status
    mkdir -p "$at"
    "$CUTTLEFS_BIN/cuttlefs" mount "$(server_url)" "$at" --foreground >"$log" 2>&1 </dev/null &
    pid=$!
    CLIENT_PIDS[$at]=$pid
    for _ in $(seq 100); do mountpoint -q "$at" && break; sleep 0.1; done
    # The kill must come between two periodic syncs; it is repeated if a sync came first.
    for _ in 1 2 3; do
        echo precious >"$at/precious" && kill_server
        (($(status_json "$at" 2>/dev/null | jq .mount.unsynced_bytes) > 0)) && break
        launch_server
    done
    refused "stays mounted: only this mount has" cuttlefs umount "$at" || return 1
    launch_server && cuttlefs umount "$at" && wait $pid && [[ $(cat "$MNT/precious") == precious ]] || return 1
    # A signal cannot be refused: after the unmount the process waits for the server, and lets it sync.
    "$CUTTLEFS_BIN/cuttlefs" mount "$(server_url)" "$at" --foreground >>"$log" 2>&1 </dev/null &
    pid=$!
    CLIENT_PIDS[$at]=$pid
    for _ in $(seq 100); do mountpoint -q "$at" && break; sleep 0.1; done
    echo again >"$at/again" && kill_server && kill $pid && sleep 1 && launch_server && wait $pid || return 1
    unset "CLIENT_PIDS[$at]"
    [[ $(cat "$MNT/again") == again ]]
}
check "what only a mount has is not thrown away by an unmount" only_in_the_mount

# A server whose disk fails refuses changes, and does not go away. Its disk is a file of the other mount.
refused_by_a_disk() {
    local dir=$WORK/failing pid said status=0
    mkdir -p "$dir/mnt"
    "$CUTTLEFS_BIN/cuttlefsd" format --pool "$dir/pool" --size 64M --data "$MNT/disk" >"$dir/log" 2>&1 || return 1
    "$CUTTLEFS_BIN/cuttlefsd" serve --pool "$dir/pool" --memory 16M --listen "unix://$dir/socket" >>"$dir/log" 2>&1 </dev/null &
    pid=$!
    for _ in $(seq 100); do [[ -S $dir/socket ]] && break; sleep 0.1; done
    cuttlefs mount "unix://$dir/socket" "$dir/mnt" && head -c 2M /dev/urandom >"$dir/mnt/file" || status=1
    # From now on the disk has an error for each call.
    cuttlefs umount -f "$MNT" || status=1
    said=$(cuttlefs umount "$dir/mnt" 2>&1)
    [[ $said == *"stays mounted: only this mount has"*"it answered with an error"* ]] || status=1
    mountpoint -q "$dir/mnt" || status=1
    cuttlefs umount -f "$dir/mnt" || status=1
    end_process "$pid" || status=1
    mount_fs && rm -f "$MNT/disk" && ((status == 0)) || { echo "$said"; return 1; }
}
check "what a server refuses is not thrown away by an unmount" refused_by_a_disk

# As when a machine shuts down. umount(8) looks at the mount point, and asks for the file system's free space.
by_umount_8() {
    local at=$WORK/umounted.mnt log=$WORK/umounted.log pid begun
    mkdir -p "$at"
    "$CUTTLEFS_BIN/cuttlefs" mount "$(server_url)" "$at" --foreground >"$log" 2>&1 </dev/null &
    pid=$!
    CLIENT_PIDS[$at]=$pid
    for _ in $(seq 100); do mountpoint -q "$at" && break; sleep 0.1; done
    echo lost >"$at/lost" && kill_server && sleep 2 || return 1
    begun=$SECONDS
    timeout -s KILL 30 umount "$at" || { echo "umount(8) gave up after $((SECONDS - begun)) s"; return 1; }
    # The signal that a shutdown sends next.
    kill $pid
    ! wait $pid || { echo "the mount's process says that all is well"; return 1; }
    grep -q "are lost" "$log" || return 1
    unset "CLIENT_PIDS[$at]"
    launch_server
}
check "umount(8) ends a mount whose server is away, and its process says what is lost" by_umount_8

# COMMAND...: waits until it succeeds.
eventually() {
    local waited
    for ((waited = 0; waited < START_TIMEOUT_S * 10; waited++)); do "$@" && return 0; sleep 0.1; done
    echo "in vain: $*"
    return 1
}
waits_in_the_kernel() { grep -qs "($2) D " "/proc/$1/task"/*/stat; }
# Zombies have ended; the first thread may be one while others go on.
has_ended() { ! grep -qsv ") [ZX] " "/proc/$1/task"/*/stat; }

# A program has stored bytes through a mapping and asks where the file has data: the kernel waits for a WRITE that the server does not answer, in a thread
# of the mount's process, which keeps the device open. So when that process is killed the kernel alone would wait for ever.
killed_amid_a_write_back() {
    local at=$WORK/killed.mnt server=$SERVER_PID pid program
    mount_fs "$at"
    pid=${CLIENT_PIDS[$at]}
    python3 -c '
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 65536)
mapped = mmap.mmap(fd, 65536)
for page in range(0, 65536, 4096):
    mapped[page] = 7
print("stored", flush=True)
sys.stdin.readline()
try:
    os.lseek(fd, 0, os.SEEK_DATA)
except OSError as error:
    print(error, flush=True)' "$at/f" >"$WORK/stores.said" 2>&1 < <(eventually grep -q stored "$WORK/stores.said" && kill -STOP "$server"; echo) &
    program=$!
    eventually waits_in_the_kernel "$pid" cache-answers || { kill -CONT "$server"; echo "nothing waits"; return 1; }
    kill -KILL "$pid"
    # If it does not end, the end of the suite forces the mount off.
    eventually has_ended "$pid" && eventually has_ended "$program"
    local status=$?
    kill -CONT "$server"
    cat "$WORK/stores.said"
    ((status == 0)) && grep -q -e "not connected" -e "connection abort" "$WORK/stores.said" && umount_fs "$at"
}
check "a mount that is killed while the kernel waits for it frees its programs" killed_amid_a_write_back

key_taken_away() {
    [[ $LINK == tcp ]] || return 0
    "$CUTTLEFS_BIN/cuttlefsd" key new "$WORK/other.key" >/dev/null || return 1
    cp "$POOL/key" "$WORK/old.key" && rm "$POOL/key" && cp "$WORK/other.key" "$POOL/key" || return 1
    local old=$WORK/old.key
    stop_server && launch_server
    local shown
    for _ in $(seq 50); do
        shown=$(CUTTLEFS_KEY=$old cuttlefs status "$MNT" --json 2>/dev/null | jq -r .mount.server_away_because)
        [[ $shown == *"does not know this key"* ]] && break
        sleep 0.2
    done
    [[ $shown == *"does not know this key"* ]] && grep -q "does not know this key" "$WORK/client.log" || {
        echo "status says: $shown"
        return 1
    }
    rm "$POOL/key" && cp "$old" "$POOL/key" && stop_server && launch_server && ls "$MNT" >/dev/null
}
check "a mount whose key was taken away says so" key_taken_away

another_pool() {
    local own=$POOL shown
    "$CUTTLEFS_BIN/cuttlefsd" format --pool "$WORK/second" --size 64M >>"$WORK/format.log" 2>&1 || return 1
    [[ ! -e $POOL/key ]] || cp "$POOL/key" "$WORK/second/key" || return 1
    echo held >"$MNT/open/held" && stop_server || return 1
    POOL=$WORK/second
    launch_server
    for _ in $(seq 50); do
        shown=$(cuttlefs status "$MNT" --json 2>/dev/null | jq -r .mount.server_away_because)
        [[ $shown == *"serves another pool"* ]] && break
        sleep 0.2
    done
    stop_server
    POOL=$own
    launch_server
    [[ $shown == *"serves another pool"* ]] || {
        echo "status says: $shown"
        return 1
    }
    [[ $(cat "$MNT/open/held") == held ]]
}
check "a server of another pool at the address is refused, and the own one is gone on with" another_pool

# A control group of its own for each try: the kernel counts processes that have ended until they are waited for. It gives such a process no thread at
# some step of a mount: the mount is refused, and nothing of it is left.
few_threads() {
    local place=$1 group limit said mounted refused=0
    mkdir -p "$WORK/few"
    for ((limit = 2; limit <= 40; limit += 2)); do
        group=$place/cuttlefs-mounts.$$.$limit
        mkdir "$group" && echo $limit >"$group/pids.max" || return 1
        said=$(timeout 60 bash -c 'echo $$ >"$0/cgroup.procs" && exec "$@"' "$group" \
            "$CUTTLEFS_BIN/cuttlefs" mount "$(server_url)" "$WORK/few" 2>&1)
        mounted=$?
        ((mounted == 0)) && umount_fs "$WORK/few"
        for _ in $(seq 100); do rmdir "$group" 2>/dev/null && break || sleep 0.1; done
        if ((mounted == 0)); then
            ((refused > 0))
            return
        fi
        [[ $said == *"unavailable"* && $said != *panic* && ! -e $group ]] && ! mountpoint -q "$WORK/few" || {
            echo "with $limit threads: $said"
            return 1
        }
        refused=$((refused + 1))
    done
    echo "not mounted with 40 threads: $said"
    return 1
}
few_threads_somewhere() {
    local place
    for place in /sys/fs/cgroup/pids /sys/fs/cgroup; do
        mkdir "$place/cuttlefs-mounts.$$" 2>/dev/null || continue
        local has_limit=false
        [[ -e $place/cuttlefs-mounts.$$/pids.max ]] && has_limit=true
        rmdir "$place/cuttlefs-mounts.$$"
        $has_limit || continue
        few_threads "$place"
        return
    done
    echo "this machine has no control groups for processes; nothing was tried"
}
check "a mount that gets too few threads is refused, and leaves nothing" few_threads_somewhere

kill_server
server_away() {
    refused "is cuttlefsd running there" cuttlefs mount "$(server_url)" "$OTHER" || return 1
    [[ $(cuttlefs status "$MNT" --json 2>/dev/null | jq -r .mount.mountpoint) == "$MNT" ]] || return 1
    cat "$MNT/sticky/f" >/dev/null 2>&1 &
    local reader=$!
    sleep 0.5
    kill -0 $reader || return 1
    timeout 60 "$CUTTLEFS_BIN/cuttlefs" umount -f "$MNT" || return 1
    ! wait $reader && ! mountpoint -q "$MNT"
}
check "without its server a mount still tells its figures, waits, and can be forced off" server_away
suite_end
