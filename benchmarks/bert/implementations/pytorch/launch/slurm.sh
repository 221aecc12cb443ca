# shellcheck shell=bash disable=SC2034,SC2154 # names shared with run_and_time.sh
# Sourced by where.sh in the shell of a SLURM job: srun, and the container where one is asked for.
#
#   CONT           image for pyxis, best a squashfs file (enroot import); docker://... is imported on every node
#   SIF            image file of Apptainer
#   MOUNTS         more directories that the container sees, separated by commas
#   SRUN_OPTIONS   more options for srun, such as --mpi=pmi2
#   APPTAINER_TMPDIR   directory on a disk of each node: Apptainer unpacks there, and it is the ranks' TMPDIR

[ -n "${SLURM_JOB_NUM_NODES:-}" ] ||
    fail "SLURM_JOB_ID is set and SLURM_JOB_NUM_NODES is not: start in a job of SLURM's, or unset SLURM_JOB_ID"
case ${SHARP:=} in
"") ;;
0 | 1) export NCCL_COLLNET_ENABLE=$SHARP ;;
*) fail "SHARP is '$SHARP'; set it to 1 or 0, or leave it out" ;;
esac
# srun hands limits on to the ranks; InfiniBand locks the memory that it sends from.
[ "${MEMLOCK:-1}" = 0 ] || ulimit -l unlimited 2>/dev/null || ulimit -S -l "$(ulimit -H -l)" 2>/dev/null || true
temporary= # for ranks in Apptainer, where an image cannot be written
[ -z "${SIF:-}" ] || temporary=${APPTAINER_TMPDIR:-${TMPDIR:-/tmp}}
[ "$temporary" != /tmp ] || temporary= # seen in any case
passed_on=USR1 # at SIGTERM srun would kill the ranks instead of telling them
container_srun=() # options of srun
container=()      # words before the command

