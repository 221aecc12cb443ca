# shellcheck shell=bash disable=SC2034,SC2154 # run_and_time.sh shares these variables.
# Sourced by run_and_time.sh: runs a command that receives the signals sent to the shell.

signalled=0 # 1 after a signal arrived

# Run a command and return its status. A shell handles signals only between commands, so the command
# runs in the background. There it starts with Ctrl-C ignored, so a SIGTERM follows each SIGINT and
# ends a command that has not yet installed its own handler.
with_signals() { # signal to pass on instead of the one that arrived, or "", command...
    local instead=$1 status
    shift
    if [ "$where" = slurm ]; then # SLURM ends its steps itself.
        "$@" &
    else
        MLPERF_BERT_SCRIPT=$$ "$@" & # The command exits when this script is gone.
    fi
    running=$!
    # shellcheck disable=SC2064 # $instead is expanded now.
    {
        trap "pass_on ${instead:-TERM}" TERM
        trap "pass_on ${instead:-INT TERM}" INT
        trap "pass_on ${instead:-USR1}" USR1
        trap "pass_on ${instead:-HUP}" HUP # sent when the terminal is closed, and ignored under nohup
    }
    while :; do
        woken=0 status=0
        wait "$running" || status=$?
        # A signal interrupts `wait`, which then returns the signal's number instead of the command's
        # status. Waiting again returns the command's, also if the command has ended meanwhile.
        [ "$woken" = 1 ] || break
    done
    trap - TERM USR1 HUP && trap interrupted INT
    return "$status"
}

pass_on() { # signals
    local name
    signalled=1 woken=1
    for name; do kill -s "$name" "$running" 2>/dev/null || true; done
}
