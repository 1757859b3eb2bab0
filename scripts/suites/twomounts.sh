#!/usr/bin/env bash
# Two mounts of one server: an open on one mount sees everything that was closed on the other before.
# usage: twomounts.sh [shm|tcp|unix]
source "$(dirname "$0")/lib.sh"
suite_begin twomounts "${1:-shm}"
start_server 512M 64M
mount_fs
if on_directory; then
    OTHER=$MNT
else
    OTHER=$WORK/other
    mount_fs "$OTHER"
fi
# Names and attributes may be cached for a second.
readonly CACHE_LIFE_S=1.2

# An open through one mount reads the contents that were written and closed through the other, also if it has old pages of the file cached; for many
# versions of growing, shrinking and equal length.
close_to_open() {
    local version length sum
    for version in $(seq 1 40); do
        length=$((RANDOM % 300000 + 1))
        # Every third version keeps its length: only the change counter shows the change.
        ((version % 3 == 0)) && length=100000
        head -c "$length" /dev/urandom >"$WORK/version"
        cat "$WORK/version" >"$MNT/shared" || return 1
        sum=$(sha256sum <"$WORK/version")
        # Attributes may be a second old when a path is walked, but an open must see the new contents.
        [[ $(sha256sum <"$OTHER/shared") == "$sum" ]] || {
            echo "version $version, $length bytes: the other mount reads something else after open"
            return 1
        }
    done
}
check "close-to-open of one file, 40 versions" close_to_open

# The length is the current one after an open, too, also if the mount has attributes that are still valid for a while.
length_at_open() {
    python3 - "$MNT" "$OTHER" <<'PYTHON'
import mmap, os, sys
here, other = sys.argv[1:]
ways = {
    "fstat": lambda fd: os.fstat(fd).st_size,
    "seek": lambda fd: os.lseek(fd, 0, os.SEEK_END),
    "read": lambda fd: len(os.pread(fd, 1 << 20, 0)),
    "mmap": lambda fd: len(mmap.mmap(fd, 0, prot=mmap.PROT_READ)),
    "append": lambda fd: os.lseek(fd, 0, os.SEEK_END),
}
for version, (way, length_of) in enumerate(list(ways.items()) * 10):
    name = f"length.{way}.{version % 3}"
    # The file is made, or seen, through this mount.
    with open(f"{here}/{name}", "ab") as file:
        assert os.fstat(file.fileno()).st_size == os.stat(f"{here}/{name}").st_size
    wanted = 1 + 7919 * (version * 37 % 50)
    with open(f"{other}/{name}", "wb") as file:
        file.write(b"x" * wanted)
    fd = os.open(f"{here}/{name}", os.O_RDWR | (os.O_APPEND if way == "append" else 0))
    got = length_of(fd)
    os.close(fd)
    if got != wanted:
        sys.exit(f"{name}: {way} gives {got} right behind open, and {wanted} bytes were closed at the other mount")
PYTHON
}
check "the length at an open is what the other mount has closed" length_at_open

both_ways() {
    local round
    for round in $(seq 1 20); do
        echo "left $round" >"$MNT/ping" && [[ $(cat "$OTHER/ping") == "left $round" ]] || return 1
        echo "right $round $RANDOM" >"$OTHER/ping" && [[ $(cat "$MNT/ping") == "$(cat "$OTHER/ping")" ]] || return 1
    done
}
check "writers on both sides in turn" both_ways

# If another mount has removed a name, the next open of it fails; if the name was given to another file, the open gets that file. This holds also
# within the cache's lifetime, and while somebody has the old file open. A program that has the old file open can open it again.
opened_by_old_names() {
    python3 - "$MNT" "$OTHER" <<'PYTHON'
import os, sys
here, other = sys.argv[1:]
def write(path, what):
    with open(path, "w") as file:
        file.write(what)
for number in range(20):
    name = f"name.{number}"
    write(f"{other}/{name}", "old")
    assert os.stat(f"{here}/{name}").st_size == 3
    held = os.open(f"{other}/{name}", os.O_RDWR)
    if number % 2:
        os.unlink(f"{other}/{name}")
        for flags in (os.O_RDONLY, os.O_RDWR, os.O_RDWR | os.O_TRUNC):
            try:
                os.open(f"{here}/{name}", flags)
                sys.exit(f"{name}: removed at the other mount, and opened by {flags}")
            except FileNotFoundError:
                pass
    else:
        write(f"{other}/new", "newer")
        os.rename(f"{other}/new", f"{other}/{name}")
        with open(f"{here}/{name}") as file:
            assert file.read() == "newer", f"{name}: another file was put in its place"
    assert os.pread(held, 10, 0) == b"old"
    os.close(held)
for mine, theirs in ((here, here), (here, other)):
    write(f"{mine}/held", "held")
    held = os.open(f"{mine}/held", os.O_RDWR)
    os.unlink(f"{theirs}/held")
    again = os.open(f"/proc/self/fd/{held}", os.O_RDWR)
    assert os.pread(again, 10, 0) == b"held"
    os.close(again)
    os.close(held)
PYTHON
}
check "a name that is removed or given away elsewhere leads to no file that was there" opened_by_old_names

