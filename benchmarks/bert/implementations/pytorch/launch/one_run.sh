# shellcheck shell=bash disable=SC2034,SC2153,SC2154 # names shared with run_and_time.sh
# Sourced by run_and_time.sh: one run to its end, over its restarts, and the check of its log.

again_by() { # the command that begins again what this one began, LOGDIR apart
    local script=$root/run_and_time.sh how=
    [ "$PWD" != "$root" ] || script=./run_and_time.sh
    case ${where:-} in
    slurm) how="sbatch \$($(printf %q "$PYTHON")$(printf ' %q' -P -m mlperf_bert config slurm "$CONFIG" ${overrides[@]+"${overrides[@]}"})) " ;;
    rank) how="$started_by " ;;
    esac
    printf '%s%s%q' "${given:+${given# } }" "$how" "$script"
    [ ${#own_options[@]} -eq 0 ] || printf ' --%s' "$(printf ' %q' "${own_options[@]}")"
}

go_on_by() { # the command that goes on with these runs; GO_ON_BY is the one of docker.sh, outside the container
    echo "${GO_ON_BY:-RESUME=auto LOGDIR=$(printf %q "$LOGDIR") $(again_by)}"
}

interrupted() { # at Ctrl-C before training and after it; training says by itself how to go on
    end_ticker
    [ "$leads" = 0 ] || echo "to go on: $(go_on_by)"
    exit "$INTERRUPTED"
}

check_log() {
    local checker=("${here[@]}" -W ignore -m mlperf_logging.compliance_checker --usage training)
    local report=$2/compliance.txt claim
    rm -f "$report" "$2/compliance.log" # a link in their place would be written through
    checker+=(--ruleset "$RULESET" --log_output "$2/compliance.log" "$1")
    # shellcheck disable=SC2329 # called by ticking
    checked() { "${checker[@]}" >"$report" 2>&1; }
    phase "check: MLPerf's own checker reads the log"
    if ticking "echo checking the log" checked; then
        [ "$(logged quality_target "$1")" != '"none"' ] || claim="; no result is claimed"
        echo "log format accepted by the compliance checker, ruleset $RULESET: $1${claim:-}"
    else
        tail -n 20 "$report" >&2
        return 1
    fi
}

begun() { # index; whether LOGDIR holds that run
    [ -e "$LOGDIR/result_$1.txt" ] || [ -e "$LOGDIR/run_$1" ]
}

how_to_resume() { # index, restarts so far; none, auto, or the checkpoint to go on from
    if begun "$1" && { [ "$2" -gt 0 ] || [ "$requeued" = 1 ]; }; then
        echo auto
    else
        echo "${checkpoint:-$RESUME}"
    fi
}

train_once() { # index, seed, restarts so far; the status of training
    local index=$1 resume status=0 told arguments
    local status_file=$LOGDIR/status_$index
    resume=$(how_to_resume "$index" "$3")
    arguments=(--config "$CONFIG" --data "$DATADIR" --run-dir "$LOGDIR" --run-index "$index")
    [ "$resume" = none ] || arguments+=(--resume "$resume")
    arguments+=(${init_checkpoint[@]+"${init_checkpoint[@]}"})
    arguments+=(--go-on-by "$(go_on_by)")
    case $resume in
    none | auto) arguments+=(--set run.seed="$2") ;; # else the checkpoint's
    esac
    if [ "$where" != machine ]; then
        arguments+=(--status-file "$status_file")
        if [ "$leads" = 1 ]; then mkdir -p "$LOGDIR" && rm -f "$status_file"; fi
    fi
    if [ "$index" = 0 ] && [ "${CACHE_CLEARED:-0}" = 1 ]; then
        [ "$leads" = 0 ] || echo "page cache was dropped before (CACHE_CLEARED=1)"
        arguments+=(--cache-cleared)
    elif drop_caches; then
        arguments+=(--cache-cleared)
    fi
    with_signals "$passed_on" "${ranks[@]}" -m mlperf_bert train "${arguments[@]}" \
        ${options[@]+"${options[@]}"} || status=$?
    [ "$where" = machine ] || told=$(cat "$status_file" 2>/dev/null || true)
    [[ ${told:-} =~ ^[0-9]+$ ]] || told=$status
    # A launcher kills the ranks that have not left yet when one leaves before the first step.
    if [ "$status" = 0 ] || [ "$told" = "$STOPPED" ]; then status=$told; fi
    return "$status"
}

may_restart() { # status, restarts so far; whether to go on with a run that ended so, and says it
    local reason
    case $1 in
    0 | "$MISTAKE" | "$TARGET_MISSED" | "$STOPPED") return 1 ;; # an end in order
    "$INTERRUPTED" | 143) return 1 ;; # asked for, by Ctrl-C or SIGTERM
    "$LOST") reason="lost a rank, or hung" ;;
    *) reason="failed with status $1" ;;
    esac
    [ "$1" -le 128 ] || reason="was ended by SIG$(kill -l $(($1 - 128)))"
    [ "$signalled" = 0 ] && [ "$2" -lt "$MAX_RESTARTS" ] || return 1
    echo "run_and_time.sh: training $reason: restart $(($2 + 1)) of $MAX_RESTARTS" >&2
}

logged() { # key, logs; the first value
    local key=$1
    shift
    cat "$@" 2>/dev/null | sed -n 's/.*"key": "'"$key"'", "value": \([^,]*\),.*/\1/p' | head -n 1
}

seed_of() { # index; of a run that was begun, which may have been drawn; empty where it has no log
    logged seed "$LOGDIR/result_$1.txt" "$LOGDIR/run_$1"/interrupted/result_*.txt
}

say_result() { # index, seconds, start, last line of its log before that
    local log=$LOGDIR/result_$1.txt
    if [ "$(logged resumed "$log")" = true ]; then
        echo "run $1 was resumed: its time is no RESULT"
    elif [ "$(tail -n 1 "$log")" = "$4" ]; then
        echo "run $1 had ended before"
    elif [ "$(logged quality_target "$log")" != '"none"' ]; then
        echo "RESULT,bert,$(logged seed "$log"),$2,$(id -un 2>/dev/null || id -u),$3"
    fi
}

one_run() { # index, seed; the status of training, or 1 where its log is not accepted
    local index=$1 seed=$2 log=$LOGDIR/result_$1.txt status restarts=0 start start_time last
    [ ! -e "$log" ] || [ -f "$log" ] || fail "$log is no file; remove it, or give another LOGDIR"
    last=$(tail -n 1 "$log" 2>/dev/null || true)
    phase "train: run $index"
    while :; do
        if begun "$index"; then seed=$(seed_of "$index" || true); fi
        start=$(date +%s)
        start_time=$(date '+%Y-%m-%d %r')
        status=0
        train_once "$index" "${seed:-$2}" "$restarts" || status=$?
        may_restart "$status" "$restarts" || break
        restarts=$((restarts + 1))
    done
    [ "$leads" = 1 ] || return "$status"
    # Not before: of the scripts that mpiexec starts, some may look for it later than this one.
    [ -z "$used" ] || { rm -f "$LOGDIR/$used" && : >"$LOGDIR/$used"; }
    case $status in
    0) say_result "$index" $(($(date +%s) - start)) "$start_time" "$last" ;;
    "$TARGET_MISSED") ;;
    *) return "$status" ;;
    esac
    check_log "$log" "$LOGDIR/run_$index" || status=1
    return "$status"
}
