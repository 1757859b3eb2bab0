#!/usr/bin/env bash
# Typical work on a file system: a large source tree is unpacked, compared, configured and built; git; SQLite. Then everything is stopped and started,
# and all files are still there.
# usage: realwork.sh [shm|tcp|unix]
source "$(dirname "$0")/lib.sh"
need_command git
need_command sqlite3
suite_begin realwork "${1:-shm}"
start_server 2G 256M
mount_fs

seconds_of() { # seconds_of COMMAND...: runs it, time on stdout, its output in a log
    local start=$EPOCHREALTIME
    "$@" >>"$WORK/step.log" 2>&1 || return 1
    awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN {printf "%.1f", b - a}'
}

local_tree=$WORK/local
mkdir -p "$local_tree" "$MNT/tree"
if tarball=$("$ROOT/scripts/fetch-source.sh" 2>"$WORK/fetch.log"); then
    buildable=true
else
    # Without a network: the sources of this project's dependencies are a large tree, too, but cannot be built with make.
    cat "$WORK/fetch.log" >&2
    say "realwork: no source package; unpacking the crates' sources, and building nothing"
    tarball=$WORK/crates.tar
    tar -cf "$tarball" -C "${CARGO_HOME:-$HOME/.cargo}/registry" src
    buildable=false
fi

entries=$(tar -tf "$tarball" | wc -l)
check "the tree is large ($entries entries)" test "$entries" -ge 5000
on_local=$(seconds_of tar -xf "$tarball" -C "$local_tree") || fail "tar on the local disk"
if on_mount=$(seconds_of tar -xf "$tarball" -C "$MNT/tree"); then
    pass "unpack $entries entries: $on_mount s, local disk $on_local s"
else
    fail "unpack: $(tail -3 "$WORK/step.log")"
fi
check "diff -r: the same as on the local disk" diff -r "$local_tree" "$MNT/tree"

# Modes, times, links and sizes, which diff does not compare.
listing() { (cd "$1" && find . -printf '%P %y %m %s %l %TY%Tm%Td%TH%TM%TS\n' | grep -v ' d ' | sort); }
metadata() { diff <(listing "$local_tree") <(listing "$MNT/tree"); }
check "modes, sizes, times and link targets are the same" metadata

# After the build there are more files, so only those of the tarball are compared.
metadata_after() { ! comm -23 <(listing "$local_tree") <(listing "$MNT/tree") | grep .; }

