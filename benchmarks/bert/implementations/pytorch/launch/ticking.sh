# shellcheck shell=bash disable=SC2154 # names of run_and_time.sh
# Sourced by run_and_time.sh and tools/venv.sh: what comes, and that a command that says nothing goes on.

# Whole seconds of a clock that nobody sets. Bash's SECONDS follows the time of day; outside Linux nothing better is there.
monotonic() {
    local since_start
    if read -r since_start _ 2>/dev/null </proc/uptime; then echo "${since_start%.*}"; else echo "$SECONDS"; fi
}
began_at=$(monotonic)

# Run a command, and meanwhile say that it goes on and for how long: in place on a terminal, where the command's own
# line comes over it; else as a line every 10 s. Returns the command's status.
ticking() { # command that prints what goes on, command...
    local words=$1 status=0 ticker
    shift
    tick "$words" &
    ticker=$!
    "$@" || status=$?
    end_ticker
    if [ -t 1 ]; then printf '\r\033[K'; fi
    return "$status"
}

# By SIGKILL: a subshell that another signal ends as it begins still runs the script's EXIT trap, and complains in it.
end_ticker() { # if there is one
    kill -s KILL "${ticker:-}" 2>/dev/null || return 0
    wait "$ticker" 2>/dev/null || true
}

tick() { # command that prints what goes on; ends with the script
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

say_plan() { # what comes, before any of it
    local i
    [ "$leads" = 1 ] || return 0
    if [ -z "${PYTHON:-}" ] && [ ! -e "$root/.venv/installed" ] && [ ! -e "$root/.venv/installed-dev" ]; then
        steps+=(install)
    fi
    [ -n "${DATADIR:-}" ] || steps+=(text)
    for ((i = 0; i < NEXP; i++)); do steps+=(train check); done
    echo "$config_name, ${#steps[@]} steps: $(tr ' ' , <<<"${steps[*]}" | sed 's/,/, /g')"
}

phase() { # what begins now
    [ "$leads" = 1 ] || return 0
    local passed=$(($(monotonic) - began_at))
    at_step=$((at_step + 1))
    echo "[$at_step of ${#steps[@]}, $((passed / 60)):$(printf %02d $((passed % 60)))] $1"
}
