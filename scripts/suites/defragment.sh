#!/usr/bin/env bash
# `cuttlefs defragment`: files that were written in turns lie in many runs, and in few afterwards, with the same bytes, times and space; also while they are
# written, and over a kill of the server.
# usage: defragment.sh [shm|tcp|unix]
source "$(dirname "$0")/lib.sh"
need_command python3
suite_begin defragment "${1:-shm}"
needs_server
# Less memory than the files have.
start_server 256M 16M
mount_fs
readonly FILES=$MNT/files OTHERS=$WORK/others

# Four files of 8 MiB, of which each gets a page in turn, synced each time: a run for each page.
interleave() {
    mkdir -p "$FILES/deep/er" && python3 - "$FILES" <<'END'
import os, random, sys

names = [sys.argv[1] + "/" + name for name in ("a", "b", "deep/c", "deep/er/d")]
files = [os.open(name, os.O_RDWR | os.O_CREAT, 0o644) for name in names]
chosen = random.Random(7)
for page in range(2048):
    for file in files:
        os.pwrite(file, chosen.randbytes(4096), page * 4096)
    if page % 16 == 15:
        [os.fsync(file) for file in files]
END
}
# A line for each file: its bytes, times and length.
seen() { (cd "$FILES" && find . -type f | sort | while read -r file; do echo "$(sha256sum "$file")" "$(stat -c '%s %y %z %b' "$file")"; done); }
# The runs before, and after, of all files.
runs() { sed -n 's/.*; \([0-9]*\) runs, \([0-9]*\) before$/\2 \1/p' "$WORK/said" | tail -1; }
defragment() { timeout 240 "$CUTTLEFS_BIN/cuttlefs" defragment "$@" >"$WORK/said" 2>"$WORK/errors" || { cat "$WORK/said" "$WORK/errors"; return 1; }; }
free_pages() { df -B4096 --output=avail "$MNT" | tail -1; }

check "files are written in turns" interleave
sync -f "$MNT"
before=$(seen) free=$(free_pages)
check "a folder is moved together" defragment --verbose "$FILES"
read -r was is < <(runs)
check "fewer runs: ${was:-none told}, then ${is:-none told}" test "${was:-0}" -gt 400 -a "${is:-0}" -le 40 -a "${is:-0}" -ge 4
check "bytes, times and lengths are as they were" test "$before" == "$(seen)"
sync -f "$MNT"
check "and so is the free space" test "$free" == "$(free_pages)"
check "what lies together is left alone" defragment "$FILES/a"
check "nothing was moved" grep -q '^1 files, 0 of them moved' "$WORK/said"
ln -s / "$FILES/out"
check "and so is a symbolic link out of the mount, by its target" bash -c "! '$CUTTLEFS_BIN/cuttlefs' defragment '$FILES/out' 2>'$OTHERS' && grep -q 'leads to /, which is not in the mount' '$OTHERS'"
rm "$FILES/out"
check "a path outside of mounts is refused" bash -c "! '$CUTTLEFS_BIN/cuttlefs' defragment /tmp 2>'$OTHERS' && grep -q 'in no mount' '$OTHERS'"

# Moved while it is written, over and over; every page stays whole.
rm -r "$FILES"
interleave
written() {
    python3 - "$FILES/a" "$WORK/over" <<'END'
import os, random, sys

file, end = os.open(sys.argv[1], os.O_RDWR), sys.argv[2]
chosen, known, rounds = random.Random(9), {}, 0
while rounds < 200 or not os.path.exists(end):
    rounds += 1
    page = chosen.randrange(2048)
    known[page] = chosen.randbytes(4096)
    os.pwrite(file, known[page], page * 4096)
    if rounds % 20 == 0:
        os.fsync(file)
    look = chosen.choice(list(known))
    assert os.pread(file, 4096, look * 4096) == known[look], look
os.fsync(file)
for page, wanted in known.items():
    os.posix_fadvise(file, page * 4096, 4096, os.POSIX_FADV_DONTNEED)
    assert os.pread(file, 4096, page * 4096) == wanted, page
END
}
written >"$WORK/written.log" 2>&1 &
writer=$!
check "a folder is moved while it is written" defragment "$FILES"
touch "$WORK/over"
wait "$writer"
status=$?
cat "$WORK/written.log"
check "its writer has read its own bytes" test "$status" == 0

# The server is killed in the midst of a move; the command goes on with the next one.
rm -r "$FILES"
interleave
sync -f "$MNT"
before=$(seen)
defragment "$FILES" &
moving=$!
sleep 0.3
kill_server
launch_server
check "a move outlives a kill of the server" wait "$moving"
check "and nothing is lost" test "$before" == "$(seen)"
suite_end
