#!/usr/bin/env bash
# Hostile peers of each kind (hostile.py) beside a mount that measures its own speed (beside.py). Fails if the mount sees an error or hangs, if the
# server dies or takes more memory than it may, or if something of the peers stays in `status`.
#
# Three rates are measured in turn, so that changes of the machine's speed affect all of them: the mount alone; beside the same attack on another
# server of this machine; under attack. An attacker on this machine takes processor time itself, and makes any server take some: the second rate is
# what the machine leaves to the mount. The server is responsible only for the third rate, compared with the second. No core is reserved and no
# priority changed: the kernel divides the cores among threads, as it would with any other program on the server's machine. The server should leave
# half of what the machine leaves. Less is a warning only, because rates of a busy machine prove nothing; CUTTLEFS_ATTACK_STRICT=1 makes it a failure.
#
# usage: attack.sh [shm|tcp|unix]: the mount's link. Peers connect over unix://, as another user. With tcp they connect over TLS, with another key,
# through a relay whose processor time counts as theirs; kinds that need no key connect without one.
#   CUTTLEFS_ATTACK_SECONDS   how long in all (120)
#   CUTTLEFS_ATTACK_KINDS     which kinds, of `hostile.py list` (all)
#   CUTTLEFS_ATTACK_ROUNDS    how often the three take turns (2)
source "$(dirname "$0")/lib.sh"
suite_begin attack "${1:-unix}"
needs_server
need_command python3
need_command jq
# Another user is needed: the server's own user has no bounded share.
((EUID == 0)) || die "attack.sh must run as root, to be able to come as somebody else"
readonly LEASE_S=4
readonly ROUNDS=${CUTTLEFS_ATTACK_ROUNDS:-2}
readonly HANG_S=60
# The part of what the machine leaves that a server has to leave.
readonly SHARE_LEAST_PERCENT=50
HERE=$(dirname "${BASH_SOURCE[0]}")
RELAY=$CUTTLEFS_BIN/examples/keyed_relay
[[ $LINK != tcp || -x $RELAY ]] || die "no $RELAY; build it: cargo build --release -p cuttlefs-common --example keyed_relay"
LISTED=$(python3 "$HERE/hostile.py" list) || die "hostile.py does not list its kinds"
# Kinds of attacks without a key are for a link that asks for one.
kinds() { awk -F '\t' -v tcp="$([[ $LINK == tcp ]] && echo 1)" '$2 != "keyless" || tcp {print $1}' <<<"$LISTED"; }
read -ra KINDS <<<"${CUTTLEFS_ATTACK_KINDS:-$(kinds | tr '\n' ' ')}"
# kinds_of TRAIT: the kinds that are listed with this, with a space before and behind each.
kinds_of() { echo " $(awk -F '\t' -v trait="$1" '$2 == trait {print $1}' <<<"$LISTED" | tr '\n' ' ') "; }
KEYLESS=$(kinds_of keyless)
MALFORMED=$(kinds_of malformed)
readonly LISTED KEYLESS MALFORMED
# Each kind has three parts in each round.
PART_S=$(awk -v all="${CUTTLEFS_ATTACK_SECONDS:-120}" -v parts=$((3 * ROUNDS * ${#KINDS[@]})) \
    'BEGIN {part = all / parts; print part < 1 ? 1 : part}')
readonly PART_S

# ---- the two servers ---------------------------------------------------------------------------------------------------

start_server 1G 256M
stop_server
settings() {
    "$CUTTLEFS_BIN/cuttlefsd" key new --name hostile "$1/hostile.key" >/dev/null || die "no key for the attacker"
    sed -i -E -e "s/^lease_ms = [0-9]+/lease_ms = $((LEASE_S * 1000))/" -e 's/^keys = \[\]/keys = ["key", "hostile.key"]/' "$1/cuttlefs.toml"
    grep -q "^lease_ms = ${LEASE_S}000" "$1/cuttlefs.toml" || die "cuttlefs.toml has no lease to change"
    grep -q '^keys = \["key"' "$1/cuttlefs.toml" || die "cuttlefs.toml has no keys to change"
}
settings "$POOL"
launch_server
DESCRIPTORS_BARE=$(find "/proc/$SERVER_PID/fd" -mindepth 1 | wc -l)
readonly DESCRIPTORS_BARE
mount_fs
head -c 1M /dev/urandom >"$MNT/anybody" && chmod 666 "$MNT/anybody" && sync "$MNT/anybody" || die "no file to attack"
python3 "$HERE/hostile.py" prepare "$MNT/anybody" || die "no files for expensive requests"
mkdir "$MNT/own" || die "no directory to work in"
for ((number = 0; number < 500; number++)); do : >"$MNT/own/some.$number"; done

# The other server has a pool of its own, which only attackers use.
readonly OTHER=$WORK/other
mkdir "$OTHER"
"$CUTTLEFS_BIN/cuttlefsd" format --pool "$OTHER/pool" --size 1G >>"$WORK/format.log" 2>&1 || die "format failed"
"$CUTTLEFS_BIN/cuttlefsd" key new --name other "$OTHER/pool/key" >/dev/null || die "no key for the other server"
settings "$OTHER/pool"
"$CUTTLEFS_BIN/cuttlefsd" serve --pool "$OTHER/pool" --memory 256M --listen "unix://$OTHER/unix.sock" \
    --listen "tcp://127.0.0.1:$((PORT + 1))" >>"$WORK/other.log" 2>&1 </dev/null &
OTHER_PID=$!
for ((waited = 0; waited < START_TIMEOUT_S * 10; waited++)); do
    timeout 5 "$CUTTLEFS_BIN/cuttlefs" status "unix://$OTHER/unix.sock" >/dev/null 2>&1 && break
    kill -0 "$OTHER_PID" 2>/dev/null || die "the other server ended while starting"
    sleep 0.1
done
mkdir "$OTHER/mnt"
"$CUTTLEFS_BIN/cuttlefs" mount "unix://$OTHER/unix.sock" "$OTHER/mnt" >>"$WORK/other.log" 2>&1 || die "the other server cannot be mounted"
head -c 1M /dev/urandom >"$OTHER/mnt/anybody" && chmod 666 "$OTHER/mnt/anybody" || die "no file to attack at the other server"
python3 "$HERE/hostile.py" prepare "$OTHER/mnt/anybody" || die "no files for expensive requests at the other server"
for ((number = 0; number < 500; number++)); do : >"$OTHER/mnt/some.$number"; done
"$CUTTLEFS_BIN/cuttlefs" umount "$OTHER/mnt" || die "the other server cannot be unmounted"

# relay POOL PORT SOCKET: lets the attacker's own protocol through TLS, with the attacker's key.
relay() {
    "$RELAY" "$1/hostile.key" "127.0.0.1:$2" "$3" >>"$WORK/relay.log" 2>&1 </dev/null &
    RELAY_PIDS+=($!)
    local waited
    for ((waited = 0; waited < 100; waited++)); do
        [[ -S $3 ]] && return 0
        sleep 0.1
    done
    die "the relay does not start"
}
RELAY_PIDS=()
if [[ $LINK == tcp ]]; then
    relay "$POOL" "$PORT" "$WORK/relay.sock"
    relay "$OTHER/pool" "$((PORT + 1))" "$OTHER/relay.sock"
fi

# reached KIND this|other: the address for an attack of this kind.
reached() {
    local at=$WORK port=$PORT
    [[ $2 == this ]] || { at=$OTHER port=$((PORT + 1)); }
    if [[ $KEYLESS == *" $1 "* ]]; then
        echo "127.0.0.1:$port"
    elif [[ $LINK == tcp ]]; then
        echo "$at/relay.sock"
    else
        echo "$at/unix.sock"
    fi
}

# ---- what is looked at -------------------------------------------------------------------------------------------------

beside() { timeout "$HANG_S" python3 "$HERE/beside.py" "$MNT/own" "$1"; }

# What the server holds for its peers, without sessions and their resources, which may stay for a lease. The mount may make connections meanwhile;
# they do not count.
held() {
    status_json | jq -c --arg mnt "$MNT" '{
        connections: (.connections.count - ([.sessions.listed[] | select(.label | contains($mnt)) | .connections] | add // 0)),
        buffers: .bounce_buffers.used, waiting: .bounce_buffers.waiting,
        running: .byte_requests.running, queued: .byte_requests.waiting, unread: (.nic.held_bytes // 0)}'
}
held_by_sessions() { status_json | jq -c '[.shares | del(.connections) | .[] | objects | .used] + [.sessions.count]'; }
# The connection of this question does not count.
connections() { status_json | jq '.connections.count - 1'; }
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
# Descriptors for each of the mount's connections, as many as at the beginning; the mount may have made some connections meanwhile.
# The question about connections has some itself, which the server closes a moment after the answer: so they are looked for again for a while before
# connections are asked about once more.
descriptors_settle() {
    local asked looked expected
    for ((asked = 0; asked < 20; asked++)); do
        expected=$((DESCRIPTORS_BARE + ($(connections) * (DESCRIPTORS - DESCRIPTORS_BARE) + CONNECTIONS - 1) / CONNECTIONS))
        for ((looked = 0; looked < 20; looked++)); do
            (($(descriptors) <= expected)) && return 0
            sleep 0.1
        done
    done
    echo "the server has $(descriptors) descriptors open and should have $expected: before $DESCRIPTORS for $CONNECTIONS connections, without any $DESCRIPTORS_BARE"
    return 1
}

median() { sort -g | awk '{value[NR] = $1} END {print NR % 2 ? value[(NR + 1) / 2] : (value[NR / 2] + value[NR / 2 + 1]) / 2}'; }

# ---- attacks -----------------------------------------------------------------------------------------------------------

# attacked KIND this|other: the mount's figures beside the attack, in FIGURES.
attacked() {
    local pid newcomer
    python3 "$HERE/hostile.py" "$1" "$(reached "$1" "$2")" anybody "$(awk -v s="$PART_S" 'BEGIN {print s + 0.5}')" \
        >>"$WORK/hostile.log" 2>&1 &
    pid=$!
    # The attack has to run before the measurement begins.
    sleep 0.3
    # A client with a key gets in, whatever clients without one do.
    status_json >/dev/null &
    newcomer=$!
    FIGURES=$(beside "$PART_S") || { echo "the mount fails beside an attack on $2 server: $FIGURES"; return 1; }
    wait "$newcomer" || { echo "nobody new comes in"; return 1; }
    wait "$pid" || { echo "hostile.py $1 failed"; tail -5 "$WORK/hostile.log"; return 1; }
}

# One kind of attack: the three measurements in turn.
attack() {
    local kind=$1 round alone=() beside=() under=() longest=0 resident=0 now bad
    bad=$(counter bad_messages)
    for ((round = 0; round < ROUNDS; round++)); do
        FIGURES=$(beside "$PART_S") || { echo "the mount fails before the attack: $FIGURES"; return 1; }
        alone+=("${FIGURES% *}")
        attacked "$kind" other || return 1
        beside+=("${FIGURES% *}")
        attacked "$kind" this || return 1
        under+=("${FIGURES% *}")
        ((${FIGURES#* } > longest)) && longest=${FIGURES#* }
        kill -0 "$SERVER_PID" || { echo "the server is dead"; return 1; }
        now=$(resident_kib "$SERVER_PID") && ((now > resident)) && resident=$now
    done
    LEAVES=$(awk -v kind="$kind" -v alone="$(printf '%s\n' "${alone[@]}" | median)" -v machine="$(printf '%s\n' "${beside[@]}" | median)" \
        -v under="$(printf '%s\n' "${under[@]}" | median)" -v of_machine="${beside[*]}" -v of_server="${under[*]}" \
        -v longest="$longest" -v mib=$((resident / 1024)) -v rates="$WORK/rates" 'BEGIN {
        rounds = split(of_machine, machines)
        split(of_server, servers)
        least = most = servers[1] / machines[1]
        for (i = 2; i <= rounds; i++) {
            part = servers[i] / machines[i]
            if (part < least) least = part
            if (part > most) most = part
        }
        printf "rate  %-15s alone %6.1f files/s, machine leaves %6.1f (%3.0f %%), server leaves %6.1f (%3.0f %% of that, rounds %.0f to %.0f), longest %d ms, %d MiB\n",
            kind, alone, machine, 100 * machine / alone, under, 100 * under / machine, 100 * least, 100 * most, longest, mib >>rates
        printf "%d", 100 * under / machine
    }')
    # A peer whose requests are no requests is thrown out at once, and hurts nobody.
    now=$(counter bad_messages)
    [[ $MALFORMED == *" $kind "* || $now == "$bad" ]] ||
        { echo "the server does not understand $((now - bad)) messages of $kind: hostile.py has other requests than fs-common"; return 1; }
    ((resident <= RESIDENT_MAX_KIB)) || { echo "the server takes $((resident / 1024)) MiB"; return 1; }
    # Everything is given back at once, except what may stay for a lease.
    settles held "$HELD" 15
}

beside 1 >/dev/null || die "the mount does not work"
HELD=$(held)
BY_SESSIONS=$(held_by_sessions)
CONNECTIONS=$(connections)
# By then the connection of the last question is gone for good.
sleep 1.5
DESCRIPTORS=$(descriptors)
# Memory that may be held for peers, and that of 1,024 connections.
RESIDENT_MAX_KIB=$(($(resident_kib "$SERVER_PID") + $(counter held_bound) / 1024 + 160 * 1024))
readonly RESIDENT_MAX_KIB
for kind in "${KINDS[@]}"; do
    : >"$WORK/rates"
    LEAVES=100
    check "$kind: the mount goes on, and nothing is left" attack "$kind"
    cat "$WORK/rates"
    if ((LEAVES < SHARE_LEAST_PERCENT)); then
        [[ -z ${CUTTLEFS_ATTACK_STRICT:-} ]] || fail "$kind: the server leaves $LEAVES % of what the machine leaves"
        echo "warning: under $kind the server leaves the mount $LEAVES % of what the machine leaves"
    fi
    [[ -n $SERVER_PID ]] && kill -0 "$SERVER_PID" 2>/dev/null || break
done
for pid in "${RELAY_PIDS[@]}"; do end_process "$pid"; done
check "sessions, files and locks of peers that are gone go with their leases" settles held_by_sessions "$BY_SESSIONS" $((3 * LEASE_S + 10))
check "no descriptor is left open" descriptors_settle
check "status can be asked for, and fits" eval "status_json | jq -e '.shares.peers <= 4 and (has(\"error\") | not)'"
# The log has a bounded number of lines of each kind a minute.
check "the log did not grow without bound" test "$(stat -c %s "$WORK/server.log")" -lt $((4 << 20))
check "the mount reads what it wrote" cmp "$MNT/anybody" "$MNT/anybody"
umount_fs
stop_server
end_process "$OTHER_PID"
check "the pool is sound" "$CUTTLEFS_BIN/cuttlefsd" fsck --pool "$POOL"
suite_end
