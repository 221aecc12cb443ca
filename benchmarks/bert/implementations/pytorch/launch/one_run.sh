# shellcheck shell=bash disable=SC2034,SC2153,SC2154 # names shared with run_and_time.sh
# Sourced by run_and_time.sh: one run to its end, and the check of its log.

again_by() { # the command that begins again what this one began, LOGDIR apart
    local script=$root/run_and_time.sh how=
    [ "$PWD" != "$root" ] || script=./run_and_time.sh
    case ${where:-} in
    slurm) how="sbatch \$($(printf %q "$PYTHON")$(printf ' %q' -P -m mlperf_bert config slurm "$CONFIG" ${overrides[@]+"${overrides[@]}"})) " ;;
    rank) how="$started_by " ;;
    esac
    printf '%s%s%q' "${given:+${given# } }" "$how" "$script"
    [ ${#options[@]} -eq 0 ] || printf ' --%s' "$(printf ' %q' "${options[@]}")"
}

go_on_by() { # the command that goes on with these runs; GO_ON_BY is the one of docker.sh, outside the container
    echo "${GO_ON_BY:-RESUME=auto LOGDIR=$(printf %q "$LOGDIR") $(again_by)}"
}

interrupted() { # at Ctrl-C before training and after it; training says by itself how to go on
    end_ticker
    [ "$leads" = 0 ] || echo "to go on: $(go_on_by)"
    exit "$INTERRUPTED"
}

begun() { # index; whether LOGDIR holds that run
    [ -e "$LOGDIR/result_$1.txt" ] || [ -e "$LOGDIR/run_$1" ]
}

logged() { # key, logs; the first value
    local key=$1
    shift
    cat "$@" 2>/dev/null | sed -n 's/.*"key": "'"$key"'", "value": \([^,]*\),.*/\1/p' | head -n 1
}

# Drop the page cache of every node; fails where that may not be done, and the log will say so.
drop_caches() {
    [ "$CLEAR_CACHES" = 1 ] || return
    if [ "$where" = rank ]; then # the other scripts of a node may be reading already
        [ "$leads" = 0 ] || echo "page cache left alone: ranks run already; drop it before, with CACHE_CLEARED=1"
        return 1
    fi
    if ${nodes[@]+"${nodes[@]}"} sh -c 'sync; echo 3 >/proc/sys/vm/drop_caches ||
        sudo -n /sbin/sysctl vm.drop_caches=3' >/dev/null 2>&1; then
        echo "page cache dropped on ${SLURM_JOB_NUM_NODES:-1} node(s); CLEAR_CACHES=0 leaves it alone"
    else
        echo "page cache not dropped: this user may not on every node; the log says so (cache_clear false)"
        return 1
    fi
}

train() { # index, seed; the status of training
    local resume=$RESUME seed=$2 status=0 told arguments status_file=$LOGDIR/status_$1
    arguments=(--config "$CONFIG" --data "$DATADIR" --run-dir "$LOGDIR" --run-index "$1")
    arguments+=(${init_checkpoint[@]+"${init_checkpoint[@]}"} --go-on-by "$(go_on_by)")
    arguments+=(--new-run-by "LOGDIR=NEW RESUME=none")
    if begun "$1"; then
        seed=$(logged seed "$LOGDIR/result_$1.txt" "$LOGDIR/run_$1"/interrupted/result_*.txt || true)
        [ "$requeued" = 0 ] || resume=auto
    fi
    [ "$resume" = none ] || arguments+=(--resume "$resume")
    case $resume in
    none | auto) arguments+=(--set run.seed="${seed:-$2}") ;; # else the checkpoint's
    esac
    if [ "$where" != machine ]; then
        arguments+=(--status-file "$status_file")
        if [ "$leads" = 1 ]; then mkdir -p "$LOGDIR" && rm -f "$status_file"; fi
    fi
    if [ "$1" = 0 ] && [ "${CACHE_CLEARED:-0}" = 1 ]; then
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
    local log=$LOGDIR/result_$1.txt report=$LOGDIR/run_$1/compliance status=0 start start_time last claim=
    [ ! -e "$log" ] || [ -f "$log" ] || fail "$log is no file; remove it, or give another LOGDIR"
    last=$(tail -n 1 "$log" 2>/dev/null || true)
    start=$(monotonic)
    start_time=$(date '+%Y-%m-%d %r')
    phase "train: run $1"
    train "$1" "$2" || status=$?
    case $leads-$status in
    1-0) say_result "$1" $(($(monotonic) - start)) "$start_time" "$last" ;;
    1-"$TARGET_MISSED") ;;
    *) return "$status" ;;
    esac
    phase "check: MLPerf's own checker reads the log"
    rm -f "$report.txt" "$report.log" # a link in their place would be written through
    if ! "${here[@]}" -W ignore -m mlperf_logging.compliance_checker --usage training --ruleset "$RULESET" \
        --log_output "$report.log" "$log" >"$report.txt" 2>&1; then
        tail -n 20 "$report.txt" >&2
        return 1
    fi
    [ "$(logged quality_target "$log")" != '"none"' ] || claim="; no result is claimed"
    echo "log format accepted by the compliance checker, ruleset $RULESET: $log$claim"
    return "$status"
}
