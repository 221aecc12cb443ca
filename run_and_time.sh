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
TARGET_MISSED=3 # the exit status of such a run
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} # spinning threads lose to any other process

fail() { # message, [exit status]
    echo "run_and_time.sh: error: $1" >&2
    exit "${2:-2}"
}

[ "${1:---}" = "--" ] || fail "unknown argument '$1'; options for training go after --"
[ $# -eq 0 ] || shift
[[ $NEXP =~ ^[1-9][0-9]*$ ]] || fail "NEXP is '$NEXP'; set it to a number of runs above 0"
[[ ${SEED:-0} =~ ^[0-9]{1,18}$ ]] || fail "SEED is '$SEED'; set it to a number of at least 0"
# An empty array is an unset variable to shells before 4.4, hence the ${name[@]+...} below.
options=("$@")
overrides=() # what config and prepare take of the options
for ((i = 0; i < $#; i++)); do
    case ${options[i]} in
    --set) [ $((i + 1)) -eq $# ] || overrides+=(--set "${options[i + 1]}") ;;
    --set=*) overrides+=(--set "${options[i]#--set=}") ;;
    esac
done

setting() { # name, overrides that come before the user's
    local name=$1
    shift
    "$PYTHON" -m mlperf_bert config "$CONFIG" "$@" ${overrides[@]+"${overrides[@]}"} --get "$name"
}

check_log() {
    local checker=("$PYTHON" -W ignore -m mlperf_logging.compliance_checker --usage training)
    local report=$2/compliance.txt
    if "${checker[@]}" --ruleset "$RULESET" --log_output "$2/compliance.log" "$1" >"$report" 2>&1; then
        echo "compliance checker, ruleset $RULESET: $1 accepted"
    else
        tail -n 20 "$report" >&2
        return 1
    fi
}

one_run() { # index, seed; the status of training, or 1 where its log is not accepted
    local index=$1 seed=$2 status=0 start start_time
    start=$(date +%s)
    start_time=$(date '+%Y-%m-%d %r')
    "$PYTHON" -m mlperf_bert train --config "$CONFIG" --data "$DATADIR" --run-dir "$LOGDIR" \
        --run-index "$index" --set run.seed="$seed" ${options[@]+"${options[@]}"} || status=$?
    case $status in
    0) echo "RESULT,bert,$seed,$(($(date +%s) - start)),$(id -un),$start_time" ;;
    "$TARGET_MISSED") ;;
    *) return "$status" ;;
    esac
    check_log "$LOGDIR/result_$index.txt" "$LOGDIR/run_$index" || status=1
    return "$status"
}

if [ -z "${PYTHON:-}" ]; then
    "$root/tools/venv.sh"
    PYTHON=$root/.venv/bin/python
fi
if [ -z "${DATADIR:-}" ]; then
    [ "$(setting data.corpus)" = embedded ] || fail "$CONFIG needs data; set DATADIR"
    DATADIR=$root/.cache/$(setting embedded_corpus_name)
    "$PYTHON" -m mlperf_bert prepare --embedded --config "$CONFIG" --out "$DATADIR" \
        ${overrides[@]+"${overrides[@]}"}
fi
missed=0
for ((i = 0; i < NEXP; i++)); do
    if [ -n "${SEED:-}" ]; then
        seed=$((10#$SEED + i))
    else
        seed=$(($(od -An -N4 -tu4 /dev/urandom) & 0x7fffffff))
    fi
    seed=$(setting run.seed --set run.seed="$seed")
    status=0
    one_run "$i" "$seed" || status=$?
    case $status in
    0) ;;
    "$TARGET_MISSED") missed=$((missed + 1)) ;;
    *) exit "$status" ;; # a mistake or Ctrl-C would only come again
    esac
done
[ "$missed" -eq 0 ] || fail "$missed of $NEXP runs missed the target; see $LOGDIR" "$TARGET_MISSED"
