#!/usr/bin/env bash
# Hostile peers of each kind (hostile.py) beside a mount that measures itself (beside.py). Fails when the mount sees an error
# or hangs, when the server dies or takes more memory than it may, or when something is left behind in `status`; a mount that keeps less than half of its rate
# is said in a line of its own, for rates of a busy machine are no verdict.
# usage: attack.sh [shm|tcp|unix]: the mount's link; the peers come over unix://, as another user
#   CUTTLEFS_ATTACK_SECONDS   how long in all (100)
#   CUTTLEFS_ATTACK_KINDS     which kinds, of `hostile.py list` (all)
source "$(dirname "$0")/lib.sh"
suite_begin attack "${1:-unix}"
needs_server
need_command python3
need_command jq
# Only another user has a share that is not the whole.
((EUID == 0)) || die "attack.sh must run as root, to be able to come as somebody else"
readonly LEASE_S=4
readonly ROUNDS=2
readonly HANG_S=60
HERE=$(dirname "${BASH_SOURCE[0]}")
read -ra KINDS <<<"${CUTTLEFS_ATTACK_KINDS:-$(python3 "$HERE/hostile.py" list | cut -f1 | tr '\n' ' ')}"
# Of each kind and round a part without and a part with the attack.
PART_S=$(awk -v all="${CUTTLEFS_ATTACK_SECONDS:-100}" -v parts=$((2 * ROUNDS * ${#KINDS[@]})) \
    'BEGIN {part = all / parts; print part < 1 ? 1 : part}')
readonly PART_S

start_server 1G 256M
stop_server
sed -i -E "s/^lease_ms = [0-9]+/lease_ms = $((LEASE_S * 1000))/" "$POOL/cuttlefs.toml"
grep -q "^lease_ms = ${LEASE_S}000" "$POOL/cuttlefs.toml" || die "cuttlefs.toml has no lease to change"
launch_server
mount_fs
head -c 1M /dev/urandom >"$MNT/anybody" && chmod 666 "$MNT/anybody" && sync "$MNT/anybody" || die "no file to attack"
mkdir "$MNT/own" || die "no directory to work in"
for ((number = 0; number < 500; number++)); do : >"$MNT/own/some.$number"; done

beside() { timeout "$HANG_S" python3 "$HERE/beside.py" "$MNT/own" "$1"; }

# What the server holds for its peers, but for sessions and what hangs on them, which may stay for a lease.
held() {
    status_json | jq -c '{connections: .connections.count, buffers: .bounce_buffers.used, waiting: .bounce_buffers.waiting,
        running: .byte_requests.running, queued: .byte_requests.waiting, unread: (.nic.held_bytes // 0)}'
}
held_by_sessions() { status_json | jq -c '[.shares[] | objects | .used] + [.sessions.count]'; }
descriptors() { find "/proc/$SERVER_PID/fd" -mindepth 1 | wc -l; }

# settles WHAT BEFORE SECONDS: waits until WHAT prints BEFORE again.
settles() {
    local what=$1 before=$2 waited now
    for ((waited = 0; waited < $3 * 10; waited++)); do
        now=$("$what") && [[ $now == "$before" ]] && return 0
        sleep 0.1
    done
    echo "$what: before $before, now $now"
    return 1
}
descriptors_settle() {
    local waited
    for ((waited = 0; waited < 100; waited++)); do
        # The mount may have made lanes meanwhile, of eleven each; an attack that leaves something leaves hundreds.
        (($(descriptors) <= DESCRIPTORS + 60)) && return 0
        sleep 0.1
    done
    echo "the server has $(descriptors) descriptors open, before $DESCRIPTORS"
    return 1
}

median() { sort -g | awk '{value[NR] = $1} END {print NR % 2 ? value[(NR + 1) / 2] : (value[NR / 2] + value[NR / 2 + 1]) / 2}'; }

# One kind: rounds without and with it take turns.
attack() {
    local kind=$1 round alone=() under=() figures longest=0 pid resident=0 now
    for ((round = 0; round < ROUNDS; round++)); do
        figures=$(beside "$PART_S") || { echo "the mount fails before the attack: $figures"; return 1; }
        alone+=("${figures% *}")
        python3 "$HERE/hostile.py" "$kind" "$WORK/unix.sock" anybody "$(awk -v s="$PART_S" 'BEGIN {print s + 0.5}')" \
            >>"$WORK/hostile.log" 2>&1 &
        pid=$!
        # Under way before it is measured.
        sleep 0.3
        figures=$(beside "$PART_S") || { echo "the mount fails under attack: $figures"; return 1; }
        under+=("${figures% *}")
        ((${figures#* } > longest)) && longest=${figures#* }
        now=$(resident_kib "$SERVER_PID") && ((now > resident)) && resident=$now
        wait "$pid" || { echo "hostile.py $kind failed"; tail -5 "$WORK/hostile.log"; return 1; }
        kill -0 "$SERVER_PID" || { echo "the server is dead"; return 1; }
    done
    local free beset
    free=$(printf '%s\n' "${alone[@]}" | median)
    beset=$(printf '%s\n' "${under[@]}" | median)
    awk -v kind="$kind" -v free="$free" -v beset="$beset" -v longest="$longest" -v mib=$((resident / 1024)) 'BEGIN {
        printf "rate  %-15s %7.1f files/s, under attack %7.1f (%3.0f %%), longest %d ms, server %d MiB\n",
            kind, free, beset, 100 * beset / free, longest, mib
        if (beset < free / 2) printf "warning: %s leaves the mount %.0f %% of its rate\n", kind, 100 * beset / free
    }' >>"$WORK/rates"
    ((resident <= RESIDENT_MAX_KIB)) || { echo "the server takes $((resident / 1024)) MiB"; return 1; }
    # All but what may stay for a lease is given back at once.
    settles held "$HELD" 15
}

beside 1 >/dev/null || die "the mount does not work"
HELD=$(held)
BY_SESSIONS=$(held_by_sessions)
DESCRIPTORS=$(descriptors)
# What may be held for peers, and what 1,024 connections take.
RESIDENT_MAX_KIB=$(($(resident_kib "$SERVER_PID") + $(counter held_bound) / 1024 + 160 * 1024))
readonly RESIDENT_MAX_KIB
for kind in "${KINDS[@]}"; do
    : >"$WORK/rates"
    check "$kind: the mount goes on, and nothing is left" attack "$kind"
    cat "$WORK/rates"
    [[ -n $SERVER_PID ]] && kill -0 "$SERVER_PID" 2>/dev/null || break
done
check "sessions, files and locks of peers that are gone go with their leases" settles held_by_sessions "$BY_SESSIONS" $((3 * LEASE_S + 10))
check "no descriptor is left open" descriptors_settle
check "status can be asked for, and fits" eval "status_json | jq -e '.shares.peers <= 4 and (has(\"error\") | not)'"
# Lines of one kind a minute are bounded; so is the log.
check "the log did not grow without bound" test "$(stat -c %s "$WORK/server.log")" -lt $((4 << 20))
check "the mount reads what it wrote" cmp "$MNT/anybody" "$MNT/anybody"
umount_fs
stop_server
check "the pool is sound" "$CUTTLEFS_BIN/cuttlefsd" fsck --pool "$POOL"
suite_end
