#!/usr/bin/env bash
# Create .venv at the top of the repository and install the package into it, unless that is already done.
#
#   tools/venv.sh                 install the package and what every command needs
#   tools/venv.sh EXTRA...        install these optional groups of pyproject.toml too, such as `tune squad` or `dev`
#   tools/venv.sh EXTRA... oldest   the same into .venv-oldest, with the oldest torch that the package supports
#
# Versions and digests are those of requirements/, which tools/lock.py reads. Only wheels are installed, so no package
# runs code of its own during the installation. The script uses uv if uv is on PATH and its settings lead to all
# packages, and otherwise pip. To install without a network, set PIP_NO_INDEX=1 PIP_FIND_LINKS=<directory of wheels>.
# On a machine without a GPU, the script installs the CPU build of torch if one of your package indexes offers it.
# TORCH=cuda installs the build for GPUs there too, for example on the login node of a cluster. TORCH_INDEX=<address>
# adds an index for torch only.
set -euo pipefail
export PYTHONSAFEPATH=1 # Python must not import code from the current directory, which may be another user's

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=benchmarks/bert/implementations/pytorch/launch/ticking.sh
. "$root/benchmarks/bert/implementations/pytorch/launch/ticking.sh" # ticking, end_ticker

fail() {
    echo "tools/venv.sh: error: $1" >&2
    exit 2
}

join() { # print words with commas between them
    local IFS=, list
    list="$*"
    echo "${list//,/, }"
}

known_extras() { # print the optional groups of pyproject.toml, one per line
    awk '/^\[/ { here = ($0 == "[project.optional-dependencies]") } here && /^[a-z]/ { print $1 }' "$root/pyproject.toml"
}

venv=$root/.venv oldest='' extras=()
for word in "$@"; do
    if [ "$word" = -h ] || [ "$word" = --help ]; then
        sed -n '/^# Create/,/^set /{/^#/s/^# \{0,1\}//p;}' "$root/tools/venv.sh"
        exit
    elif [ "$word" = oldest ]; then
        venv=$root/.venv-oldest oldest=1
    elif known_extras | grep -qxF -e "$word"; then
        extras+=("$word")
    else
        fail "unknown extra '$word'; use one or more of $(known_extras | paste -sd, - | sed 's/,/, /g')"
    fi
done
name=${venv##*/}
case ${TORCH:-cuda} in cuda) ;; *) fail "TORCH: '$TORCH' is not a known build; set it to cuda, or unset it" ;; esac
if [ -n "${TORCH:-}" ] && grep -qs '^cuda\b.*= None$' "$venv"/lib/python*/site-packages/torch/version.py; then
    fail "TORCH: $name has torch for CPUs; remove it with 'rm -r $venv', and run the same command again"
fi
torch_index=(${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"})

# A stamp is a copy of the files that decided what was installed. If pyproject.toml or the lock has
# changed since, the script installs again. The package and each extra have their own stamp.
wanted() {
    cat "$root/pyproject.toml" "$root/requirements/hashed.txt" "$root/requirements/pinned.txt"
}

has_stamp() { # [extra]
    wanted | cmp --silent - "$venv/installed${1:+-$1}" 2>/dev/null
}

is_installed() {
    local extra
    if has_stamp dev; then return; fi
    has_stamp || return
    for extra in ${extras[@]+"${extras[@]}"}; do
        has_stamp "$extra" || return
    done
}

write_stamps() {
    local extra
    for extra in '' ${extras[@]+"${extras[@]}"}; do
        wanted >"$venv/installed${extra:+-$extra}" 2>>"$log" || { rm -f "$venv/installed${extra:+-$extra}" && return 1; }
    done
}

find_python() { # prefer python3, then the tested versions, then any newer one on PATH
    local candidate newer
    newer=$(compgen -c python3. | grep -xE 'python3\.[0-9]+' | sort -u -t. -k2n || true)
    for candidate in python3 python3.12 python3.11 python3.13 $newer; do
        if "$candidate" -c 'import sys; sys.version_info < (3, 11) and sys.exit(1); import ensurepip, venv' \
            2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "python3: no Python 3.11 or newer with venv and ensurepip on PATH; install one (Debian: python3-venv)"
}

# Keep the settings of pip's files and variables, such as an index or a proxy, except those that
# would install outside this environment.
keep_pip_here() {
    local settings name value
    settings=$("$venv/bin/python" -m pip config list 2>/dev/null || true)
    grep -qE "^[a-z:.]+\.(user|target|prefix|root|require-virtualenv|dry-run|ignore-installed)=" <<<"$settings" || return 0
    while IFS='=' read -r name value; do
        case $name in *.*.*) continue ;; global.* | install.*) ;; *) continue ;; esac
        name=PIP_$(tr 'a-z-' 'A-Z_' <<<"${name#*.}")
        value=${value#[\'\"]} value=${value%[\'\"]}
        [ -n "${!name:-}" ] || export "$name=${value//\\n/ }"
    done < <(sort -r <<<"$settings") # reversed, because settings of the section `install` override those of `global`
    unset PIP_USER PIP_TARGET PIP_PREFIX PIP_ROOT PIP_REQUIRE_VIRTUALENV PIP_DRY_RUN PIP_IGNORE_INSTALLED
    export PIP_CONFIG_FILE=/dev/null
    echo "ignoring pip's settings that would install elsewhere: $(grep -oE '\.(user|target|prefix|root|require-virtualenv|dry-run|ignore-installed)=' <<<"$settings" | tr -d '.=' | sort -u | tr '\n' ' ')"
}

