# shellcheck shell=bash disable=SC2034,SC2153,SC2154 # run_and_time.sh shares these variables.
# Sourced by run_and_time.sh: trains one run to its end and checks its log.

command_line() { # the command that started this script, without LOGDIR and RESUME
    local script=$root/run_and_time.sh options_script=$root/$launch/slurm_options.py how=
    [ "$PWD" != "$root" ] || script=./run_and_time.sh options_script=$launch/slurm_options.py
    case ${where:-} in
    slurm) # The shell runs slurm_options.py before it sets the variables in front of sbatch.
        how="sbatch \$(${given:+${given# } }$(printf %q "$options_script")$(printf ' %q' "$CONFIG" ${overrides[@]+"${overrides[@]}"})) "
        ;;
    rank) how="$started_by " ;;
    esac
    printf '%s%s%q' "${given:+${given# } }" "$how" "$script"
    [ ${#options[@]} -eq 0 ] || printf ' --%s' "$(printf ' %q' "${options[@]}")"
}

resume_command() { # [value of RESUME]; docker.sh sets GO_ON_BY to the command outside the container
    local command=${GO_ON_BY:-"RESUME=auto LOGDIR=$(printf %q "$LOGDIR") $(command_line)"}
    echo "RESUME=${1:-auto}${command#RESUME=auto}"
}

hint() { # Say how to continue.
    local purpose="start again" resume=auto
    has_run 0 || [ "$RESUME" = none ] || resume=${GO_ON_FROM:-$(printf %q "$RESUME")}
    ! compgen -G "$LOGDIR/run_*/checkpoints/step_*" >/dev/null || purpose=resume
    echo "to $purpose: $(resume_command "$resume")"
}

interrupted() { # at Ctrl-C before or after training
    end_ticker
    if [ "$leads" = 1 ]; then
        has_run 0 || echo "interrupted before the first run, so no training was lost"
        hint
    fi
    exit "$INTERRUPTED"
}

num_starts() { # index; how often the clock of that run has started
    cat "$LOGDIR/result_$1.txt" "$LOGDIR/run_$1"/interrupted/result_*.txt 2>/dev/null | grep -c '"run_start"' || true
}

has_run() { # index; true if LOGDIR has that run
    [ -e "$LOGDIR/result_$1.txt" ] || [ -e "$LOGDIR/run_$1" ]
}

logged() { # key, logs; the first value
    local key=$1
    shift
    cat "$@" 2>/dev/null | sed -n 's/.*"key": "'"$key"'", "value": \([^,]*\),.*/\1/p' | head -n 1
}

# Drop the page cache of every node. Fails if this user may not, and the log then says so.
drop_caches() {
    [ "$CLEAR_CACHES" = 1 ] || return
    if [ "$where" = rank ]; then # The other ranks of this node may already be reading.
        [ "$leads" = 0 ] || echo "page cache not dropped, because the ranks are already running; drop it before you start" \
            "them, and set CACHE_CLEARED=1"
        return 1
    fi
    if ${nodes[@]+"${nodes[@]}"} sh -c 'sync; echo 3 >/proc/sys/vm/drop_caches ||
        sudo -n /sbin/sysctl vm.drop_caches=3' >/dev/null 2>&1; then
        echo "page cache dropped on ${SLURM_JOB_NUM_NODES:-1} node(s), because $cache_reason;" \
            "CLEAR_CACHES=0 keeps it"
    else
        echo "page cache not dropped, because this user may not drop it on every node; the log says so" \
            "(cache_clear false); docs/guides/slurm.md says how to get permission (CLEAR_CACHES)"
        return 1
    fi
}

train() { # index, seed; returns the status of training
    local resume=$RESUME seed=$2 status=0 reported arguments starts status_file=$LOGDIR/status_$1
    arguments=(--config "$CONFIG" --data "$DATADIR" --run-dir "$LOGDIR" --run-index "$1")
    arguments+=(${init_checkpoint[@]+"${init_checkpoint[@]}"} --go-on-by "$(resume_command)" --no-start-hint)
    arguments+=(--new-run-by "LOGDIR=NEW RESUME=none")
    if has_run "$1"; then
        seed=$(logged seed "$LOGDIR/result_$1.txt" "$LOGDIR/run_$1"/interrupted/result_*.txt || true)
        [ "$requeued" = 0 ] || resume=auto
    fi
    [ "$resume" = none ] || arguments+=(--resume "$resume")
    case $resume in
    none | auto) arguments+=(--set run.seed="${seed:-$2}") ;; # A checkpoint has its own seed.
    esac
    if [ "$where" != machine ]; then
        arguments+=(--status-file "$status_file")
        if [ "$leads" = 1 ]; then mkdir -p "$LOGDIR" && rm -f "$status_file"; fi
    fi
    if [ "$1" = 0 ] && [ "${CACHE_CLEARED:-0}" = 1 ]; then
        [ "$leads" = 0 ] || echo "page cache was already dropped (CACHE_CLEARED=1)"
        arguments+=(--cache-cleared)
    elif drop_caches; then
        arguments+=(--cache-cleared)
    fi
    starts=$(num_starts "$1")
    with_signals "$passed_on" "${ranks[@]}" -m mlperf_bert train "${arguments[@]}" \
        ${options[@]+"${options[@]}"} || status=$?
    [ "$where" = machine ] || reported=$(cat "$status_file" 2>/dev/null || true)
    [[ ${reported:-} =~ ^[0-9]+$ ]] || reported=$status
    # If one rank exits before the first step, a launcher kills the others and hides the status.
    if [ "$status" = 0 ] || [ "$reported" = "$STOPPED" ]; then status=$reported; fi
    # After the first step, training prints the hint.
    if [ "$signalled-$leads" = 1-1 ] && [ "$(num_starts "$1")" = "$starts" ]; then
        case $status in
        129 | 138 | 143) # A signal ended the interpreter before it could handle signals.
            echo "stopped before the first step, so no training was lost"
            hint
            status=$STOPPED
            ;;
        "$STOPPED") hint ;;
        esac
    fi
    return "$status"
}

