# shellcheck shell=bash disable=SC2034,SC2154 # names shared with run_and_time.sh
# Sourced by where.sh in the shell of a SLURM job: srun, and the container where one is asked for.
#
#   CONT           image for pyxis, best a squashfs file (enroot import); docker://... is imported on every node
#   MOUNTS         more directories that the container sees, separated by commas
#   SRUN_OPTIONS   more options for srun, such as --mpi=pmi2

[ -n "${SLURM_JOB_NUM_NODES:-}" ] ||
    fail "SLURM_JOB_ID is set and SLURM_JOB_NUM_NODES is not: start in a job of SLURM's, or unset SLURM_JOB_ID"
[[ ${STAGEDIR:-/} = /* ]] || fail "STAGEDIR is '$STAGEDIR'; give a path that is the same on every node, from / on"
# srun hands limits on to the ranks; InfiniBand locks the memory that it sends from.
ulimit -l unlimited 2>/dev/null || ulimit -S -l "$(ulimit -H -l)" 2>/dev/null || true
passed_on=USR1 # at SIGTERM srun would kill the ranks instead of telling them
read -r -a srun_options <<<"${SRUN_OPTIONS:-}"
step=(srun --kill-on-bad-exit=1 --cpu-bind=none ${srun_options[@]+"${srun_options[@]}"})
nodes=("${step[@]}" --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1)

if [ -n "${CONT:-}" ]; then
    srun --help 2>&1 | grep -q -e --container-image || fail "CONT is set, but this SLURM has no pyxis; leave it out"
    PYTHON=${PYTHON:-python3} # of the image
    mkdir -p "$LOGDIR"
    binds=$root:$root # directories that the container sees under their own names, links not followed
    for name in DATADIR LOGDIR CONFIG INIT_CHECKPOINT RESUME STAGEDIR; do
        case ${!name:-} in "" | none | auto) continue ;; esac
        [ "$name" != STAGEDIR ] || "${nodes[@]}" mkdir -p "$STAGEDIR" || # a mounted directory must be there
            fail "STAGEDIR: $STAGEDIR cannot be made on every node, see above"
        printf -v "$name" %s "$(realpath -s "${!name}")"
        seen=${!name}
        [ "$name" != CONFIG ] || seen=$(dirname "$CONFIG")
        case $seen in "$root" | "$root"/*) ;; *) binds+=,$seen:$seen ;; esac
    done
    IFS=, read -r -a more <<<"${MOUNTS:-}"
    for seen in ${more[@]+"${more[@]}"}; do binds+=,$seen:$seen; done
    name=mlperf_bert_$SLURM_JOB_ID # unpacked once a node, for all steps of the job
    inside=(--container-image="$CONT" --container-name="$name" --container-mounts="$binds"
        --container-workdir="$root" --no-container-mount-home
        /usr/bin/env "$PYTHON" -P) # without env srun may look for the interpreter outside
    trap 'if [ "$BASHPID" = $$ ]; then "${nodes[@]}" enroot remove --force "pyxis_mlperf_bert_$SLURM_JOB_ID" >/dev/null 2>&1 || true; fi' EXIT
    here=("${step[@]}" --nodes=1 --ntasks=1 "${inside[@]}")
else
    own_python
    inside=("$PYTHON" -P)
    here=("${inside[@]}")
fi

# ranks, once the config can be read
srun_ranks() { # nodes and ranks a node that the config wants
    [ "$1" = "$SLURM_JOB_NUM_NODES" ] || fail "the job has $SLURM_JOB_NUM_NODES nodes and $CONFIG \
wants $1; submit with: $(again_by)"
    ranks=("${step[@]}" --nodes="$1" --ntasks="$(($1 * $2))" --ntasks-per-node="$2" "${inside[@]}")
}

stage() { # every node copies DATADIR to STAGEDIR, where the runs then read; what the nodes say is in a file of LOGDIR
    local status=0 began said=$LOGDIR/staging.txt
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
    began=$(monotonic)
    mkdir -p "$LOGDIR"
    with_signals "$passed_on" "${nodes[@]}" bash -c "$copy" bash "$DATADIR" "$STAGEDIR" >"$said" 2>&1 || status=$?
    [ "$signalled" = 0 ] || exit "$STOPPED"
    [ "$status" = 0 ] || fail "STAGEDIR: $(grep -m 1 -v '^srun: ' "$said" || tail -n 1 "$said") (all nodes: $said)"
    echo "every node has copied $DATADIR to $STAGEDIR, in $(($(monotonic) - began)) s"
    DATADIR=$STAGEDIR
    CACHE_CLEARED=0 # a copy is in the page cache
}
