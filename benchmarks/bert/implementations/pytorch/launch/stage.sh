# shellcheck shell=bash disable=SC2016,SC2034,SC2154 # names shared with run_and_time.sh, and a shell on the node
# Sourced by run_and_time.sh where STAGEDIR is set: before a run, each node copies what its ranks will read in it.

staged_from=$DATADIR
DATADIR=$STAGEDIR
CACHE_CLEARED=0 # a copy is in the page cache
once_a_node=()  # beginning of a command
[ "$where" != slurm ] || # a node that fails ends by itself, the others' copies are kept
    once_a_node=("${nodes[@]}" --kill-on-bad-exit=0 ${container_srun[@]+"${container_srun[@]}"} ${container[@]+"${container[@]}"})

stage() { # index, seed that the run gets; one line for all nodes, what each says in a file of LOGDIR
    local status=0 began=$SECONDS seed=$2 said=$LOGDIR/staging_$1.txt first
    local named='set -o pipefail; "$@" 2>&1 | sed -u "s/^/${SLURMD_NODENAME:-$HOSTNAME}: /"'
    local of_checkpoint='import pathlib, sys; from mlperf_bert.checkpoint.manifest import read_state, resolve
print(read_state(resolve(pathlib.Path(sys.argv[1]))).seed)'
    if [ -n "$checkpoint" ] && ! begun "$1"; then
        seed=$("${here[@]}" -c "$of_checkpoint" "$checkpoint") || fail "RESUME: $checkpoint cannot be read, see above"
    fi
    staged_seed=$seed
    { mkdir -p "$LOGDIR" && rm -f "$said"; } || fail "LOGDIR: '$LOGDIR' cannot be written, see above"
    printf 'staging for seed %s in %s: ' "$seed" "$STAGEDIR"
    with_signals "$passed_on" ${once_a_node[@]+"${once_a_node[@]}"} bash -c "$named" bash \
        "$PYTHON" -P -m mlperf_bert stage-data --config "$CONFIG" ${overrides[@]+"${overrides[@]}"} \
        --set run.seed="$seed" --data "$staged_from" --out "$STAGEDIR" --replace >"$said" 2>&1 || status=$?
    if [ "$status" = 0 ]; then
        awk -v began="$began" -v ended="$SECONDS" '/\/train: [0-9,]+ of [0-9,]+ samples$/ {
                number = $(NF - 3); gsub(",", "", number)
                if (!nodes++ || number + 0 < least) { least = number + 0; fewest = $(NF - 3) }
                if (number + 0 >= most) { most = number + 0; largest = $(NF - 3) }
                all = $(NF - 1)
            }
            END { printf "%s to %s of %s samples on each of %d nodes, in %d s\n", fewest, largest, all, nodes,
                ended - began }' "$said"
    elif [ "$signalled" = 1 ]; then
        echo "stopped by a signal"
        exit "$STOPPED"
    else
        echo "failed"
        first=$(grep -m 1 ': mlperf_bert: error: ' "$said" || tail -n 1 "$said")
        fail "STAGEDIR: ${first/: mlperf_bert: error:/:} (all nodes: $said)" "$status"
    fi
}