build() {
    cd "$MNT"/tree/*/ || return 1
    ./configure --without-readline --without-zlib --without-icu || return 1
    make -s -j2 -C src/port || return 1
    make -s -j2 -C src/common || return 1
    # An archive that the linker can use: the symbol table is read back.
    [[ $(nm -A src/common/libpgcommon.a 2>/dev/null | grep -c ' T ') -gt 100 ]]
}
if $buildable && [[ -z ${CUTTLEFS_SOURCE_TARBALL:-} ]]; then
    check "configure and make" build
fi
cd /

git_work() {
    git init -q "$MNT/origin" && cd "$MNT/origin" || return 1
    git config user.name suite && git config user.email suite@localhost || return 1
    # A part of the tree is enough for git to pack; the whole tree would measure zlib.
    find "$local_tree" -name '*.[ch]' -printf '%P\n' -o -name '*.rs' -printf '%P\n' >"$WORK/sources"
    sed -n '1,1500p' "$WORK/sources" | tar -C "$local_tree" -cf - -T - | tar -xf - || return 1
    git add -A && git commit -qm first || return 1
    git rev-parse HEAD >"$MNT/first-commit"
    git clone -q --no-hardlinks "$MNT/origin" "$MNT/clone" && cd "$MNT/clone" || return 1
    git fsck --full --strict || return 1
    git repack -adq && git gc -q --prune=now && git fsck --full --strict || return 1
    git checkout -qb other && git mv "$(git ls-files | head -1)" moved && git -c user.name=s -c user.email=s@s commit -qm second || return 1
    git checkout -q - && [[ -z $(git status --porcelain) ]]
}
check "git: init, commit, clone, repack, branches, fsck" git_work
cd /

sqlite_work() {
    local mode=$1 db=$MNT/work-$1.db
    sqlite3 "$db" >"$WORK/sqlite.out" <<SQL || return 1
PRAGMA journal_mode=$mode;
PRAGMA synchronous=FULL;
CREATE TABLE t (id INTEGER PRIMARY KEY, k TEXT, v BLOB);
CREATE INDEX i ON t (k);
WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 20000)
    INSERT INTO t SELECT x, hex(x * 7919 % 20011), randomblob(100 + x % 900) FROM n;
BEGIN; DELETE FROM t WHERE id % 3 = 0; ROLLBACK;
BEGIN; UPDATE t SET v = zeroblob(50) WHERE id % 5 = 0; COMMIT;
DELETE FROM t WHERE id % 7 = 0;
VACUUM;
SQL
    # Small transactions, each with its own sync.
    local i
    for i in $(seq 1 50); do echo "INSERT INTO t VALUES (NULL, 'tail$i', randomblob(300));"; done | sqlite3 "$db" || return 1
    sqlite_whole "$mode"
}
sqlite_whole() {
    local db=$MNT/work-$1.db
    [[ $(sqlite3 "$db" 'PRAGMA integrity_check') == ok ]] || return 1
    # 20000 rows, less every seventh, plus fifty.
    [[ $(sqlite3 "$db" 'SELECT count(*) FROM t') == $((20000 - 20000 / 7 + 50)) ]]
}
check "SQLite with a rollback journal: workload and integrity_check" sqlite_work DELETE
check "SQLite with a write-ahead log (shared mmap): workload and integrity_check" sqlite_work WAL

# Special names and files that scripts rarely meet.
shapes() {
    mkdir "$MNT/shapes" && cd "$MNT/shapes" || return 1
    touch "$(printf 'n%.0s' $(seq 255))" $'new\nline' 'ünï cödé' ./-dash ' space ' || return 1
    ! touch "$(printf 'n%.0s' $(seq 256))" 2>/dev/null || return 1
    ln -s "$(printf 'x%.0s' $(seq 4000))" long-link || return 1
    [[ $(readlink long-link | wc -c) == 4001 ]] || return 1
    truncate -s 1T sparse && [[ $(stat -c '%s %b' sparse) == '1099511627776 0' ]] || return 1
    echo end | dd of=sparse bs=1 seek=1099511627770 conv=notrunc status=none || return 1
    [[ $(tail -c 6 sparse | tr -d '\0') == $'end' ]] || return 1
    mkfifo fifo && ln "$(printf 'n%.0s' $(seq 255))" hard && [[ $(stat -c %h hard) == 2 ]] || return 1
    setfattr -n user.colour -v blue hard && [[ $(getfattr --only-values -n user.colour hard) == blue ]] || return 1
    chmod 6755 hard && [[ $(stat -c %a hard) == 6755 ]] || return 1
    touch -d '1970-01-02 00:00:00.123456789 UTC' hard && [[ $(stat -c %.9Y hard) == 86400.123456789 ]]
}
check "long names, sparse files, links, xattrs, times" shapes
cd /

# Everything once more, after a stop and start.
sums() { (cd "$MNT" && find . -type f ! -name sparse ! -name '*-shm' -print0 | sort -z | xargs -0 sha256sum | sha256sum); }
before=$(sums)
entries_before=$(find "$MNT" | wc -l)
restart_all
check "after down and up: as many entries ($entries_before)" test "$(find "$MNT" | wc -l)" -eq "$entries_before"
check "after down and up: the same bytes" test "$(sums)" = "$before"
check "after down and up: metadata of the unpacked files" metadata_after
check "after down and up: git fsck" git -C "$MNT/clone" fsck --full --strict
check "after down and up: HEAD" test "$(git -C "$MNT/origin" rev-parse HEAD)" = "$(cat "$MNT/first-commit")"
check "after down and up: SQLite DELETE" sqlite_whole DELETE
check "after down and up: SQLite WAL" sqlite_whole WAL
check "after down and up: sparse file" test "$(stat -c %s "$MNT/shapes/sparse")" -eq 1099511627776
check "remove everything" rm -rf "$MNT/tree" "$MNT/origin" "$MNT/clone" "$MNT/shapes"
suite_end
