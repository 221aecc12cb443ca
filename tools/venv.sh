#!/usr/bin/env bash
# Make .venv at the top of the repository and install the package into it, where that is not done.
#
#   tools/venv.sh [extra [oldest]]      extra: an optional dependency group, such as dev;
#                                       oldest: .venv-oldest, with the oldest torch that is allowed
#
# Versions and digests are those of requirements/ (tools/lock.py), wheels only: no package's own code runs while it is
# installed. Without a network: PIP_NO_INDEX=1 PIP_FIND_LINKS=<directory of wheels>.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
extra=${1:-}
venv=$root/.venv
if [ "${2:-}" = oldest ]; then venv=$root/.venv-oldest; fi
# The stamp holds what was installed, so that a changed pyproject.toml or lock installs again.
stamp=$venv/installed${extra:+-$extra}
wanted() {
    cat "$root/pyproject.toml" "$root/requirements/hashed.txt" "$root/requirements/pinned.txt"
}

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

install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

install_locked() {
    "$venv/bin/python" "$root/tools/lock.py" select "$work" ${extra:+--extra "$extra"} &&
        install --require-hashes --no-deps --only-binary :all: --requirement "$work/hashed.txt" &&
        # With what this index's build of torch asks for: CUDA's libraries, or nothing.
        install --only-binary :all: --requirement "$work/pinned.txt" \
            --constraint "$root/requirements/pinned.txt" &&
        install --no-deps --no-build-isolation --editable "$root"
}

install_oldest() { # not by the lock, which has one torch; what else this one goes with is found anew
    local torch
    torch=$(sed -n 's/.*"torch>=\([0-9.]*\),.*/\1/p' "$root/pyproject.toml")
    # The interpreter of that torch's Triton (3.6) fails with numpy 2.4; compiled kernels do not.
    install --editable "$root${extra:+[$extra]}" "torch==$torch" "numpy<2.4"
}

for installed in "$stamp" "$venv/installed-dev"; do
    if wanted | cmp --silent - "$installed"; then exit; fi
done
if [ -L "$venv" ]; then # another checkout's, which would be given this one's package
    echo "tools/venv.sh: ${venv##*/} is a link and is left as it is;" \
        "pyproject.toml or requirements/ have changed since" >&2
    exit
fi
echo "installing into ${venv##*/} (once)"
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python3=$(find_python)
    "$python3" -m venv --clear "$venv"
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ "${2:-}" = oldest ]; then install_oldest; else install_locked; fi || {
    echo "tools/venv.sh: error: ${venv##*/} is not complete; why, stands above. A digest that differs from the lock's" \
        "is another file than the one that was tested: find out whose before you renew the lock (make lock)" >&2
    exit 1
}
wanted >"$stamp"