# Directories that the container sees under their own names, links not followed, with commas between.
mounted() {
    local path seen=$root
    for path in "${DATADIR:-}" "$LOGDIR" "$(dirname "$CONFIG")" "$checkpoint" "${INIT_CHECKPOINT:-}" \
        "${STAGEDIR:-}" "$temporary"; do
        case $path in "" | "$root" | "$root"/*) ;; *) seen+=,$path ;; esac
    done
    echo "$seen${MOUNTS:+,$MOUNTS}"
}

if [ -n "${CONT:-}${SIF:-}" ]; then
    mkdir -p "$LOGDIR"
    LOGDIR=$(realpath -s "$LOGDIR") CONFIG=$(realpath -s "$CONFIG")
    [ -z "${DATADIR:-}" ] || DATADIR=$(realpath -s "$DATADIR")
    [ -z "$checkpoint" ] || checkpoint=$(realpath -s "$checkpoint")
    [ -z "${INIT_CHECKPOINT:-}" ] || INIT_CHECKPOINT=$(realpath -s "$INIT_CHECKPOINT")
fi

if [ -n "${CONT:-}" ]; then
    srun --help 2>&1 | grep -q -e --container-image ||
        fail "CONT is set, but this SLURM has no pyxis; set SIF for Apptainer, or neither"
    binds=$(mounted | sed 's/\([^,]*\)/\1:\1/g')
    name=mlperf_bert_$SLURM_JOB_ID # unpacked once a node, for all steps of the job
    container_srun=(--container-image="$CONT" --container-name="$name" --container-mounts="$binds"
        --container-workdir="$root" --no-container-mount-home)
    container=(/usr/bin/env) # or srun may look for the interpreter outside
    trap 'if [ "$BASHPID" = $$ ]; then "${nodes[@]}" enroot remove --force "pyxis_$name" >/dev/null 2>&1 || true; fi' EXIT
elif [ -n "${SIF:-}" ]; then
    [ -r "$SIF" ] || fail "SIF is $SIF, which cannot be read; give an image file of Apptainer"
    command -v apptainer >/dev/null || fail "SIF is set, but apptainer is not installed on the node"
    container=(apptainer exec --nv --bind "$(mounted)" --env "TMPDIR=${temporary:-/tmp}" --pwd "$root" "$SIF")
fi

if [ -n "${CONT:-}${SIF:-}" ]; then
    PYTHON=${PYTHON:-python3} # of the image
else
    own_python
fi
read -r -a srun_options <<<"${SRUN_OPTIONS:-}"
step=(srun --kill-on-bad-exit=1 --cpu-bind=none ${srun_options[@]+"${srun_options[@]}"})
inside=(${container_srun[@]+"${container_srun[@]}"} ${container[@]+"${container[@]}"} "$PYTHON" -P)
here=("$PYTHON" -P)
[ -z "${CONT:-}${SIF:-}" ] || here=("${step[@]}" --nodes=1 --ntasks=1 "${inside[@]}")
nodes=("${step[@]}" --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES"
    --ntasks-per-node=1)
# What a container is to see must be there before it.
if [ -n "${CONT:-}${SIF:-}" ] && [ -n "${STAGEDIR:-}$temporary" ]; then
    "${nodes[@]}" mkdir -p ${STAGEDIR:+"$STAGEDIR"} ${temporary:+"$temporary"} ||
        fail "${STAGEDIR:-} $temporary cannot be made on every node, see above; give a directory on a disk of theirs"
fi

warn_of_locked_memory() { # for several nodes, once the config can be read
    local limit
    limit=$(ulimit -l)
    [ "$limit" = unlimited ] || [ "${MEMLOCK:-1}" = 0 ] || [ "$(setting run.device)" != cuda ] ||
        echo "run_and_time.sh: warning: a rank may lock $limit KiB of memory only, with which NCCL may fail over \
InfiniBand; have LimitMEMLOCK=infinity set for slurmd, or submit from a shell with ulimit -l unlimited" >&2
}

# ranks, once the config can be read
srun_ranks() { # nodes and ranks a node that the config wants
    [ "$1" = "$SLURM_JOB_NUM_NODES" ] || fail "the job has $SLURM_JOB_NUM_NODES nodes and $CONFIG \
wants $1; submit with: $(again_by)"
    ranks=("${step[@]}" --nodes="$1" --ntasks="$(($1 * $2))" --ntasks-per-node="$2" "${inside[@]}")
}

stage() { # every node copies DATADIR to STAGEDIR, where the runs then read; what the nodes say is in a file of LOGDIR
    local status=0 began=$SECONDS said=$LOGDIR/staging.txt
    # Only into a directory that is empty, or holds a copy of the same set, which may have been interrupted.
    # shellcheck disable=SC2016 # expanded on the node
    local copy='set -o pipefail
        node=${SLURMD_NODENAME:-$HOSTNAME} mark=$2/.copy_of manifests=("$1"/{train,eval}/index/dataset.json)
        if [ -n "$(ls -A "$2" 2>/dev/null)" ] && ! cmp -s "$mark" <(cat "${manifests[@]}"); then
            echo "$node: $2 holds something that is no copy of $1; remove it, or give another directory"
            exit 2
        fi
        { mkdir -p "$2" && cat "${manifests[@]}" >"$mark" &&
            rsync -aL --delete-after --exclude=/.copy_of "$1/" "$2/"; } 2>&1 | sed "s|^|$node: |"'
    mkdir -p "$LOGDIR"
    with_signals "$passed_on" "${nodes[@]}" bash -c "$copy" bash "$DATADIR" "$STAGEDIR" >"$said" 2>&1 || status=$?
    [ "$signalled" = 0 ] || exit "$STOPPED"
    [ "$status" = 0 ] || fail "STAGEDIR: $(grep -m 1 -v '^srun: ' "$said" || tail -n 1 "$said") (all nodes: $said)"
    echo "every node has copied $DATADIR to $STAGEDIR, in $((SECONDS - began)) s"
    DATADIR=$STAGEDIR
    CACHE_CLEARED=0 # a copy is in the page cache
}
