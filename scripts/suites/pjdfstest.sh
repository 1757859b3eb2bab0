#!/usr/bin/env bash
# POSIX semantics: all of pjdfstest (the crates.io one), as root, with every feature that Linux has.
# usage: pjdfstest.sh [shm|tcp|unix|rdma] [TEST-PATTERN...]
source "$(dirname "$0")/lib.sh"
need_command pjdfstest
[[ $(id -u) == 0 ]] || die "pjdfstest switches users and must run as root"
# The EROFS tests run `mount -o remount`. mount(8) calls libfuse's helper (or cuttlefs's, if it is installed), which looks for `cuttlefs` only in the
# system's directories. So the binaries under test are put there, only for this suite's processes: in a mount namespace of its own.
if [[ -z ${CUTTLEFS_SUITE_NAMESPACE:-} ]] && ! on_directory; then
    CUTTLEFS_SUITE_NAMESPACE=1 exec unshare --mount --propagation private -- "$0" "$@"
fi
on_directory || drop_copied_mounts
on_directory || mount --bind "$CUTTLEFS_BIN" /usr/local/sbin || die "cannot bind $CUTTLEFS_BIN to /usr/local/sbin"
suite_begin pjdfstest "${1:-shm}"
shift $(($# ? 1 : 0))
start_server 1G 128M
# The tests use set-id bits and devices, which a mount ignores by default.
mount_fs "$MNT" suid,dev
chmod 755 "$MNT"

# EXDEV needs another file system: that of the working directory, unless the tests run on it.
secondary=$WORK/secondary
on_directory && secondary=$(mktemp -d /dev/shm/cuttlefs-suite.XXXXXX)
mkdir -p "$secondary"

# run PASS ALLOW-REMOUNT [PATTERN...]: adds the results to PASSED and FAILED, and the skipped tests to skipped.
skipped=0
run() {
    local pass=$1 allow_remount=$2 status summary
    shift 2
    # Two users that every Debian has, so that none must be added. File flags, NFSv4 ACLs and birth times through st_birthtime are FreeBSD's; tests
    # that need them are not built on Linux.
    cat >"$WORK/pjdfstest.toml" <<TOML
[features]
posix_fallocate = {}
rename_ctime = {}
utime_now = {}
utimensat = {}

[settings]
# Longer than the timestamps' granularity.
naptime = ${CUTTLEFS_PJDFS_NAPTIME:-0.02}
allow_remount = $allow_remount

[dummy_auth]
entries = [["nobody", "$(id -gn nobody)"], ["daemon", "$(id -gn daemon)"]]
TOML
    pjdfstest -c "$WORK/pjdfstest.toml" -p "$MNT" -s "$secondary" -- "$@" >"$WORK/pjdfstest.out" 2>&1
    status=$?
    # Without colours, if the library added any.
    sed -i 's/\x1b\[[0-9;]*m//g' "$WORK/pjdfstest.out"
    grep -A3 -E '(FAILED|PASSED UNEXPECTEDLY)$' "$WORK/pjdfstest.out"
    # The first pass skips the EROFS tests on purpose.
    grep -A1 -E ' skipped$' "$WORK/pjdfstest.out" | grep -v -e erofs -e allow_remount -e ' ok$' -e '^--$'
    summary=$(grep '^Summary:' "$WORK/pjdfstest.out")
    if [[ ! $summary =~ ^Summary:\ ([0-9]+)\ failed,\ ([0-9]+)\ skipped,\ ([0-9]+)\ passed, ]]; then
        tail -n "$LOG_TAIL_LINES" "$WORK/pjdfstest.out"
        fail "$pass: pjdfstest did not reach its end (exit status $status)"
        return
    fi
    echo "$pass over $LINK: ${summary#Summary: }"
    FAILED=$((FAILED + BASH_REMATCH[1]))
    skipped=$((skipped + BASH_REMATCH[2]))
    PASSED=$((PASSED + BASH_REMATCH[3]))
}

# cuttlefs's own limit of hard links of a file.
readonly LINK_MAX=65000
link_count_max() {
    python3 - "$MNT" $LINK_MAX <<'PYTHON'
import errno, os, sys
root, link_max = os.path.join(sys.argv[1], "links"), int(sys.argv[2])
os.mkdir(root)
name = lambda number: f"{root}/{number}"
open(name(1), "x").close()
for number in range(2, link_max + 1):
    os.link(name(1), name(number))
assert os.stat(name(1)).st_nlink == link_max
try:
    os.link(name(1), name(0))
    raise SystemExit("one link more was made")
except OSError as error:
    assert error.errno == errno.EMLINK, error
assert not os.path.lexists(name(0))
os.unlink(name(2))
os.link(name(1), name(0))
PYTHON
}

# The EROFS tests remount the file system that they run on, so they need a mount of their own. They run apart from the others, because pjdfstest still
# holds descriptors of those, and a file system with writers cannot become read-only.
run "all but EROFS" false "$@"
if (($# == 0)) && ! on_directory; then
    skipped_before=$skipped
    run "EROFS" true erofs
    # The second pass runs the tests that the first skipped on purpose. One more test is always skipped: link_count_max asks pathconf(3) for the
    # limit, which glibc does not know for FUSE file systems. It is checked below.
    check "no other test was skipped" test "$skipped_before" -eq 14 -a "$skipped" -eq 14
    check "the last link fails with EMLINK, and then one can be made again" link_count_max
fi
on_directory && rmdir "$secondary"
suite_end
