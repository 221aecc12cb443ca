# shellcheck shell=bash disable=SC2034,SC2154 # run_and_time.sh shares these variables.
# Sourced by where.sh in the shell of a SLURM job: builds the srun commands, with a container if CONT is set.
#
#   CONT           an image for pyxis, preferably a squashfs file made by `enroot import`, because docker://...
#                  is imported on every node
#   MOUNTS         more directories that the container sees, separated by commas
#   SRUN_OPTIONS   more options for srun, such as --mpi=pmi2
#
# The variables for InfiniBand are in infiniband.sh.

[ -n "${SLURM_JOB_NUM_NODES:-}" ] ||
    fail "SLURM_JOB_NUM_NODES: not set although SLURM_JOB_ID is; start in a SLURM job, or unset SLURM_JOB_ID"
[[ ${STAGEDIR:-/} = /* ]] || fail "STAGEDIR: '$STAGEDIR' is a relative path; set it to an absolute path that exists on every node"
# srun passes these limits to the ranks. InfiniBand locks the memory that it sends from.
ulimit -l unlimited 2>/dev/null || ulimit -S -l "$(ulimit -H -l)" 2>/dev/null || true
passed_on=USR1 # At SIGTERM, srun kills the ranks instead of passing the signal on.
read -r -a srun_options <<<"${SRUN_OPTIONS:-}"
step=(srun --kill-on-bad-exit=1 --cpu-bind=none ${srun_options[@]+"${srun_options[@]}"})
nodes=("${step[@]}" --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1)

# shellcheck source=infiniband.sh
. "$root/$launch/infiniband.sh"

if [ -n "${CONT:-}" ]; then
    [[ $(srun --help 2>&1) = *--container-image* ]] || fail "CONT: this SLURM has no pyxis plugin to start containers; unset CONT, or install pyxis"
    PYTHON=${PYTHON:-python3} # the image's interpreter
    mkdir -p "$LOGDIR"
    binds=$root:$root # The container sees directories under their own paths. Links are not resolved.
    for name in DATADIR LOGDIR CONFIG INIT_CHECKPOINT RESUME STAGEDIR; do
        case ${!name:-} in "" | none | auto) continue ;; esac
        [ "$name" != STAGEDIR ] || "${nodes[@]}" mkdir -p "$STAGEDIR" || # A directory must exist before it can be mounted.
            fail "STAGEDIR: '$STAGEDIR' cannot be created on every node, as shown above; set it to a writable directory"
        printf -v "$name" %s "$(realpath -s "${!name}")"
        seen=${!name}
        [ "$name" != CONFIG ] || seen=$(dirname "$CONFIG")
        case $seen in "$root" | "$root"/*) ;; *) binds+=,$seen:$seen ;; esac
    done
    IFS=, read -r -a more <<<"${MOUNTS:-}"
    for seen in ${more[@]+"${more[@]}"}; do binds+=,$seen:$seen; done
    binds+=$(device_mounts)
    name=mlperf_bert_$SLURM_JOB_ID # The named container is unpacked once per node, for all steps of the job.
    inside=(--container-image="$CONT" --container-name="$name" --container-mounts="$binds"
        --container-workdir="$root" --no-container-mount-home
        /usr/bin/env "$PYTHON" -P) # Without env, srun may look for the interpreter outside the container.
    trap 'if [ "$BASHPID" = $$ ]; then "${nodes[@]}" enroot remove --force "pyxis_mlperf_bert_$SLURM_JOB_ID" >/dev/null 2>&1 || true; fi' EXIT
    here=("${step[@]}" --nodes=1 --ntasks=1 "${inside[@]}")
else
    own_python
    command -v "$PYTHON" >/dev/null || fail "PYTHON: no such interpreter '$PYTHON' on this node; copy the environment to \
the nodes of this job again, or unset PYTHON"
    inside=("$PYTHON" -P)
    here=("${inside[@]}")
fi

# Set `ranks`. This needs the config's numbers.
srun_ranks() { # nodes and ranks per node that the config asks for
    [ "$1" = "$SLURM_JOB_NUM_NODES" ] || fail "$CONFIG: needs $1 nodes, but the job has \
$SLURM_JOB_NUM_NODES; submit with: $(command_line)"
    ranks=("${step[@]}" --nodes="$1" --ntasks="$(($1 * $2))" --ntasks-per-node="$2" "${inside[@]}")
}

stage() { # Copy DATADIR to STAGEDIR on every node, for the runs to read. The nodes' messages go to a file in LOGDIR.
    local status=0 start messages=$LOGDIR/staging.txt
    # The target directory must be empty, or hold a complete or interrupted copy of the same data.
    # shellcheck disable=SC2016 # The variables are expanded on the node.
    local copy='set -o pipefail
        node=${SLURMD_NODENAME:-$HOSTNAME} mark=$2/.copy_of manifests=("$1"/{train,eval}/index/dataset.json)
        if [ "$1" -ef "$2" ]; then
            echo "$node: $2 is DATADIR itself; unset STAGEDIR"
            exit 2
        fi
        if [ -n "$(ls -A "$2" 2>/dev/null)" ] && ! cmp -s "$mark" <(cat "${manifests[@]}"); then
            echo "$node: $2 has files that are not a copy of $1; remove it, or set another directory"
            exit 2
        fi
        { mkdir -p "$2" && cat "${manifests[@]}" >"$mark" &&
            rsync -aL --delete-after --exclude=/.copy_of "$1/" "$2/"; } 2>&1 | sed "s|^|$node: |"'
    start=$(monotonic)
    mkdir -p "$LOGDIR"
    with_signals "$passed_on" "${nodes[@]}" bash -c "$copy" bash "$DATADIR" "$STAGEDIR" >"$messages" 2>&1 || status=$?
    [ "$signalled" = 0 ] || exit "$STOPPED"
    [ "$status" = 0 ] || fail "STAGEDIR: $(grep -m 1 -v '^srun: ' "$messages" || tail -n 1 "$messages") (messages of all nodes: $messages)"
    echo "every node copied $DATADIR to $STAGEDIR, in $(($(monotonic) - start)) s"
    DATADIR=$STAGEDIR
    CACHE_CLEARED=0 # The new copy is in the page cache.
}
