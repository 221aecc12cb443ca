# shellcheck shell=bash disable=SC2034 # names shared with run_and_time.sh
# Sourced by run_and_time.sh: a command that gets the signals sent to the shell.

signalled=0 # 1 once a signal came

# Run a command and return its status. A shell looks at signals only between commands, so this one
# runs in the background. There it would ignore Ctrl-C: every signal is passed on as the given one.
with_signals() { # signal to pass on, command...
    local passed_on=$1 status
    shift
    "$@" &
    running=$!
    trap 'signalled=1; kill -s '"$passed_on"' "$running" 2>/dev/null || true' TERM INT USR1
    while :; do
        status=0
        wait "$running" || status=$?
        # A signal ends `wait` before its time; the command then still is a process.
        kill -0 "$running" 2>/dev/null || break
    done
    trap - TERM INT USR1
    return "$status"
}
