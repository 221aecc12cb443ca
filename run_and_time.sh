#!/usr/bin/env bash
#SBATCH --job-name=mlperf-bert
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=04:00:00
#SBATCH --open-mode=append
#
# Train BERT to its target accuracy and time it, NEXP times; every MLPerf log is checked.
#
#   ./run_and_time.sh [-- --set section.key=value ...]                              one machine
#   sbatch $(.venv/bin/mlperf_bert config slurm FILE) run_and_time.sh [-- ...]      a cluster
#   mpiexec -n RANKS ./run_and_time.sh [-- ...]                                     once a rank
#   benchmarks/bert/implementations/pytorch/launch/docker.sh [-- ...]               a container
#
#   CONFIG   TOML file, or name of a shipped one    [cpu_tiny; with CORPUS own_text_gpu or _cpu]
#   DATADIR  prepared data: train/ and eval/        [the embedded corpus, made at first use]
#   INIT_CHECKPOINT   weights to begin with, from `mlperf_bert convert`; the closed division wants them
#                                                   [run.init_checkpoint of CONFIG, else drawn]
#   CORPUS   your own text, a directory or a file: prepared into DATADIR [.cache/own-...], trained on to the end
#            of the schedule, evaluated and exported; VOCAB is a vocab.txt to use instead of one of its own,
#            ARCHITECTURE=modern trains ModernBERT's in place of BERT's
#   STAGEDIR directory on a disk of each node of a SLURM job: before the first run every node copies DATADIR there
#            by rsync, and the runs read the copy                              [DATADIR is read where it is]
#   LOGDIR   run directory, created                 [runs/<utc>-<config>; in a SLURM job runs/<job>-<config>,
#                                                   runs/<job>-<config>-2 for its second call, and so on]
#   NEXP     number of runs                         [1]
#   SEED     seed of the first run, then counted up [drawn from the system's random source]
#   PYTHON   interpreter that has the package       [.venv/bin/python, made at first use]
#   RESUME   auto: go on with what is in LOGDIR, or begin; a directory: go on from the checkpoint in it
#                                                   [none: begin; auto in a job that SLURM has requeued]
#   MAX_RESTARTS   how often a run that crashed, or lost a rank, goes on from its last checkpoint   [0]
#   CONT     image for SLURM's pyxis, SIF file for Apptainer: where ranks run   [on the node itself]
#   SHARP    1: NCCL may add gradients up in the network's switches, 0: not; in a SLURM job   [NCCL_COLLNET_ENABLE]
#   MEMLOCK=0        leaves the limit of locked memory; else a SLURM job lifts it for its ranks, where it may
#   CLEAR_CACHES     1: drops the page cache of every node before each run, 0: leaves it alone
#                                                   [1 before runs of a submission (NEXP above 1, or the closed
#                                                   division), else 0]; CACHE_CLEARED=1 says that it was dropped already
#   NETWORK_TEST=0   skips the all-reduce before the first run of several ranks
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
launch=benchmarks/bert/implementations/pytorch/launch
# sbatch runs a copy of this file, from a place of its own.
[ -d "$root/$launch" ] || root=${SLURM_SUBMIT_DIR:-$root}
if [ ! -d "$root/$launch" ]; then
    echo "run_and_time.sh: error: $root is not the tree; submit from the top of the tree" >&2
    exit 2
fi
# Exit statuses, as errors.py has them.
MISTAKE=2
TARGET_MISSED=3
LOST=70
STOPPED=75
INTERRUPTED=130

fail() { # message, [exit status]
    echo "run_and_time.sh: error: $1" >&2
    exit "${2:-$MISTAKE}"
}

given= # the caller's variables, as the command that goes on with the runs names them again
for name in CONFIG DATADIR INIT_CHECKPOINT CORPUS VOCAB ARCHITECTURE STAGEDIR NEXP SEED PYTHON MAX_RESTARTS CONT SHARP \
    MEMLOCK CLEAR_CACHES NETWORK_TEST MASTER_ADDR MASTER_PORT; do
    [ -z "${!name:-}" ] || given+=" $name=$(printf %q "${!name}")"
done
for name in CONFIG DATADIR INIT_CHECKPOINT CORPUS VOCAB STAGEDIR LOGDIR PYTHON RESUME; do
    # To the programs that take it, it would be an option.
    case ${!name:-} in -*) fail "$name is '${!name}', which begins like an option; write ./${!name} for a file" ;; esac
done
configs=$root/benchmarks/bert/implementations/pytorch/mlperf_bert/configs
asked=${CONFIG:-} # own text chooses one where none is asked for
if [ -n "${CORPUS:-}" ]; then CONFIG=${CONFIG:-own_text_cpu}; fi
if [ -n "${ARCHITECTURE:-}" ] && [ -z "${CORPUS:-}" ]; then
    fail "ARCHITECTURE: is for CORPUS; without it CONFIG's model.architecture says it"