# The same holds for a name that another mount has moved away: the moved file is not opened, cut or appended to by its old name. A program that has
# the moved file open can open it again, and a file with two names can be opened by the remaining one.
opened_by_moved_names() {
    python3 - "$MNT" "$OTHER" <<'PYTHON'
import ctypes, os, sys
here, other = sys.argv[1:]
def write(path, what):
    with open(path, "w") as file:
        file.write(what)
def read(path):
    with open(path) as file:
        return file.read()
exchange = lambda one, two: ctypes.CDLL(None).renameat2(-100, one.encode(), -100, two.encode(), 2)
for number in range(20):
    old, new = f"tmp.{number}", f"published.{number}"
    write(f"{other}/{old}", "published")
    assert os.stat(f"{here}/{old}").st_size == 9
    if number % 5 == 4:
        write(f"{other}/{new}", "second")
        assert exchange(f"{other}/{old}", f"{other}/{new}") == 0
        assert read(f"{here}/{old}") == "second", "exchanged"
        continue
    os.rename(f"{other}/{old}", f"{other}/{new}")
    if number % 5 == 3:
        try:
            read(f"{here}/{old}")
            sys.exit("moved away, and read by its old name")
        except FileNotFoundError:
            continue
    flags = (os.O_CREAT, os.O_CREAT | os.O_TRUNC, os.O_CREAT | os.O_APPEND)[number % 5]
    fd = os.open(f"{here}/{old}", os.O_WRONLY | flags)
    os.write(fd, b"mine")
    os.close(fd)
    assert read(f"{other}/{new}") == "published", f"flags {flags:o}: written through a name that was moved away"
    assert read(f"{here}/{old}") == "mine"
write(f"{here}/held", "held")
held = os.open(f"{here}/held", os.O_RDWR)
os.rename(f"{other}/held", f"{other}/moved")
again = os.open(f"/proc/self/fd/{held}", os.O_RDWR)
assert os.pread(again, 10, 0) == b"held"
write(f"{here}/one", "both")
os.link(f"{here}/one", f"{here}/two")
os.unlink(f"{other}/one")
assert read(f"{here}/two") == "both"
for number in range(5):
    os.rename(f"{here}/two", f"{here}/three")
    assert read(f"{here}/three") == "both", "moved here"
    os.rename(f"{here}/three", f"{here}/two")
    assert read(f"{here}/two") == "both", "and back"
PYTHON
}
check "a name that was moved elsewhere leads to no file that it led to" opened_by_moved_names

# Whatever happened to a file's names before, and whichever of them was looked up: an open by a name gets the file that has the name now.
opened_by_one_of_several_names() {
    python3 - "$MNT" "$OTHER" <<'PYTHON'
import itertools, os, sys
here, other = sys.argv[1:]
def write(path, what):
    with open(path, "w") as file:
        file.write(what)
def read(path):
    with open(path) as file:
        return file.read()
before = {
    "nothing": lambda a, z: None,
    "moved away and back": lambda a, z: (os.rename(a, z), os.rename(z, a)),
    "linked": os.link,
    "linked and unlinked": lambda a, z: (os.link(a, z), os.unlink(z)),
    "mode": lambda a, z: os.chmod(a, 0o600),
}
def replace(a, new):
    write(f"{a}.tmp", "new")
    os.rename(f"{a}.tmp", a)
then = {"moved": os.rename, "replaced": replace, "removed": lambda a, new: os.unlink(a)}
wrong = []
for round, first, look, second, cut in itertools.product(range(3), before, (False, True), then, (False, True)):
    name = f"several.{round}.{first}.{look}.{second}.{cut}".replace(" ", "-")
    write(f"{other}/{name}", "old")
    assert read(f"{here}/{name}") == "old"
    before[first](f"{other}/{name}", f"{other}/{name}.z")
    assert read(f"{here}/{name}") == "old"
    if look:
        # Another name of the same file is opened, or does not exist.
        try:
            read(f"{here}/{name}.z")
        except FileNotFoundError:
            pass
    then[second](f"{other}/{name}", f"{other}/{name}.n")
    if look and first == "linked":
        assert read(f"{here}/{name}.z") == "old"
    try:
        if cut:
            fd = os.open(f"{here}/{name}", os.O_RDWR | os.O_TRUNC)
            os.write(fd, b"mine")
            os.close(fd)
            kept = [f"{other}/{name}{end}" for end in (".z", ".n") if os.path.exists(f"{other}/{name}{end}")]
            got = "mine" if second == "replaced" and all(read(path) == "old" for path in kept) else "another file"
            wanted = "mine"
        else:
            got, wanted = read(f"{here}/{name}"), "new"
    except FileNotFoundError:
        got = wanted = None
        assert second != "replaced", name
    if got != wanted:
        wrong.append(name)
assert not wrong, f"{len(wrong)} opens led to a file that had lost the name: {wrong[:5]}"
PYTHON
}
check "a name leads to no file that lost it, whatever its other names are" opened_by_one_of_several_names

