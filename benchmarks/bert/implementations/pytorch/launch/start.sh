# shellcheck shell=bash disable=SC2034,SC2154 # run_and_time.sh shares these variables.
# Sourced by run_and_time.sh before the first run: reads the config, prepares the data, and checks that runs can start.

test_network() { # an all-reduce of all ranks before the clock starts
    local status=0 warn=()
    case ${NETWORK_TEST:-1} in
    0) return ;;
    warn) warn=(--warn) ;;
    esac
    with_signals "$passed_on" "${ranks[@]}" -m mlperf_bert network-test \
        --config "$CONFIG" ${overrides[@]+"${overrides[@]}"} ${warn[@]+"${warn[@]}"} || status=$?
    case $status in
    0) ;;
    "$MISTAKE" | "$STOPPED" | "$INTERRUPTED" | 129 | 138 | 143) exit "$status" ;; # The test has printed the reason.
    *) fail "the all-reduce of the ranks failed, as shown above; fix the network, or skip this test with NETWORK_TEST=0" 1 ;;
    esac
}

answers=$("${here[@]}" -m mlperf_bert config get "$CONFIG" data.corpus embedded_corpus_name mlperf.division \
    parallel.nodes processes_per_node mlperf.enforce_rules run.seed ${overrides[@]+"${overrides[@]}"}) || exit
read -r corpus embedded division nodes_wanted processes enforce_rules config_seed <<<"${answers//$'\n'/ }"
[[ ! ${config_seed:-random} =~ ^[0-9]+$ ]] || SEED=${SEED:-$config_seed} # CONFIG may also say 'random'.
cache_reason="CLEAR_CACHES=1"
if [ -z "${CLEAR_CACHES:-}" ]; then
    CLEAR_CACHES=0
    case $division-${enforce_rules:-} in closed-[Tt]rue)
        CLEAR_CACHES=1 cache_reason="the closed division requires it"
        ;;
    esac
fi
init_checkpoint=()
[ -z "${INIT_CHECKPOINT:-}" ] || init_checkpoint=(--init-checkpoint "$INIT_CHECKPOINT")
[ "$where" = slurm ] || [ -z "${STAGEDIR:-}" ] ||
    fail "STAGEDIR: only SLURM jobs can stage data; copy the data yourself, and set DATADIR to the copy"
[ "$where" = slurm ] || [ -z "${CONT:-}" ] ||
    fail "CONT: only SLURM jobs start containers; unset CONT, or use $launch/docker.sh"

if [ -z "${DATADIR:-}" ]; then
    [ "$corpus" = embedded ] ||
        fail "DATADIR: not set, but $CONFIG needs prepared data; create it with 'mlperf_bert prepare' (docs/guides/prepare_data.md), and set DATADIR"
    DATADIR=$root/.cache/$embedded
    if [ "$leads" = 1 ]; then
        phase "text: Python's own documentation, in shards"
        ticking "echo preparing the text" "${here[@]}" -m mlperf_bert prepare --embedded --config "$CONFIG" \
            --out "$DATADIR" ${overrides[@]+"${overrides[@]}"}
    fi
fi
# Check that runs can start with the given weights. Ranks that a launcher started check this themselves.
if [ "$where" != rank ] && { [ "$RESUME" = none ] || { [ "$RESUME" = auto ] && ! has_run $((NEXP - 1)); }; }; then
    "${here[@]}" -m mlperf_bert config validate "$CONFIG" --data "$DATADIR" \
        ${SEED:+--set run.seed="$((10#$SEED))"} ${overrides[@]+"${overrides[@]}"} \
        ${init_checkpoint[@]+"${init_checkpoint[@]}"} || exit
fi
if [ "$where" = slurm ]; then
    srun_ranks "$nodes_wanted" "$processes"
    test_network
    [ -z "${STAGEDIR:-}" ] || stage
fi
