#!/usr/bin/env bash
# Make .venv at the top of the repository and install the package into it, where that is not done.
#
#   tools/venv.sh [extra [oldest]]      extra: an optional dependency group, such as dev;
#                                       oldest: .venv-oldest, with the oldest torch that is allowed
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
extra=${1:-}
venv=$root/.venv
pins=()
if [ "${2:-}" = oldest ]; then
    venv=$root/.venv-oldest
    torch=$(sed -n 's/.*"torch>=\([0-9.]*\),.*/\1/p' "$root/pyproject.toml")
    # The interpreter of that torch's Triton (3.6) fails with numpy 2.4; compiled kernels do not.
    pins=("torch==$torch" "numpy<2.4")
fi
# The stamp holds what was installed, so that a changed pyproject.toml installs again.
stamp=$venv/installed${extra:+-$extra}

find_python() {
    local candidate
    for candidate in python3 python3.12 python3.11; do
        if "$candidate" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' \
            2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "tools/venv.sh: error: no Python 3.11 or newer with venv and ensurepip was found;" \
        "install one (Debian: python3-venv)" >&2
    return 1
}

for installed in "$stamp" "$venv/installed-dev"; do
    if cmp --silent "$root/pyproject.toml" "$installed"; then exit; fi
done
if [ -L "$venv" ]; then # another checkout's, which would be given this one's package
    echo "tools/venv.sh: ${venv##*/} is a link and is left as it is;" \
        "pyproject.toml has changed since" >&2
    exit
fi
echo "installing into ${venv##*/} (once)"
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python3=$(find_python)
    "$python3" -m venv --clear "$venv"
fi
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    -e "$root${extra:+[$extra]}" ${pins[@]+"${pins[@]}"}
cp "$root/pyproject.toml" "$stamp"