by_pip() {
    "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar=off "$@"
} >>"$log" 2>&1

by_uv() {
    uv pip install --python "$venv/bin/python" "$@"
} >>"$log" 2>&1

so_far() { # describe the progress of an installation
    local fetched placed megabytes last
    fetched=$(grep -cE '^(Collecting| *Downloaded) ' "$log" || true)
    placed=$(find "$venv"/lib/python*/site-packages -maxdepth 1 -name '*.dist-info' ! -name 'pip-*' | wc -l)
    megabytes=$(du -sm "$venv" 2>/dev/null | cut -f1)
    last=$(grep -E '^ *(Collecting|Downloading|Installing|Preparing) ' "$log" | tail -n 1 | sed 's/^ *//; s/ (from .*//')
    if [ "$placed" -gt 0 ]; then fetched="$placed installed"; else fetched="$fetched downloaded"; fi
    echo "installing: $fetched, $megabytes MB${on_disk:+ of about $on_disk}; ${last:0:40}"
}

has_gpu() {
    [ -e /dev/nvidiactl ] || nvidia-smi -L >/dev/null 2>&1
}

choose() { # set `installer` and `build` (of torch), and `why` to the reason in words
    local torch offers=
    torch=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' "$root/requirements/pinned.txt")
    installer=by_pip build='' why="torch $torch for this machine's GPU"
    [ -n "${PIP_NO_INDEX:-}" ] || ! command -v uv >/dev/null || installer=by_uv
    if [ -n "${TORCH:-}" ]; then
        why="torch $torch for GPUs, because TORCH is cuda"
    elif ! has_gpu; then
        why="torch $torch for CPUs, because there is no GPU"
        if [ "$installer" = by_uv ] && UV_HTTP_TIMEOUT=5 UV_HTTP_RETRIES=1 \
            by_uv --dry-run --no-deps ${torch_index[@]+"${torch_index[@]}"} "torch==$torch+cpu"; then
            build=cpu
        else
            offers=$("$venv/bin/python" -m pip index versions --timeout 5 --retries 1 torch ${torch_index[@]+"${torch_index[@]}"} 2>/dev/null || true)
            if [[ $offers == *" $torch+cpu"[,$'\n']* ]]; then installer=by_pip build=cpu; fi
        fi
        [ -n "$build" ] || why="no GPU, but torch $torch with CUDA's libraries, because no package index here has a CPU build \
(TORCH_INDEX can add one)"
    fi
    why+=", with ${installer#by_}"
}

install_by() { # by_pip or by_uv: install the selected requirements
    "$1" --require-hashes --no-deps --only-binary :all: --requirement "$work/hashed.txt" &&
        # This also installs what the index's build of torch requires: CUDA's libraries or nothing.
        "$1" --only-binary :all: --requirement "$work/pinned.txt" ${torch_index[@]+"${torch_index[@]}"} \
            --constraint "$root/requirements/pinned.txt" &&
        "$1" --no-deps --no-build-isolation --editable "$root"
}

