# shellcheck shell=bash disable=SC2034,SC2154 # names shared with run_and_time.sh
# Sourced by run_and_time.sh before the first run: the config's answers, the data, and whether runs may begin.

test_network() { # an all-reduce of all ranks, before the clock
    local status=0
    [ "${NETWORK_TEST:-1}" = 1 ] || return 0
    with_signals "$passed_on" "${ranks[@]}" -m mlperf_bert network-test \
        --config "$CONFIG" ${overrides[@]+"${overrides[@]}"} || status=$?
    case $status in
    0) ;;
    "$MISTAKE" | "$STOPPED" | "$INTERRUPTED" | 143) exit "$status" ;; # which says by itself what it was
    *) fail "the all-reduce of the ranks failed, see above; NETWORK_TEST=0 skips this test" 1 ;;
    esac
}

answers=$("${here[@]}" -m mlperf_bert config get "$CONFIG" data.corpus embedded_corpus_name mlperf.division \
    parallel.nodes processes_per_node ${overrides[@]+"${overrides[@]}"}) || exit
read -r corpus embedded division nodes_wanted processes <<<"${answers//$'\n'/ }"
if [ -z "${CLEAR_CACHES:-}" ]; then
    CLEAR_CACHES=0
    if [ "$NEXP" -gt 1 ] || [ "$division" = closed ]; then CLEAR_CACHES=1; fi
fi
init_checkpoint=()
[ -z "${INIT_CHECKPOINT:-}" ] || init_checkpoint=(--init-checkpoint "$INIT_CHECKPOINT")
[ "$where" = slurm ] || [ -z "${STAGEDIR:-}" ] ||
    fail "STAGEDIR is for a job of SLURM; copy the data yourself, and give the copy as DATADIR"

if [ -z "${DATADIR:-}" ]; then
    [ "$corpus" = embedded ] ||
        fail "DATADIR is not set, and $CONFIG wants prepared data; make it with init_datasets.sh, and name it"
    DATADIR=$root/.cache/$embedded
    if [ "$leads" = 1 ]; then
        phase "text: Python's own documentation, in shards"
        ticking "echo preparing the text" "${here[@]}" -m mlperf_bert prepare --embedded --config "$CONFIG" \
            --out "$DATADIR" ${overrides[@]+"${overrides[@]}"}
    fi
fi
# Whether runs may begin with the weights they are given. One line from ranks that a launcher started is enough.
if [ "$where" != rank ] && { [ "$RESUME" = none ] || { [ "$RESUME" = auto ] && ! begun $((NEXP - 1)); }; }; then
    "${here[@]}" -m mlperf_bert config validate "$CONFIG" --data "$DATADIR" \
        ${SEED:+--set run.seed="$((10#$SEED))"} ${overrides[@]+"${overrides[@]}"} \
        ${init_checkpoint[@]+"${init_checkpoint[@]}"} || exit
fi
if [ "$where" = slurm ]; then
    srun_ranks "$nodes_wanted" "$processes"
    test_network
    [ -z "${STAGEDIR:-}" ] || stage
fi