fi
CONFIG=${CONFIG:-cpu_tiny}
config_name=$(basename "$CONFIG" .toml)
[ -z "${CORPUS:-}" ] || [ -n "$asked" ] || config_name=own_text
if [ ! -e "$CONFIG" ] && [ -f "$configs/$CONFIG.toml" ]; then CONFIG=$configs/$CONFIG.toml; fi
NEXP=${NEXP:-1}
MAX_RESTARTS=${MAX_RESTARTS:-0} # none: a run that is timed is one run
requeued=0
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || requeued=1
used= # name of a file in a LOGDIR of the job: in this start of the job, a call has used it
if [ -z "${LOGDIR:-}" ]; then
    if [ -n "${SLURM_JOB_ID:-}" ] && [ -z "${SLURM_STEP_ID:-}" ]; then
        # After a requeue the job's script begins again, and its n-th call finds what it had.
        used=.used_${SLURM_RESTART_COUNT:-0}
        LOGDIR=$root/runs/$SLURM_JOB_ID-$config_name
        for ((call = 2; ; call++)); do
            [ -e "$LOGDIR/$used" ] || break
            LOGDIR=$root/runs/$SLURM_JOB_ID-$config_name-$call
        done
    else
        LOGDIR=$root/runs/$(date -u +%Y%m%dT%H%M%SZ)-$config_name
    fi
fi
RULESET=5.0.0 # the last one that knows BERT
ulimit -S -n "$(ulimit -H -n)" 2>/dev/null || true # shards, and a connection of rank 0 for each rank
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} # spinning threads lose to any other process
export PYTHONSAFEPATH=1 # no Python looks for its code in the current directory, which may be another user's

case ${1:-} in -h | --help)
    sed -n '/^# Train/,/^set /{/^#/s/^# \{0,1\}//p;}' "$root/run_and_time.sh"
    exit
    ;;
esac
[ "${1:---}" = "--" ] || fail "unknown argument '$1'; options for training go after --"
[ $# -eq 0 ] || shift
[[ $NEXP =~ ^[1-9][0-9]*$ ]] || fail "NEXP is '$NEXP'; set it to a number of runs above 0"
[[ $MAX_RESTARTS =~ ^[0-9]{1,6}$ ]] || fail "MAX_RESTARTS is '$MAX_RESTARTS'; set it to a number of at least 0"
if [ -z "${RESUME:-}" ]; then
    RESUME=none
    [ "$requeued" = 0 ] || RESUME=auto
fi
checkpoint= # to go on from, where RESUME says which
case $RESUME in
none | auto) ;;
*)
    [ -d "$RESUME" ] || fail "RESUME is '$RESUME'; set it to none, auto, or a directory with a checkpoint"
    [ "$NEXP" = 1 ] || fail "RESUME is a checkpoint and NEXP is $NEXP; go on from it once"
    checkpoint=$RESUME
    ;;
