#!/usr/bin/env bash
# The server is stopped cleanly (SIGTERM) and started again while clients work: they wait, and see no error at all.
# usage: restart.sh [shm|tcp|unix]      CUTTLEFS_RESTART_ROUNDS=N
source "$(dirname "$0")/lib.sh"
need_command git
need_command python3
need_command sqlite3
suite_begin restart "${1:-shm}"
needs_server
rounds=${CUTTLEFS_RESTART_ROUNDS:-5}
start_server 512M 64M
mount_fs

going() { [[ ! -e $WORK/stop ]]; }
copies() {
    local round=0
    while going; do
        round=$((round + 1))
        cp -r "$ROOT/fs-common" "$MNT/copy$round" || return 1
        diff -r "$ROOT/fs-common" "$MNT/copy$round" || return 1
        rm -r "$MNT/copy$round" || return 1
    done
    ((round > 0))
}
# Larger than a client's copies of unsynced writes: a clean stop must not need them.
stream() {
    head -c 48M /dev/urandom >"$WORK/source"
    while going; do
        dd if="$WORK/source" of="$MNT/stream" bs=256k conv=fsync status=none || return 1
        cmp "$WORK/source" "$MNT/stream" || return 1
    done
}
commits() {
    local n=0
    git init -q "$MNT/git" && cd "$MNT/git" || return 1
    git config user.name suite && git config user.email suite@localhost || return 1
    while going; do
        n=$((n + 1))
        echo "$n" >"file$((n % 20))" && git add -A && git commit -qm "$n" || return 1
    done
    git fsck --full --strict && [[ $(git rev-list --count HEAD) == "$n" ]]
}
# One descriptor for the whole time: it stays open over all restarts.
appends() {
    local n=0
    while going; do
        n=$((n + 1))
        echo "line $n" || return 1
    done >>"$MNT/appended"
    [[ $(tail -1 "$MNT/appended") == "line $n" && $(wc -l <"$MNT/appended") == "$n" ]]
}

declare -A pids=()
for work in copies stream commits appends; do
    "$work" >"$WORK/$work.log" 2>&1 &
    pids[$work]=$!
done
for ((round = 1; round <= rounds; round++)); do
    sleep "1.$((RANDOM % 10))"
    restart_server
done
sleep 1
touch "$WORK/stop"
for work in copies stream commits appends; do
    wait "${pids[$work]}"
    check "$work: no error, nothing lost" test $? -eq 0
done
# Changes that the stopped server has answered are on its disk, so nothing is written again and no time changes.
times_stay() {
    local before after
    echo written >"$MNT/times" && sleep 0.1 && before=$(stat -c '%y %z' "$MNT/times") || return 1
    restart_server && sleep 3
    after=$(stat -c '%y %z' "$MNT/times")
    [[ $before == "$after" ]] || { echo "was $before, is $after"; return 1; }
}
check "a clean restart moves no times" times_stay
# A program is told of another mount's change by an fstat(2) that waits over a restart: its next read has that change, although it was cached before.
told_over_restarts() {
    local other=$WORK/other round answer told
    mount_fs "$other" && printf '%06d' 0 >"$other/told" || return 1
    cat >"$WORK/reader.py" <<'PYTHON'
import os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
for _ in sys.stdin:
    changed = os.fstat(fd).st_mtime_ns
    print(changed, os.pread(fd, 6, 0).decode(), flush=True)
PYTHON
    coproc python3 "$WORK/reader.py" "$MNT/told"
    local reader=$COPROC_PID
    for ((round = 1; round <= 4; round++)); do
        echo >&"${COPROC[1]}" && read -r -t 30 answer <&"${COPROC[0]}" || return 1
        printf '%06d' "$round" | dd of="$other/told" conv=notrunc status=none || return 1
        told=$(stat -c %.9Y "$other/told")
        stop_server
        # Longer than attributes are good for.
        sleep 1.2
        echo >&"${COPROC[1]}"
        sleep 0.2
        launch_server
        read -r -t 60 answer <&"${COPROC[0]}" || return 1
        [[ $answer == "${told/./} $(printf '%06d' "$round")" ]] || {
            echo "round $round: changed at $told, but the reader has $answer"
            break
        }
    done
    kill "$reader" && umount_fs "$other" && ((round > 4))
}
check "who is told of a change over a restart reads it" told_over_restarts
all_space_back() {
    rm -rf "${MNT:?}"/* || return 1
    local waited used
    for ((waited = 0; waited < 100; waited++)); do
        used=$(df -B4096 --output=used "$MNT" | tail -1)
        ((used == 0)) && return 0
        sleep 0.1
    done
    echo "$used pages are still in use"
    return 1
}
check "all space is back" all_space_back
suite_end
