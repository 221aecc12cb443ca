#!/usr/bin/env bash
# Make .venv at the top of the repository and install the package into it, where that is not done.
#
#   tools/venv.sh [extra [oldest]]      extra: an optional dependency group, such as dev;
#                                       oldest: .venv-oldest, with the oldest torch that is allowed
#
# Versions and digests are those of requirements/ (tools/lock.py), wheels only: no package's own code runs while it is
# installed. By uv where it is on PATH and its settings lead to all of them, else by pip. Without a network:
# PIP_NO_INDEX=1 PIP_FIND_LINKS=<directory of wheels>. Without a GPU torch's CPU build is taken where an index of
# yours has it; TORCH_INDEX=<address> is one more index, for torch alone.
set -euo pipefail
export PYTHONSAFEPATH=1 # the current directory may be another user's: no code is looked for there

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=benchmarks/bert/implementations/pytorch/launch/ticking.sh
. "$root/benchmarks/bert/implementations/pytorch/launch/ticking.sh" # ticking, end_ticker
extra=${1:-}
venv=$root/.venv
if [ "${2:-}" = oldest ]; then venv=$root/.venv-oldest; fi
name=${venv##*/}
torch_index=(${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"})
# The stamp holds what was installed, so that a changed pyproject.toml or lock installs again.
stamp=$venv/installed${extra:+-$extra}
wanted() {
    cat "$root/pyproject.toml" "$root/requirements/hashed.txt" "$root/requirements/pinned.txt"
}

fail() {
    echo "tools/venv.sh: error: $1" >&2
    exit 2
}

find_python() { # the usual one, else those that were tried, else any newer one on PATH
    local candidate newer
    newer=$(compgen -c python3. | grep -xE 'python3\.[0-9]+' | sort -u -t. -k2n || true)
    for candidate in python3 python3.12 python3.11 python3.13 $newer; do
        if "$candidate" -c 'import sys; sys.version_info < (3, 11) and sys.exit(1); import ensurepip, venv' \
            2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer with venv and ensurepip is on PATH; install one (Debian: python3-venv)"
}

# What pip's files and variables set goes on to count (an index, a proxy), but for what would install elsewhere.
keep_pip_here() {
    local settings name value
    settings=$("$venv/bin/python" -m pip config list 2>/dev/null || true)
    grep -qE "^[a-z:.]+\.(user|target|prefix|root|require-virtualenv|dry-run|ignore-installed)=" <<<"$settings" || return 0
    while IFS='=' read -r name value; do
        case $name in *.*.*) continue ;; global.* | install.*) ;; *) continue ;; esac
        name=PIP_$(tr 'a-z-' 'A-Z_' <<<"${name#*.}")
        value=${value#[\'\"]} value=${value%[\'\"]}
        [ -n "${!name:-}" ] || export "$name=${value//\\n/ }"
    done < <(sort -r <<<"$settings") # what is set for install counts before what is for all
    unset PIP_USER PIP_TARGET PIP_PREFIX PIP_ROOT PIP_REQUIRE_VIRTUALENV PIP_DRY_RUN PIP_IGNORE_INSTALLED
    export PIP_CONFIG_FILE=/dev/null
    echo "pip's settings that install elsewhere do not count here: $(grep -oE '\.(user|target|prefix|root|require-virtualenv|dry-run|ignore-installed)=' <<<"$settings" | tr -d '.=' | sort -u | tr '\n' ' ')"
}

by_pip() {
    "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar=off "$@"
} >>"$log" 2>&1

by_uv() {
    uv pip install --python "$venv/bin/python" "$@"
} >>"$log" 2>&1

so_far() { # words on an installation that goes on
    local fetched placed megabytes last
    fetched=$(grep -cE '^(Collecting| *Downloaded) ' "$log" || true)
    placed=$(find "$venv"/lib/python*/site-packages -maxdepth 1 -name '*.dist-info' ! -name 'pip-*' | wc -l)
    megabytes=$(du -sm "$venv" 2>/dev/null | cut -f1)
    last=$(grep -E '^ *(Collecting|Downloading|Installing|Preparing) ' "$log" | tail -n 1 | sed 's/^ *//; s/ (from .*//')
    if [ "$placed" -gt 0 ]; then fetched="$placed in place"; else fetched="$fetched fetched"; fi
    echo "installing: $fetched, $megabytes MB${on_disk:+ of about $on_disk}; ${last:0:40}"
}

has_gpu() {
    [ -e /dev/nvidiactl ] || nvidia-smi -L >/dev/null 2>&1
}

choose() { # sets installer and build (of torch), and says which and why
    local torch offers=
    torch=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' "$root/requirements/pinned.txt")
    installer=by_pip build='' why="torch $torch for this machine's GPU"
    [ -n "${PIP_NO_INDEX:-}" ] || ! command -v uv >/dev/null || installer=by_uv
    if ! has_gpu; then
        why="no GPU: torch $torch for CPUs"
        if [ "$installer" = by_uv ] && UV_HTTP_TIMEOUT=5 UV_HTTP_RETRIES=1 \
            by_uv --dry-run --no-deps ${torch_index[@]+"${torch_index[@]}"} "torch==$torch+cpu"; then
            build=cpu
        else
            offers=$("$venv/bin/python" -m pip index versions --timeout 5 --retries 1 torch ${torch_index[@]+"${torch_index[@]}"} 2>/dev/null || true)
            if [[ $offers == *" $torch+cpu"[,$'\n']* ]]; then installer=by_pip build=cpu; fi
        fi
        [ -n "$build" ] ||
            why="no GPU, but torch $torch with CUDA's libraries: no index here has a CPU build, TORCH_INDEX may name one"
    fi
    why+=", by ${installer#by_}"
}

install_by() { # by_pip or by_uv: what was selected
    "$1" --require-hashes --no-deps --only-binary :all: --requirement "$work/hashed.txt" &&
        # With what this index's build of torch asks for: CUDA's libraries, or nothing.
        "$1" --only-binary :all: --requirement "$work/pinned.txt" ${torch_index[@]+"${torch_index[@]}"} \
            --constraint "$root/requirements/pinned.txt" &&
        "$1" --no-deps --no-build-isolation --editable "$root"
}

install_locked() {
    local fetched
    ticking "echo asking the index for torch" choose
    "$venv/bin/python" "$root/tools/lock.py" select "$work" ${extra:+--extra "$extra"} ${build:+--torch "$build"} || exit
    # Sizes of the wheels for Linux on x86-64 without an extra, 2026-11-23.
    fetched="about 340 MB from the network" on_disk=1400
    [ "$build" = cpu ] || { fetched="about 2,900 MB from the network" on_disk=; }
    [ -z "$extra" ] || { fetched="for $extra" on_disk=; }
    echo "installing packages into $name (once), $fetched${on_disk:+, $on_disk MB on disk}; $why"
    if [ "$installer" = by_uv ] && ! ticking so_far install_by by_uv; then
        echo "uv cannot install what the lock names ($(reason)): pip does"
        installer=by_pip
        : >"$log"
    fi
    [ "$installer" = by_uv ] || ticking so_far install_by by_pip
}

install_oldest() { # not by the lock, which has one torch; what else this one goes with is found anew
    local torch
    torch=$(sed -n 's/.*"torch>=\([0-9.]*\),.*/\1/p' "$root/pyproject.toml")
    on_disk=
    # The interpreter of that torch's Triton (3.6) fails with numpy 2.4; compiled kernels do not.
    ticking so_far by_pip --editable "$root${extra:+[$extra]}" "torch==$torch" "numpy<2.4"
}

reason() { # the last line of the log that says what went wrong
    grep -iE 'error|not found|no solution|because' "$log" | tail -n 1 | sed 's/^ *//' | cut -c1-200
}

explain() { # of a failed installation
    if grep -q 'No space left on device' "$log"; then
        fail "the disk is full at $name, or where temporary files are (TMPDIR); make room, and start again"
    elif grep -qE 'Failed to establish|NewConnectionError|Temporary failure in name|Connection refused|ProxyError|Network is unreachable' "$log"; then
        fail "the package index cannot be reached; mend the network (or the proxy), or use wheels: PIP_NO_INDEX=1 PIP_FIND_LINKS=<directory>"
    fi
    tail -n 15 "$log" >&2
    fail "$name is not complete; why, stands above. A digest that differs from the lock's is another file than the one \
that was tested: find out whose before you renew the lock (make lock)"
}

for installed in "$stamp" "$venv/installed-dev"; do
    if wanted | cmp --silent - "$installed" 2>/dev/null; then exit; fi
done
if [ -L "$venv" ]; then # another checkout's, which would be given this one's package
    echo "tools/venv.sh: $name is a link and is left as it is;" \
        "pyproject.toml or requirements/ have changed since" >&2
    exit
fi
at=$venv
[ -e "$at" ] || at=$root
[ -w "$at" ] || fail "$at cannot be written to, and the package is installed there; make it writable, or use a copy of the tree"
work=$(mktemp -d 2>/dev/null) || fail "${TMPDIR:-/tmp} cannot be written to (read-only, or full); set TMPDIR to another directory"
trap 'end_ticker; exit 130' INT
trap 'rm -rf "$work"' EXIT
log=$work/log
: >"$log"
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python3=$(find_python)
    echo "making $name by $("$python3" --version)"
    make_venv() { "$python3" -m venv --clear "$venv" >>"$log" 2>&1; }
    ticking "echo making $name" make_venv || explain
fi
keep_pip_here
if [ "${2:-}" = oldest ]; then install_oldest; else install_locked; fi || explain
wanted >"$stamp" 2>>"$log" || { rm -f "$stamp" && explain; }
echo "installed into $name"