# Print, for example, "tune, squad (up to 64 MB)", with "up to" because extras may share packages.
describe_extras() {
    local extra megabytes total=0 about=about
    if [ ${#extras[@]} -gt 1 ]; then about="up to"; fi
    for extra in "${extras[@]}"; do
        megabytes=$(sed -n "s/^$extra = \[.*# about \([0-9]*\) MB\$/\1/p" "$root/pyproject.toml")
        total=$((total + ${megabytes:-0}))
    done
    echo "$(join "${extras[@]}") ($about $total MB)"
}

install_locked() {
    local download extra words=()
    for extra in ${extras[@]+"${extras[@]}"}; do words+=(--extra "$extra"); done
    ticking "echo asking the package index for torch" choose
    "$venv/bin/python" "$root/tools/lock.py" select "$work" ${words[@]+"${words[@]}"} ${build:+--torch "$build"} || exit
    # Sizes of the wheels for Linux on x86-64 without an extra, measured on 2026-11-23 without CUDA,
    # and with CUDA on 2026-11-29, which is what torch 2.14.1 takes.
    download="about 340 MB from the network" on_disk=1400
    [ "$build" = cpu ] || { download="about 3,100 MB from the network" on_disk=6200; }
    if [ ${#extras[@]} = 0 ]; then
        echo "installing packages into $name (once), $download${on_disk:+, $on_disk MB on disk}; $why"
    elif [ -e "$venv/installed" ]; then
        on_disk=
        echo "adding $(describe_extras) to $name; $why"
    else
        echo "installing packages into $name (once), $download, and for $(describe_extras); $why"
        on_disk=
    fi
    if [ "$installer" = by_uv ] && ! ticking so_far install_by by_uv; then
        echo "uv cannot install the locked packages ($(reason)); using pip instead"
        installer=by_pip
        : >"$log"
    fi
    [ "$installer" = by_uv ] || ticking so_far install_by by_pip
}

# The lock has only one torch, so pip chooses the other packages for the oldest one.
install_oldest() {
    local torch list
    torch=$(sed -n 's/.*"torch>=\([0-9.]*\),.*/\1/p' "$root/pyproject.toml")
    list=$(join ${extras[@]+"${extras[@]}"})
    on_disk=
    # The interpreter of that torch's Triton (3.6) fails with numpy 2.4. Compiled kernels do not.
    ticking so_far by_pip --editable "$root${list:+[${list// /}]}" "torch==$torch" "numpy<2.4"
}

reason() { # print the last line of the log that says what went wrong
    grep -iE 'error|not found|no solution|because' "$log" | tail -n 1 | sed 's/^ *//' | cut -c1-200
}

explain() { # fail with the reason for a failed installation
    if grep -q 'No space left on device' "$log"; then
        fail "the disk of $name or of temporary files (TMPDIR) is full; free some space and run the same command again"
    elif grep -qE 'Failed to establish|NewConnectionError|Temporary failure in name|Connection refused|ProxyError|Network is unreachable' "$log"; then
        fail "the package index cannot be reached; check the network and the proxy, or install from wheels with \
PIP_NO_INDEX=1 PIP_FIND_LINKS=<directory>"
    fi
    tail -n 15 "$log" >&2
    fail "the installation into $name failed, as explained by the lines above; fix the cause and run the same command again. \
If a digest differs from the lock's, the file is not the one that was tested. Find out where it comes from before you \
renew the lock (make lock)"
}

if is_installed; then exit; fi
# A link belongs to another checkout, and installing would replace that checkout's package with this
# one.
if [ -L "$venv" ]; then
    echo "tools/venv.sh: warning: $name is a link to another checkout's environment and was not changed, but" \
        "pyproject.toml, requirements/ or the extras differ from what is installed there" >&2
    exit
fi
writable=$venv
[ -e "$writable" ] || writable=$root
[ -w "$writable" ] || fail "no permission to write to $writable, where the package is installed; make it writable, or use a copy of the repository"
work=$(mktemp -d 2>/dev/null) || fail "cannot write to ${TMPDIR:-/tmp} (read-only or full); set TMPDIR to another directory"
trap 'end_ticker; exit 130' INT
trap 'rm -rf "$work"' EXIT
log=$work/log
: >"$log"
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python3=$(find_python)
    echo "creating $name with $("$python3" --version)"
    make_venv() { "$python3" -m venv --clear "$venv" >>"$log" 2>&1; }
    ticking "echo creating $name" make_venv || explain
fi
keep_pip_here
if [ -n "$oldest" ]; then install_oldest; else install_locked; fi || explain
write_stamps || explain
if [ ${#extras[@]} = 0 ]; then
    echo "installed into $name"
else
    echo "installed $(join "${extras[@]}") into $name"
fi
