#!/usr/bin/env bash
# Packs the Python module and libcuttlefs.so of $CUTTLEFS_BIN into a wheel, without a network. Its last line of output is the wheel.
# usage: scripts/wheel.sh [DIRECTORY]       default: $CARGO_TARGET_DIR/wheel
#
# Needs pip, and setuptools 70.1 or newer, of $CUTTLEFS_PYTHON (default: what setup.sh --tests made, or python3). Exit status 3, and a line that
# begins with `skipped: `, if they are missing.
set -euo pipefail
source "$(dirname "$0")/env.sh"

out=${1:-$CARGO_TARGET_DIR/wheel}
library=$CUTTLEFS_BIN/libcuttlefs.so
[[ -e $library ]] || die "no libcuttlefs.so in $CUTTLEFS_BIN; build it: cargo build --release -p cuttlefs-capi"
python=python3
[[ -x $CUTTLEFS_TOOLS/python/bin/python3 ]] && python=$CUTTLEFS_TOOLS/python/bin/python3
python=${CUTTLEFS_PYTHON:-$python}
"$python" -c 'import setuptools.command.bdist_wheel, pip' 2>/dev/null || {
    echo "skipped: $python has no pip, or no setuptools 70.1; run scripts/setup.sh --tests, or name another one by CUTTLEFS_PYTHON"
    exit 3
}
stage=$(mktemp -d)
trap 'rm -rf --one-file-system "$stage"' EXIT
mkdir -p "$stage/cuttlefs" "$stage/wheel" "$out"
cp "$ROOT"/fs-client/capi/python/{pyproject.toml,setup.py} "$stage"
cp "$ROOT/fs-client/capi/python/cuttlefs.py" "$stage/cuttlefs/__init__.py"
# Symbols for a debugger are most of a library.
strip --strip-debug -o "$stage/cuttlefs/libcuttlefs.so" "$library"
CUTTLEFS_VERSION=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$ROOT/Cargo.toml" | head -n 1)
export CUTTLEFS_VERSION
"$python" -m pip --quiet --disable-pip-version-check wheel --no-index --no-build-isolation --no-deps --wheel-dir "$stage/wheel" "$stage" >&2
for wheel in "$stage"/wheel/*.whl; do
    cp "$wheel" "$out"
    echo "$out/${wheel##*/}"
done
