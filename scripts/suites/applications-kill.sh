#!/usr/bin/env bash
# Applications that promise durability to their users (SQLite in both journal modes, git, fio with checksums), while the server is killed (SIGKILL)
# and started again. They see no error, and everything that they promised is there.
# usage: applications-kill.sh [shm|tcp|unix]      CUTTLEFS_KILL_ROUNDS=N
source "$(dirname "$0")/lib.sh"
need_command git
need_command fio
need_command python3
suite_begin applications-kill "${1:-shm}"
needs_server
rounds=${CUTTLEFS_KILL_ROUNDS:-4}
start_server 1G 64M
mount_fs

# Transactions of several rows over one connection. After a transaction has committed, its number is noted on the local disk.
cat >"$WORK/sqlite_writer.py" <<'PYTHON'
import hashlib, os, sqlite3, sys
path, journal, noted_path, stop = sys.argv[1:]
noted = open(noted_path, "a", buffering=1)
base = sqlite3.connect(path, timeout=120, isolation_level=None)
assert base.execute(f"PRAGMA journal_mode={journal}").fetchone()[0] == journal.lower()
base.execute("PRAGMA synchronous=FULL")
base.execute("CREATE TABLE rows (number INTEGER, part INTEGER, body TEXT, PRIMARY KEY (number, part))")
number = 0
while not os.path.exists(stop):
    number += 1
    base.execute("BEGIN IMMEDIATE")
    for part in range(1 + number % 7):
        body = hashlib.sha256(f"{number}.{part}".encode()).hexdigest() * (1 + number % 40)
        base.execute("INSERT INTO rows VALUES (?, ?, ?)", (number, part, body))
    if number % 5 == 0:
        base.execute("UPDATE rows SET body = body || '!' WHERE number = ?", (number - 3,))
    base.execute("COMMIT")
    noted.write(f"{number}\n")
PYTHON

# The database is sound, and has exactly the noted transactions, and possibly the one that was under way, each complete.
cat >"$WORK/sqlite_check.py" <<'PYTHON'
import hashlib, sqlite3, sys
path, noted_path = sys.argv[1:]
base = sqlite3.connect(path)
problems = [row[0] for row in base.execute("PRAGMA integrity_check") if row[0] != "ok"]
last = max(int(line) for line in open(noted_path))
rows = {}
for number, part, body in base.execute("SELECT * FROM rows"):
    rows.setdefault(number, {})[part] = body
if sorted(rows) != list(range(1, len(rows) + 1)) or len(rows) not in (last, last + 1):
    problems.append(f"{last} transactions were noted and {len(rows)} are there, up to {max(rows)}")
for number, parts in rows.items():
    updated = "!" if (number + 3) % 5 == 0 and number + 3 <= len(rows) else ""
    expected = {
        part: hashlib.sha256(f"{number}.{part}".encode()).hexdigest() * (1 + number % 40) + updated
        for part in range(1 + number % 7)
    }
    if parts != expected:
        problems.append(f"transaction {number} is not whole")
print(f"{len(rows)} transactions, {last} noted")
print("\n".join(problems))
sys.exit(bool(problems))
PYTHON

going() { [[ ! -e $WORK/stop ]]; }
sqlite_wal() { python3 "$WORK/sqlite_writer.py" "$MNT/wal.db" WAL "$WORK/sqlite_wal.noted" "$WORK/stop"; }
sqlite_rollback() { python3 "$WORK/sqlite_writer.py" "$MNT/rollback.db" DELETE "$WORK/sqlite_rollback.noted" "$WORK/stop"; }
git_commits() {
    local n=0
    git init -q "$MNT/git" && cd "$MNT/git" || return 1
    git config user.name suite && git config user.email suite@localhost || return 1
    git config gc.autoDetach false && git config gc.auto 200 && git config core.fsync all || return 1
    while going; do
        n=$((n + 1))
        head -c $((n % 50 * 1000)) /dev/urandom >"file$((n % 20))" || return 1
        echo "$n" >number && git add -A && git commit -qm "$n" || return 1
        echo "$n" >>"$WORK/git_commits.noted"
    done
}
fio_verified() {
    while going; do
        fio --name=kill --directory="$MNT" --eta=never --size=8M --bs=4k --rw=randwrite --fsync=16 \
            --ioengine=psync --verify=crc32c --verify_fatal=1 --do_verify=1 --verify_state_save=0 \
            --randrepeat=0 || return 1
        echo done >>"$WORK/fio_verified.noted"
    done
}

works=(sqlite_wal sqlite_rollback git_commits fio_verified)
declare -A pids=()
for work in "${works[@]}"; do
    touch "$WORK/$work.noted"
    "$work" >"$WORK/$work.log" 2>&1 &
    pids[$work]=$!
done
noted() { cat "$WORK"/sqlite_*.noted "$WORK/git_commits.noted" | wc -l; }
# All three databases make progress: their notes get longer, whatever fio is doing.
went_on() {
    local work
    for work in sqlite_wal sqlite_rollback git_commits; do
        (($(wc -l <"$WORK/$work.noted") > ${before[$work]})) || return 1
    done
}
declare -A before=()
for ((round = 1; round <= rounds; round++)); do
    sleep "$((RANDOM % 2)).$((RANDOM % 10))"
    kill_server
    for work in "${works[@]}"; do before[$work]=$(wc -l <"$WORK/$work.noted"); done
    launch_server
    for ((waited = 0; waited < 600; waited++)); do
        went_on && break
        sleep 0.1
    done
    went_on || { fail "kill $round: not all applications go on" && break; }
done
((round > rounds)) && pass "applications went on after each of $rounds kills"
touch "$WORK/stop"
for work in "${works[@]}"; do
    wait "${pids[$work]}"
    check "$work: no error" test $? -eq 0
done
check "fio verified at least once" test -s "$WORK/fio_verified.noted"
say "$(noted) commits in all, $(wc -l <"$WORK/fio_verified.noted") runs of fio"

# Once more, when nothing runs and no cache can answer.
kill_server
launch_server
remount_fs
whole_git() {
    cd "$MNT/git" || return 1
    git fsck --full --strict || return 1
    [[ $(git rev-list --count HEAD) == "$(tail -1 "$WORK/git_commits.noted")" ]] || return 1
    [[ -z $(git status --porcelain) && $(cat number) == "$(tail -1 "$WORK/git_commits.noted")" ]]
}
check "SQLite (WAL): whole, and every commit is there" python3 "$WORK/sqlite_check.py" "$MNT/wal.db" "$WORK/sqlite_wal.noted"
check "SQLite (rollback): whole, and every commit is there" \
    python3 "$WORK/sqlite_check.py" "$MNT/rollback.db" "$WORK/sqlite_rollback.noted"
check "git: every object is whole, every commit is there" whole_git
suite_end