# An open of a file that others move to and fro all the time gets the file or ENOENT; a file that only loses additional names is always found. A third
# mount opens, which always asks the server about missing names: otherwise most opens would find nothing.
moved_to_and_fro() {
    python3 - "$MNT" "$ASKING" <<'PYTHON'
import os, sys, time
here, other = sys.argv[1:]
for name in "to", "stays":
    open(f"{here}/{name}", "w").close()
end = time.monotonic() + 2
if os.fork() == 0:
    while time.monotonic() < end:
        os.rename(f"{here}/to", f"{here}/fro")
        os.rename(f"{here}/fro", f"{here}/to")
        os.link(f"{here}/stays", f"{here}/second")
        os.rename(f"{here}/second", f"{here}/third")
        os.unlink(f"{here}/third")
    os._exit(0)
opened = 0
while time.monotonic() < end:
    try:
        os.close(os.open(f"{other}/to", os.O_RDWR))
    except FileNotFoundError:
        pass
    os.close(os.open(f"{other}/stays", os.O_RDWR))
    opened += 1
os.wait()
assert opened > 100, f"{opened} opens"
PYTHON
}
if on_directory; then
    ASKING=$MNT
else
    ASKING=$WORK/asking
    mount_fs "$ASKING" negative_cache=0
fi
check "a file that is moved to and fro elsewhere is opened, or is not there" moved_to_and_fro
on_directory || umount_fs "$ASKING"

# Random changes of names through either mount, one after the other: an open gets the file that has the name, or ENOENT if there is none (a missing
# name may be cached for a second), and nothing else. One open in a hundred may fail with ESTALE and succeed at the next try (README, limits). CUTTLEFS_NAMES_SECONDS is the duration; CUTTLEFS_NAMES_SEED repeats one walk.
random_names() {
    python3 - "$MNT" "$OTHER" "${CUTTLEFS_NAMES_SECONDS:-10}" "${CUTTLEFS_NAMES_SEED:-$RANDOM$RANDOM}" <<'PYTHON'
import ctypes, errno, os, random, sys, time
*mounts, seconds, seed = sys.argv[1:]
chance = random.Random(int(seed))
exchange = lambda one, two: ctypes.CDLL(None, use_errno=True).renameat2(-100, one.encode(), -100, two.encode(), 2)
end, walks, opens, stale = time.monotonic() + float(seconds), 0, 0, 0
while time.monotonic() < end:
    walks += 1
    top = f"names.{walks}"
    os.makedirs(f"{mounts[0]}/{top}/below")
    while not os.path.isdir(f"{mounts[1]}/{top}/below"):
        time.sleep(0.05)
    names, model, held, told = ["a", "b", "c", "below/a", "below/b"], {}, [], []
    def opened(mount, name, flags):
        """The number of what an open gets; 0: nothing."""
        global opens, stale
        opens += 1
        try:
            try:
                fd = os.open(f"{mount}/{top}/{name}", flags)
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
                stale += 1
                fd = os.open(f"{mount}/{top}/{name}", flags)
        except FileNotFoundError:
            return 0
        got = os.fstat(fd).st_ino
        assert got == model.get(name), f"walk {walks} of seed {seed}: {told} got {got}, names are {model}"
        if flags & os.O_TRUNC:
            os.write(fd, b"mine")
        held.append(fd)
        if len(held) > 3:
            os.close(held.pop(chance.randrange(4)))
        return got
    for _ in range(100):
        mount, name, other = chance.choice(mounts), chance.choice(names), chance.choice(names)
        what = chance.choice(["open", "open", "cut", "create", "replace", "rename", "rename", "exchange", "link", "unlink", "stat"])
        told.append((what, mounts.index(mount), name, other))
        path, to = f"{mount}/{top}/{name}", f"{mount}/{top}/{other}"
        if what in ("open", "cut"):
            opened(mount, name, os.O_RDWR | (os.O_TRUNC if what == "cut" else 0))
        elif what in ("create", "replace"):
            new = path if what == "create" else f"{path}.new"
            try:
                fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                assert name in model, f"walk {walks} of seed {seed}: {told}"
                continue
            made = os.fstat(fd).st_ino
            os.close(fd)
            if new != path:
                os.rename(new, path)
            model[name] = made
        elif what in ("rename", "exchange", "link"):
            # By names that the mount has cached correctly.
            known = all(opened(mount, which, os.O_RDONLY) == model.get(which, 0) for which in (name, other))
            if not known or name == other or name not in model or (what == "exchange") != (other in model) and what != "rename":
                continue
            if what == "link":
                os.link(path, to)
                model[other] = model[name]
            elif what == "exchange":
                assert exchange(path, to) == 0, f"walk {walks} of seed {seed}: {told}"
                model[name], model[other] = model[other], model[name]
            else:
                os.rename(path, to)
                same = model[name] == model.get(other)
                model[other] = model[name]
                if not same:
                    del model[name]
        elif what == "unlink" and opened(mount, name, os.O_RDONLY):
            os.unlink(path)
            del model[name]
        elif what == "stat":
            try:
                os.stat(path)
            except FileNotFoundError:
                pass
    for fd in held:
        os.close(fd)
print(f"{walks} walks, {opens} opens, {stale} of them with ESTALE first")
assert stale <= 2 + opens / 100, f"{stale} of {opens} opens failed with ESTALE"
PYTHON
}
check "random names by either mount: an open gets what has the name" random_names

