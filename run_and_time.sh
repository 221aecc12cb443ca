#!/usr/bin/env bash
#SBATCH --job-name=mlperf-bert
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=04:00:00
#SBATCH --open-mode=append
#
# Train a model to its target accuracy and time it, NEXP times. MLPerf's own checker reads every log.
#
#   ./run_and_time.sh [-- --set section.key=value ...]                              one machine
#   sbatch $(benchmarks/bert/implementations/pytorch/launch/slurm_options.py FILE) run_and_time.sh [-- ...]   SLURM
#   mpiexec -n RANKS ./run_and_time.sh [-- ...]                                     MPI, once per rank
#   benchmarks/bert/implementations/pytorch/launch/docker.sh [-- ...]               a container
#
# Settings such as the learning rate are in a config. To change one for this run, use --set:
#
#   ./run_and_time.sh -- --set optim.learning_rate=1e-3
#   .venv/bin/mlperf_bert config list                      list all settings with their meanings
#   .venv/bin/mlperf_bert config show cpu_tiny > my.toml   start a config of your own, for CONFIG=my.toml
#
# Environment variables, with defaults in brackets:
#
#   CONFIG   TOML file, or name of a shipped config                     [cpu_tiny]
#   DATADIR  prepared data with train/ and eval/                        [a small corpus, made at first use]
#   INIT_CHECKPOINT   weights to start from, made by `mlperf_bert convert`. The closed division requires them.
#                                                                       [run.init_checkpoint of CONFIG, if set]
#   STAGEDIR directory on a local disk of each node of a SLURM job. Every node copies DATADIR there with rsync
#            before the first run, and the runs read the copy.          [DATADIR is read in place]
#   LOGDIR   run directory to create                                    [runs/<utc>-<config>, or runs/<job>-<config>]
#   NEXP     number of runs                                             [1]
#   SEED     seed of the first run. Each further run adds 1.            [run.seed of CONFIG, drawn if that is random]
#   PYTHON   interpreter that has the package                           [.venv/bin/python, made at first use]
#   RESUME   auto resumes the runs in LOGDIR, or starts them. A directory resumes from the checkpoint in it.
#                                                                       [none; auto in a requeued SLURM job]
#   CONT     container image for SLURM's pyxis (see launch/slurm.sh)    [ranks run on the node itself]
#   CLEAR_CACHES      1 drops the page cache of every node before each run, and 0 keeps it. Set CACHE_CLEARED=1 if you
#            dropped it yourself.   [1 if the rules of the closed division are enforced, otherwise 0]
#   NETWORK_TEST      0 skips the all-reduce test before the first run of a SLURM job, and warn goes on although the
#            network is much slower than parallel.network_gb_s of CONFIG.   [1]
#   SRUN_OPTIONS      more options of srun for the ranks of a SLURM job, such as --mpi=pmi2. They override the script's.
#   SHARP    1 lets the switches of an InfiniBand network sum the gradients of a SLURM job  [0]
#
# After a complete run it prints RESULT,bert,<seed>,<seconds>,<user>,<start>. The seconds include start-up.
# shellcheck disable=SC2034,SC2154 # The files in launch/ share these variables.
set -euo pipefail

# sbatch starts a copy of this name, and passes on the variables of the job step in which it was typed.
[ "${BASH_SOURCE[0]##*/}" != slurm_script ] || unset SLURM_STEP_ID SLURM_STEP_NUM_TASKS PMI_RANK PMI_SIZE
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
launch=benchmarks/bert/implementations/pytorch/launch
[ -d "$root/$launch" ] || root=${SLURM_SUBMIT_DIR:-$root} # sbatch runs a copy of this file from its own directory.
# The exit statuses of errors.py.
MISTAKE=2 TARGET_MISSED=3 STOPPED=75 INTERRUPTED=130

fail() { # message, [exit status]
    echo "run_and_time.sh: error: $1" >&2
    exit "${2:-$MISTAKE}"
}

[ -d "$root/$launch" ] || fail "$root is not the repository; submit the job from the top of the repository"
case ${1:---} in
--) ;;
-h | --help) sed -n '/^# Train/,/^# shellcheck/{/^# shellcheck/!s/^# \{0,1\}//p;}' "$root/run_and_time.sh" && exit ;;
*) fail "unknown argument '$1'; put the options of training after --" ;;
esac
given= # the caller's variables, for the command that resumes the runs
for name in CONFIG DATADIR INIT_CHECKPOINT STAGEDIR NEXP SEED PYTHON CONT MOUNTS SRUN_OPTIONS CLEAR_CACHES \
    NETWORK_TEST SHARP MASTER_ADDR MASTER_PORT; do
    [ -z "${!name:-}" ] || given+=" $name=$(printf %q "${!name}")"
