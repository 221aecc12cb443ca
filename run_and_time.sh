#!/usr/bin/env bash
# Train BERT to its target accuracy and time it, NEXP times; every MLPerf log is checked.
#
#   ./run_and_time.sh [-- --set section.key=value ...]
#
#   CONFIG   TOML file                              [configs/cpu_tiny.toml]
#   DATADIR  prepared data: train/ and eval/        [the embedded corpus, made at first use]
#   LOGDIR   run directory, created                 [runs/<utc>-<config>]
#   NEXP     number of runs                         [1]
#   SEED     seed of the first run, then counted up [drawn from the system's random source]
#   PYTHON   interpreter that has the package       [.venv/bin/python, made at first use]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
CONFIG=${CONFIG:-$root/benchmarks/bert/implementations/pytorch/configs/cpu_tiny.toml}
NEXP=${NEXP:-1}
LOGDIR=${LOGDIR:-$root/runs/$(date -u +%Y%m%dT%H%M%SZ)-$(basename "$CONFIG" .toml)}
RULESET=5.0.0 # the last one that knows BERT
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} # spinning threads lose to any other process

fail() {
    echo "run_and_time.sh: error: $1" >&2
    exit 1
}

[ "${1:---}" = "--" ] || fail "unknown argument '$1'; options for training go after --"
[ $# -eq 0 ] || shift
options=("$@")
overrides=() # those options that config and prepare understand too
for ((i = 0; i + 1 < $#; i++)); do
    [ "${options[i]}" != "--set" ] || overrides+=(--set "${options[i + 1]}")
done
[[ $NEXP =~ ^[1-9][0-9]*$ ]] || fail "NEXP is '$NEXP'; set it to a number of runs above 0"
[[ ${SEED:-0} =~ ^[0-9]+$ ]] || fail "SEED is '$SEED'; set it to a number of at least 0"

find_python() {
    local candidate
    for candidate in python3 python3.12 python3.11; do
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer with venv was found; install one, or set PYTHON"
}

install() {
    # The stamp holds what was installed, so that a changed pyproject.toml installs again.
    local stamp=$root/.venv/installed python3
    cmp --silent "$root/pyproject.toml" "$stamp" && return
    cmp --silent "$root/pyproject.toml" "$stamp-dev" && return
    echo "installing into .venv (once)"
    if [ ! -x "$root/.venv/bin/python" ]; then
        python3=$(find_python)
        "$python3" -m venv "$root/.venv"
    fi
    "$root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check -e "$root"
    cp "$root/pyproject.toml" "$stamp"
}

one_run() {
    local index=$1 seed=$2 log=$LOGDIR/result_$1.txt start start_time
    start=$(date +%s)
    start_time=$(date '+%Y-%m-%d %r')
    "$PYTHON" -m mlperf_bert train --config "$CONFIG" --data "$DATADIR" --run-dir "$LOGDIR" \
        --run-index "$index" "${options[@]}" --set run.seed="$seed" || return
    echo "RESULT,bert,$seed,$(($(date +%s) - start)),$(id -un),$start_time"
    "$PYTHON" -W ignore -m mlperf_logging.compliance_checker --usage training \
        --ruleset "$RULESET" --log_output "$LOGDIR/run_$index/compliance.log" "$log" \
        >"$LOGDIR/run_$index/compliance.txt" 2>&1 || {
        tail -n 20 "$LOGDIR/run_$index/compliance.txt" >&2
        return 1
    }
    echo "compliance checker, ruleset $RULESET: $log accepted"
}

setting() {
    "$PYTHON" -m mlperf_bert config "$CONFIG" "${overrides[@]}" --get "$1"
}

if [ -z "${PYTHON:-}" ]; then
    install
    PYTHON=$root/.venv/bin/python
fi
if [ -z "${DATADIR:-}" ]; then
    [ "$(setting data.corpus)" = embedded ] || fail "$CONFIG needs data; set DATADIR"
    DATADIR=$root/.cache/$(setting embedded_corpus_name)
    "$PYTHON" -m mlperf_bert prepare --embedded --config "$CONFIG" --out "$DATADIR" "${overrides[@]}"
fi
failed=0
for ((i = 0; i < NEXP; i++)); do
    if [ -n "${SEED:-}" ]; then
        seed=$((SEED + i))
    else
        seed=$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')
    fi
    one_run "$i" "$seed" || failed=$((failed + 1))
done
[ "$failed" -eq 0 ] || fail "$failed of $NEXP runs failed; see $LOGDIR"