names() {
    mkdir "$MNT/dir" && touch "$MNT/dir/a" "$MNT/dir/b" || return 1
    sleep "$CACHE_LIFE_S"
    [[ $(ls "$OTHER/dir") == $'a\nb' ]] || return 1
    mv "$OTHER/dir/a" "$OTHER/dir/c" && rm "$OTHER/dir/b" || return 1
    sleep "$CACHE_LIFE_S"
    [[ $(ls "$MNT/dir") == c ]] || return 1
    [[ ! -e $MNT/dir/a && ! -e $MNT/dir/b && -e $MNT/dir/c ]]
}
check "names made, moved and removed are seen within the cache's life" names

attributes() {
    touch "$MNT/attributes" && chmod 640 "$MNT/attributes" && truncate -s 12345 "$MNT/attributes" || return 1
    sleep "$CACHE_LIFE_S"
    [[ $(stat -c '%a %s' "$OTHER/attributes") == '640 12345' ]]
}
check "mode and size are seen within the cache's life" attributes

# A file that is removed through one mount while it is open through the other keeps its bytes until it is closed.
unlinked_while_open() {
    head -c 200000 /dev/urandom >"$WORK/kept" && cp "$WORK/kept" "$MNT/doomed" || return 1
    exec 9<"$OTHER/doomed" || return 1
    rm "$MNT/doomed"
    local same=0
    cmp -s "$WORK/kept" - <&9 || same=1
    exec 9<&-
    return $same
}
check "a file unlinked elsewhere stays readable while open" unlinked_while_open

exclusive_create() {
    local round winners
    for round in $(seq 1 30); do
        (set -C; echo left >"$MNT/lock.$round") 2>/dev/null &
        local left=$!
        (set -C; echo right >"$OTHER/lock.$round") 2>/dev/null &
        local right=$!
        winners=0
        wait "$left" && winners=$((winners + 1))
        wait "$right" && winners=$((winners + 1))
        ((winners == 1)) || {
            echo "round $round: $winners winners"
            return 1
        }
    done
}
check "O_EXCL has one winner of two mounts" exclusive_create

# Both mounts append through O_APPEND: every line is there, complete.
appends() {
    local n=200
    : >"$MNT/log" || return 1
    (for i in $(seq 1 $n); do echo "left  $i" >>"$MNT/log" || exit 1; done) &
    local left=$!
    (for i in $(seq 1 $n); do echo "right $i" >>"$OTHER/log" || exit 1; done) &
    local right=$!
    wait "$left" && wait "$right" || return 1
    [[ $(grep -cE '^(left  |right )[0-9]+$' "$MNT/log") == $((2 * n)) && $(wc -l <"$MNT/log") == $((2 * n)) ]] || {
        echo "$(wc -l <"$MNT/log") lines of $((2 * n))"
        return 1
    }
}
check "O_APPEND from two mounts loses nothing" appends

# Records of all sizes, from memory at any offset, in one part or many: each is there, complete.
check "records of two mounts' writers are whole" \
    python3 "$(dirname "$0")/appends.py" "${CUTTLEFS_APPENDS:-60}" "$MNT/records" "$OTHER/records"
suite_end
