#!/usr/bin/env bash
# Prints the path of the tarball of a large source tree, fetched once from Debian's archive into the cache.
#
#   scripts/fetch-source.sh [PACKAGE]       default: postgresql-15 (8,400 entries; configures in seconds)
#
# Source packages are looked up in a private apt state, so that the system's own lists stay as they are.
# CUTTLEFS_SOURCE_TARBALL=FILE uses that file instead, for machines without a network.
set -euo pipefail
source "$(dirname "$0")/env.sh"

if [[ -n ${CUTTLEFS_SOURCE_TARBALL:-} ]]; then
    [[ -r $CUTTLEFS_SOURCE_TARBALL ]] || die "CUTTLEFS_SOURCE_TARBALL=$CUTTLEFS_SOURCE_TARBALL cannot be read"
    echo "$CUTTLEFS_SOURCE_TARBALL"
    exit
fi
package=${1:-postgresql-15}
cache=$CUTTLEFS_TOOLS/sources/$package
mkdir -p "$cache"
find_tarball() { find "$cache" -maxdepth 1 -name "*.orig.tar.*" ! -name '*.asc' -print -quit; }

tarball=$(find_tarball)
if [[ -z $tarball ]]; then
    command -v apt-get >/dev/null || die "no apt-get here; set CUTTLEFS_SOURCE_TARBALL to a tarball of a large source tree"
    keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    [[ -r $keyring ]] || die "$keyring is missing: install debian-archive-keyring, or set CUTTLEFS_SOURCE_TARBALL"
    state=$(mktemp -d)
    trap 'rm -rf "$state"' EXIT
    mkdir -p "$state/lists/partial" "$state/cache/archives/partial"
    # The Debian release that has a package of this name, whatever release runs here.
    echo "deb-src [signed-by=$keyring] http://deb.debian.org/debian bookworm main" >"$state/sources.list"
    options=(-o Dir::State::Lists="$state/lists" -o Dir::Cache="$state/cache"
        -o Dir::Etc::SourceList="$state/sources.list" -o Dir::Etc::SourceParts=/dev/null
        -o APT::Sandbox::User="$(id -un)" -o Acquire::Retries=3 -qq)
    say "fetching the source of $package (once)"
    apt-get "${options[@]}" update >&2
    # apt checks the archive's signature and the tarball's checksum. It is downloaded elsewhere and then moved, so that a broken download never gets
    # into the cache.
    (mkdir "$state/download" && cd "$state/download" && apt-get "${options[@]}" source --download-only "$package" >&2)
    mv "$state"/download/*.orig.tar.* "$cache/"
    tarball=$(find_tarball)
fi
[[ -n $tarball ]] || die "no tarball of $package was fetched"
echo "$tarball"
