#!/usr/bin/env bash
# Gets libibverbs and librdmacm of Debian 13 (rdma-core 56, which has FLUSH), with the C library that they were built for, once, into
# $CUTTLEFS_TOOLS/vm/verbs. Installs nothing, and does not change this machine's package lists. Prints the directory. Exit status 3: they cannot be
# fetched here.
source "$(dirname "$0")/../env.sh"
set -uo pipefail

unavailable() {
    printf 'no newer libibverbs: %s\n' "$*" >&2
    exit 3
}
command -v apt-get >/dev/null || unavailable "apt-get is missing"
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[[ -e $keys ]] || unavailable "$keys is missing; install debian-archive-keyring"
folder=$CUTTLEFS_TOOLS/vm/verbs
mkdir -p "$CUTTLEFS_TOOLS/vm" || exit 1
exec 9>"$CUTTLEFS_TOOLS/vm/lock"
flock 9
if [[ ! -e $folder/complete ]]; then
    rm -rf "$folder"
    mkdir -p "$folder"/apt/{lists,cache} "$folder/debs"
    say "fetching a newer libibverbs into $folder (once)"
    # The mirror that this machine uses.
    mirror=$(apt-cache policy | sed -n 's|^ *[0-9]* \(http[^ ]*\) bookworm/main .*|\1|p' | head -n 1)
    echo "deb [signed-by=$keys] ${mirror:-http://deb.debian.org/debian} trixie main" >"$folder/apt/sources.list"
    options=(-o "Dir::State::Lists=$folder/apt/lists" -o "Dir::Cache=$folder/apt/cache" -o "Dir::Etc::SourceList=$folder/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null -o APT::Sandbox::User=root -q)
    apt-get "${options[@]}" update >&2 || unavailable "apt-get update failed"
    (cd "$folder/debs" && apt-get "${options[@]}" download libc6/trixie libibverbs1/trixie ibverbs-providers/trixie librdmacm1t64/trixie \
        libnl-3-200/trixie libnl-route-3-200/trixie >&2) || unavailable "the packages cannot be downloaded"
    for package in "$folder"/debs/*.deb; do
        dpkg-deb -x "$package" "$folder/root" || unavailable "$package cannot be unpacked"
    done
    rm -rf "$folder/apt" "$folder/debs"
    touch "$folder/complete"
fi
echo "$folder/root"