done
CONFIG=${CONFIG:-cpu_tiny} NEXP=${NEXP:-1}
config_name=$(basename "$CONFIG" .toml)
shipped=$root/${launch%/*}/mlperf_bert/configs/$CONFIG.toml
if [ ! -e "$CONFIG" ] && [ -f "$shipped" ]; then CONFIG=$shipped; fi
requeued=0
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || requeued=1
if [ "$requeued" = 1 ]; then RESUME=${RESUME:-auto}; else RESUME=${RESUME:-none}; fi
job=${SLURM_JOB_ID:-}
[ -z "${SLURM_STEP_ID:-}" ] || job=
LOGDIR=${LOGDIR:-$root/runs/${job:-$(date -u +%Y%m%dT%H%M%SZ)}-$config_name}
RULESET=5.0.0 # the last MLPerf ruleset that includes BERT
ulimit -S -n "$(ulimit -H -n)" 2>/dev/null || true # for the shards, and for rank 0's connection to each rank
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} # Spinning threads would slow down all other processes.
export PYTHONSAFEPATH=1 # Python must not import from the current directory, which may belong to another user.

[ $# -eq 0 ] || shift
# Bash before 4.4 treats an empty array as an unset variable, hence the ${name[@]+...} below.
options=("$@")
overrides=() # the options that config and prepare accept too
for ((i = 0; i < $#; i++)); do
    case ${options[i]} in
    --set) [ $((i + 1)) -eq $# ] || overrides+=(--set "${options[i + 1]}") ;;
    --set=*) overrides+=(--set "${options[i]#--set=}") ;;
    --init-checkpoint) INIT_CHECKPOINT=${options[i + 1]:-} ;;
    --init-checkpoint=*) INIT_CHECKPOINT=${options[i]#--init-checkpoint=} ;;
    esac
done
for each in ${options[@]+"${options[@]}"}; do
    case $each in
    --config | --config=*) instead=CONFIG ;;
    --data | --data=*) instead=DATADIR ;;
    --run-dir | --run-dir=*) instead=LOGDIR ;;
    --run-index | --run-index=*) instead=NEXP ;;
    --resume | --resume=*) instead=RESUME ;;
    run.seed[=\ ]* | --set=run.seed[=\ ]*) instead=SEED ;;
    *) continue ;;
    esac
    fail "'$each' cannot follow --, because the script sets it for each run; set $instead before the command instead"
done
[[ $NEXP =~ ^[1-9][0-9]*$ ]] || fail "NEXP: '$NEXP' is not a positive integer; set it to the number of runs"
[ "${TIMED_NEXP:-$NEXP}" = "$NEXP" ] ||
    echo "run_and_time.sh: warning: the job's time limit is for NEXP=$TIMED_NEXP, but NEXP is $NEXP; type" \
        "'export NEXP=$NEXP' on a line of its own before sbatch" >&2
[[ ${SEED:-0} =~ ^[0-9]{1,18}$ ]] || fail "SEED: '$SEED' is not a non-negative integer of at most 18 digits; set it to such a number, or unset it"
[[ ${CLEAR_CACHES:-0} =~ ^[01]$ ]] || fail "CLEAR_CACHES: '$CLEAR_CACHES' is neither 1 nor 0; set it to 1 or 0, or unset it"
[[ ${SHARP:-0} =~ ^[01]$ ]] || fail "SHARP: '$SHARP' is neither 1 nor 0; set it to 1 or 0, or unset it"
[[ ${NETWORK_TEST:-1} =~ ^([01]|warn)$ ]] ||
    fail "NETWORK_TEST: '$NETWORK_TEST' is not 1, 0 or warn; set it to one of these, or unset it"
[ "$RESUME" != none ] || [ -z "${INIT_CHECKPOINT:-}" ] || [ -d "$INIT_CHECKPOINT" ] ||
    fail "INIT_CHECKPOINT: no such directory '$INIT_CHECKPOINT'; create one with mlperf_bert convert"
[ -z "${DATADIR:-}" ] || [ -d "$DATADIR" ] ||
    fail "DATADIR: no such directory '$DATADIR'; prepare it with 'mlperf_bert prepare' (docs/guides/prepare_data.md)"
case $RESUME in
none | auto) ;;
*)
    [ -d "$RESUME" ] || fail "RESUME: no such directory '$RESUME'; set it to none, auto, or a directory with a checkpoint"
    [ "$NEXP" = 1 ] || fail "NEXP: $NEXP runs cannot resume from one checkpoint; unset NEXP, or set RESUME=auto"
    ;;
esac
for part in signals ticking one_run where start; do
    # shellcheck source=/dev/null
    . "$root/$launch/$part.sh"
done

missed=0
for ((i = 0; i < NEXP; i++)); do
    seed=${SEED:+$((10#$SEED + i))}
    status=0
    one_run "$i" "${seed:-$(($(od -An -N4 -tu4 /dev/urandom) & 0x7fffffff))}" || status=$?
    if [ "$signalled" = 1 ] && [ $((i + 1)) -lt "$NEXP" ]; then exit "$STOPPED"; fi
    case $status in
    0) ;;
    "$TARGET_MISSED") missed=$((missed + 1)) ;;
    *) exit "$status" ;; # The next run would fail for the same reason.
    esac
done
if [ "$missed" -gt 0 ] && [ "$leads" = 1 ]; then
    more="train longer with run.max_steps and schedule.decay_steps"
    [ "$NEXP" = 1 ] || more+=", and repeat all runs, because those of a series must have the same settings"
    [ "$NEXP" != 10 ] || [ "$missed" != 1 ] || more="MLPerf accepts one in ten, so you can package them unless that run diverged"
    fail "$LOGDIR: $missed of $NEXP runs missed the target; $more" "$TARGET_MISSED"
fi
