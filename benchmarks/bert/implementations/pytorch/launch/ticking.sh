# shellcheck shell=bash disable=SC2154 # run_and_time.sh sets these variables.
# Sourced by run_and_time.sh and tools/venv.sh: prints the plan, the phases, and the progress of silent commands.

# Print the seconds of a clock that nobody can set. Bash's SECONDS follows the time of day, so it is used only if
# there is no /proc/uptime, as outside Linux.
monotonic() {
    local since_start
    if read -r since_start _ 2>/dev/null </proc/uptime; then echo "${since_start%.*}"; else echo "$SECONDS"; fi
}
script_start=$(monotonic)

# Run a command and return its status. Meanwhile print what it does and for how long it has run. On a terminal this is
# one line that is overwritten, and otherwise a new line every 10 s.
ticking() { # command that prints the progress, command...
    local words=$1 status=0 ticker
    shift
    tick "$words" &
    ticker=$!
    "$@" || status=$?
    end_ticker
    if [ -t 1 ]; then printf '\r\033[K'; fi
    return "$status"
}

# End the ticker, if there is one. It needs SIGKILL, because a starting subshell that any other signal ends still runs
# the script's EXIT trap.
end_ticker() {
    kill -s KILL "${ticker:-}" 2>/dev/null || return 0
    wait "$ticker" 2>/dev/null || true
}

tick() { # command that prints the progress; ends with the script
    local start every=10 due=10 line passed
    start=$(monotonic)
    if [ -t 1 ]; then every=2 due=2; fi
    while sleep 1 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
        passed=$(($(monotonic) - start))
        [ "$passed" -ge "$due" ] || continue
        due=$((passed + every))
        line="$((passed / 60)):$(printf %02d $((passed % 60))) $($1)"
        if [ -t 1 ]; then printf '\r\033[K%s\r' "${line:0:79}"; else echo "$line"; fi
    done
}

steps=() at_step=0

say_plan() { # List all steps before the first one starts.
    local i
    [ "$leads" = 1 ] || return 0
    if [ -z "${PYTHON:-}${CONT:-}" ] && [ ! -e "$root/.venv/installed" ] && [ ! -e "$root/.venv/installed-dev" ]; then
        steps+=(install)
    fi
    [ -n "${DATADIR:-}" ] || steps+=(text)
    for ((i = 0; i < NEXP; i++)); do steps+=(train check); done
    echo "$config_name, ${#steps[@]} steps: $(tr ' ' , <<<"${steps[*]}" | sed 's/,/, /g')"
}

phase() { # description of the step that starts now
    [ "$leads" = 1 ] || return 0
    local passed=$(($(monotonic) - script_start))
    at_step=$((at_step + 1))
    echo "[$at_step of ${#steps[@]}, $((passed / 60)):$(printf %02d $((passed % 60)))] $1"
}
