# shellcheck shell=bash disable=SC2034,SC2154 # names shared with run_and_time.sh
# Sourced by run_and_time.sh: a command that gets the signals sent to the shell.

signalled=0 # 1 once a signal came

# Run a command and return its status. A shell looks at signals only between commands, so this one
# runs in the background, where it begins with Ctrl-C ignored: until it says otherwise itself, the
# SIGTERM that follows ends it.
with_signals() { # signal to pass on instead of the one that came, or "", command...
    local instead=$1 status
    shift
    if [ "$where" = slurm ]; then # which ends its steps by itself
        "$@" &
    else
        MLPERF_BERT_SCRIPT=$$ "$@" & # to end with this script, however that ends
    fi
    running=$!
    # shellcheck disable=SC2064 # the signal as it is now
    {
        trap "pass_on ${instead:-TERM}" TERM
        trap "pass_on ${instead:-INT TERM}" INT
        trap "pass_on ${instead:-USR1}" USR1
        trap "pass_on ${instead:-HUP}" HUP # of a terminal that is closed; under nohup ignored
    }
    while :; do
        status=0
        wait "$running" || status=$?
        # A signal ends `wait` before its time; the command then still is a process.
        kill -0 "$running" 2>/dev/null || break
    done
    trap - TERM USR1 HUP && trap interrupted INT
    return "$status"
}

pass_on() { # signals
    local name
    signalled=1
    for name; do kill -s "$name" "$running" 2>/dev/null || true; done
}