esac
[[ ${CLEAR_CACHES:-0} =~ ^[01]$ ]] || fail "CLEAR_CACHES is '$CLEAR_CACHES'; set it to 1 or 0, or leave it out"
[[ ${STAGEDIR:-/} = /* ]] || fail "STAGEDIR is '$STAGEDIR'; give a path that is the same on every node, from / on"
[[ ${SEED:-0} =~ ^[0-9]{1,18}$ ]] || fail "SEED is '$SEED'; set it to a number of at least 0"
# An empty array is an unset variable to shells before 4.4, hence the ${name[@]+...} below.
options=("$@") own_options=("$@") # the former grow with CORPUS
overrides=() # what config and prepare take of the options
for ((i = 0; i < $#; i++)); do
    case ${options[i]} in
    --set) [ $((i + 1)) -eq $# ] || overrides+=(--set "${options[i + 1]}") ;;
    --set=*) overrides+=(--set "${options[i]#--set=}") ;;
    --init-checkpoint) INIT_CHECKPOINT=${options[i + 1]:-} ;;
    --init-checkpoint=*) INIT_CHECKPOINT=${options[i]#--init-checkpoint=} ;;
    esac
done
if [ "$RESUME" = none ] && [ -n "${INIT_CHECKPOINT:-}" ] && [ ! -d "$INIT_CHECKPOINT" ]; then
    fail "INIT_CHECKPOINT: there is no directory '$INIT_CHECKPOINT'; make it with mlperf_bert convert"
fi
# shellcheck source=benchmarks/bert/implementations/pytorch/launch/signals.sh
. "$root/$launch/signals.sh" # with_signals
# shellcheck source=benchmarks/bert/implementations/pytorch/launch/ticking.sh
. "$root/$launch/ticking.sh" # ticking, end_ticker, say_plan, phase
# shellcheck source=benchmarks/bert/implementations/pytorch/launch/one_run.sh
. "$root/$launch/one_run.sh" # one_run, interrupted
# shellcheck source=benchmarks/bert/implementations/pytorch/launch/where.sh
. "$root/$launch/where.sh" # where, PYTHON, leads, here, ranks, nodes, passed_on
init_checkpoint=()
[ -z "${INIT_CHECKPOINT:-}" ] || init_checkpoint=(--init-checkpoint "$INIT_CHECKPOINT")
[ "$where" != rank ] || [ "$MAX_RESTARTS" = 0 ] ||
    fail "MAX_RESTARTS is set, but the ranks were started by mpiexec or srun, which end with them; leave it out"
[ "$where" = slurm ] || [ -z "${STAGEDIR:-}" ] ||
    fail "STAGEDIR is for a job of SLURM; copy the data yourself, and give the copy as DATADIR"

setting() { # name, overrides that come before the user's
    local name=$1
    shift
    "${here[@]}" -m mlperf_bert config get "$CONFIG" "$name" "$@" ${overrides[@]+"${overrides[@]}"}
}

# Options that train does not take are refused before the text is prepared.
[ $# -eq 0 ] || [ "$leads" = 0 ] || [ "$RESUME" != none ] || [ -n "${CORPUS:-}" ] ||
    "${here[@]}" -m mlperf_bert train --config "$CONFIG" --data "$root" --only-check "$@" || exit

wants_clear_caches() { # whether the page cache is to be dropped: where asked for, and before runs of a submission
    if [ -z "${CLEAR_CACHES:-}" ]; then
        CLEAR_CACHES=0
        if [ "$NEXP" -gt 1 ] || [ "$(setting mlperf.division)" = closed ]; then CLEAR_CACHES=1; fi
    fi
    [ "$CLEAR_CACHES" = 1 ]
}

# Drop the page cache of every node; fails where that may not be done, and the log will say so.
drop_caches() {
    wants_clear_caches || return
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

check_start() { # whether runs may begin with the weights they are given, or with none
    case $RESUME in
    none) ;;
    auto) ! begun $((NEXP - 1)) || return 0 ;; # the last of them: all have been begun
    *) return 0 ;; # the checkpoint's
    esac
    [ "$where" = rank ] || # one line from the ranks is enough
        "${here[@]}" -m mlperf_bert config check-start "$CONFIG" --data "$DATADIR" \
            ${SEED:+--set run.seed="$((10#$SEED))"} ${overrides[@]+"${overrides[@]}"} \
            ${init_checkpoint[@]+"${init_checkpoint[@]}"} || exit
}

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

if [ -n "${CORPUS:-}" ]; then
    # shellcheck source=benchmarks/bert/implementations/pytorch/launch/own_text.sh
    . "$root/$launch/own_text.sh" # prepare_own_text, hand_over
    prepare_own_text
elif [ -n "${DATADIR:-}" ]; then
    [ -d "$DATADIR" ] || fail "DATADIR: there is no directory '$DATADIR'; make it with init_datasets.sh"
else
    corpus=$(setting data.corpus)
    [ "$corpus" = embedded ] ||
        fail "DATADIR is not set, and $CONFIG wants prepared data; make it with init_datasets.sh, and name it"
    DATADIR=$root/.cache/$(setting embedded_corpus_name)
    if [ "$leads" = 1 ]; then
        [ -d "$DATADIR" ] || may_write "$DATADIR" ||
            fail "$DATADIR cannot be made: no right to write there, or a read-only disk; make the tree writable, or copy it"
        phase "text: Python's own documentation, in shards"
        ticking "echo preparing the text" "${here[@]}" -m mlperf_bert prepare --embedded --config "$CONFIG" --out "$DATADIR" \
            ${overrides[@]+"${overrides[@]}"}
    fi
fi
check_start
if [ "$where" = slurm ]; then
    nodes_wanted=$(setting parallel.nodes)
    processes=$(setting processes_per_node)
    srun_ranks "$nodes_wanted" "$processes"
    [ "$nodes_wanted" = 1 ] || warn_of_locked_memory
    test_network
    [ -z "${STAGEDIR:-}" ] || stage
fi
missed=0
for ((i = 0; i < NEXP; i++)); do
    if [ -n "${SEED:-}" ]; then
        seed=$((10#$SEED + i))
    else
        seed=$(($(od -An -N4 -tu4 /dev/urandom) & 0x7fffffff))
    fi
    seed=$(setting run.seed --set run.seed="$seed")
    status=0
    one_run "$i" "$seed" || status=$?
    if [ "$signalled" = 1 ] && [ $((i + 1)) -lt "$NEXP" ]; then exit "$STOPPED"; fi
    case $status in
    0) ;;
    "$TARGET_MISSED") missed=$((missed + 1)) ;;
    *) exit "$status" ;; # a mistake, Ctrl-C or a stop would only come again
    esac
    [ -z "${CORPUS:-}" ] || hand_over "$i"
done
if [ "$missed" -gt 0 ] && [ "$leads" = 1 ]; then
    fail "$missed of $NEXP runs missed the target; see $LOGDIR" "$TARGET_MISSED"
fi
