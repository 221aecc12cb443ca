# shellcheck shell=bash disable=SC2034,SC2153,SC2154 # names shared with run_and_time.sh
# Sourced by run_and_time.sh: one run to its end, over its restarts, and the check of its log.

check_log() {
    local checker=("${here[@]}" -W ignore -m mlperf_logging.compliance_checker --usage training)
    local report=$2/compliance.txt
    rm -f "$report" "$2/compliance.log" # a link in their place would be written through
    if "${checker[@]}" --ruleset "$RULESET" --log_output "$2/compliance.log" "$1" >"$report" 2>&1; then
        echo "compliance checker, ruleset $RULESET: $1 accepted"
    else
        tail -n 20 "$report" >&2
        return 1
    fi
}

begun() { # index; whether LOGDIR holds that run
    [ -e "$LOGDIR/result_$1.txt" ] || [ -e "$LOGDIR/run_$1" ]
}

has_ended() { # index; whether that run is over, and is only told of again
    [ "$RESUME" != none ] && grep -q '"stopped_by": null' "$LOGDIR/run_$1/outcome.json" 2>/dev/null
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
    arguments+=(--go-on-by "RESUME=auto LOGDIR=$(printf %q "$LOGDIR") ./run_and_time.sh")
    case $resume in
    none | auto) arguments+=(--set run.seed="$2") ;;
    *) [ -z "${STAGEDIR:-}" ] || arguments+=(--set run.seed="$staged_seed") ;; # the checkpoint's
    esac
    if [ "$where" != machine ]; then
        arguments+=(--status-file "$status_file")
        if [ "$leads" = 1 ]; then mkdir -p "$LOGDIR" && rm -f "$status_file"; fi
    fi
    if { [ "$index" = 0 ] && [ "${CACHE_CLEARED:-0}" = 1 ]; } || drop_caches; then
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
    else
        echo "RESULT,bert,$(logged seed "$log"),$2,$(id -un 2>/dev/null || id -u),$3"
    fi
}

one_run() { # index, seed; the status of training, or 1 where its log is not accepted
    local index=$1 seed=$2 log=$LOGDIR/result_$1.txt status restarts=0 start start_time last
    [ ! -e "$log" ] || [ -f "$log" ] || fail "$log is no file; remove it, or give another LOGDIR"
    last=$(tail -n 1 "$log" 2>/dev/null || true)
    while :; do
        if begun "$index"; then seed=$(seed_of "$index" || true); fi
        [ -z "${STAGEDIR:-}" ] || has_ended "$index" || stage "$index" "${seed:-$2}"
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