say_result() { # index, seconds, start time, last line of the log before this start
    local log=$LOGDIR/result_$1.txt
    if [ "$(logged resumed "$log")" = true ]; then
        echo "no RESULT for run $1, because it was interrupted and its time is incomplete"
        [ "$NEXP" = 1 ] || echo "to replace it in the series:" \
            "rm -r $(printf '%q ' "${LOGDIR_OUTSIDE:-$LOGDIR}"/{run_"$1",result_"$1".txt})&& $(resume_command)"
    elif [ "$(tail -n 1 "$log")" = "$4" ]; then
        echo "no RESULT for run $1, because it had ended before this start"
    elif [ "$(logged quality_target "$log")" != '"none"' ]; then
        echo "RESULT,bert,$(logged seed "$log"),$2,$(id -un 2>/dev/null || id -u),$3"
    fi
}

one_run() { # index, seed; returns the status of training, or 1 if the checker rejects the log
    local log=$LOGDIR/result_$1.txt report=$LOGDIR/run_$1/compliance status=0 start start_time last claim=
    [ ! -e "$log" ] || [ -f "$log" ] || fail "$log: not a regular file; remove it, or set another LOGDIR"
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
    rm -f "$report.txt" "$report.log" # Otherwise a link with this name would be followed.
    if ! "${here[@]}" -W ignore -m mlperf_logging.compliance_checker --usage training --ruleset "$RULESET" \
        --log_output "$report.log" "$log" >"$report.txt" 2>&1; then
        tail -n 20 "$report.txt" >&2
        return 1
    fi
    [ "$(logged quality_target "$log")" != '"none"' ] || claim=" (no result, because the run had no target)"
    echo "log format accepted by the compliance checker, ruleset $RULESET: $log$claim"
    return "$status"
}
