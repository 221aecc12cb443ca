#!/usr/bin/env bash
# Run run_and_time.sh on this machine in a docker or podman container, with all GPUs. The results belong to the user who
# runs this script.
#
#   IMAGE=mlperf-bert CONFIG=FILE DATADIR=DIR launch/docker.sh [-- --set section.key=value ...]
#
#   IMAGE    the image made from the Dockerfile                      [mlperf-bert]
#   CONFIG   a TOML file on this machine, or the name of a shipped config    [cpu_tiny]
#   DATADIR  the prepared data, with train/ and eval/                [the embedded corpus, made in the container]
#   INIT_CHECKPOINT   initial weights, which the closed division requires. Weights that CONFIG names are not mounted.
#   LOGDIR   the run directory on this machine, which is created     [runs/<utc>-<config>]
#   DOCKER   the container engine                                    [docker, otherwise podman]
#
# NEXP, SEED, RESUME and CLEAR_CACHES work as in run_and_time.sh. A container may not drop the page cache. If you need
# that, drop it on the machine with `sysctl vm.drop_caches=3` and set CACHE_CLEARED=1, which counts for the first run.
set -euo pipefail

case ${1:-} in -h | --help)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit
    ;;
esac

fail() {
    echo "docker.sh: error: $1" >&2
    exit 2
}

given= # the caller's variables, for the command that resumes the runs
for variable in IMAGE CONFIG DATADIR INIT_CHECKPOINT DOCKER NEXP SEED CLEAR_CACHES; do
    [ -z "${!variable:-}" ] || given+=" $variable=$(printf %q "${!variable}")"
done
# The engine, its image and its options.
DOCKER=${DOCKER:-$(command -v docker || command -v podman || true)}
[ -n "$DOCKER" ] || fail "DOCKER: neither docker nor podman was found; install one of them, or run ./run_and_time.sh without a container"
info=$("$DOCKER" info 2>&1) || fail "$DOCKER: does not answer; start its daemon, or give this user access to it"
IMAGE=${IMAGE:-mlperf-bert}
"$DOCKER" image inspect "$IMAGE" >/dev/null 2>&1 ||
    fail "IMAGE: no such image '$IMAGE' on this machine; build it with ${DOCKER##*/} build --tag $IMAGE ., or pull it"
engine=docker
[[ $("$DOCKER" --version) != *podman* ]] || engine=podman
rootless=no
shopt -s nocasematch
[[ ! $info =~ (name=rootless|rootless: true) ]] || rootless=yes
shopt -u nocasematch

options=(--rm --ipc=host --stop-timeout 120)
if command -v nvidia-smi >/dev/null && nvidia-smi --list-gpus >/dev/null 2>&1; then
    if [ "$engine" = podman ]; then options+=(--device nvidia.com/gpu=all); else options+=(--gpus all); fi
fi
case $engine-$rootless in
docker-yes) options+=(--user 0:0) ;; # Root in the container is the daemon's user on the machine.
podman-yes) options+=(--userns keep-id --user "$(id -u):$(id -g)") ;;
*) options+=(--user "$(id -u):$(id -g)" --ulimit memlock=-1 --ulimit stack=67108864) ;;
esac

# Mount files at fixed paths in the container.
mount() { # path on this machine, path in the container, [,readonly]
    local path
    path=$(realpath --canonicalize-missing -- "$1")
    [[ $path != *[,\"]* ]] || fail "$path: has a comma or a quotation mark, so it cannot be mounted; rename it"
    options+=(--mount "type=bind,source=$path,target=$2${3:-}")
}
name=cpu_tiny
if [ -n "${CONFIG:-}" ]; then
    shipped=$(dirname "${BASH_SOURCE[0]}")/../mlperf_bert/configs/$CONFIG.toml
    if [ ! -e "$CONFIG" ] && [ -f "$shipped" ]; then CONFIG=$shipped; fi
    [ -f "$CONFIG" ] || fail "CONFIG: no such file '$CONFIG'; set it to a TOML file on this machine, or to the name of a shipped config"
    name=$(basename -- "$CONFIG" .toml)
    mount "$CONFIG" "/config/$name.toml" ,readonly
    options+=(--env "CONFIG=/config/$name.toml")
fi
if [ -n "${DATADIR:-}" ]; then
    [ -d "$DATADIR" ] || fail "DATADIR: no such directory '$DATADIR'; prepare it with 'mlperf_bert prepare' (docs/guides/prepare_data.md)"
    mount "$DATADIR" /data ,readonly
    options+=(--env DATADIR=/data)
fi
[ -z "${STAGEDIR:-}" ] || fail "STAGEDIR: only SLURM jobs can stage data; copy the data yourself, and set DATADIR to the copy"
if [ -n "${INIT_CHECKPOINT:-}" ]; then
    [ -d "$INIT_CHECKPOINT" ] || [ "${RESUME:-none}" != none ] ||
        fail "INIT_CHECKPOINT: no such directory '$INIT_CHECKPOINT'; create one with mlperf_bert convert"
    [ ! -d "$INIT_CHECKPOINT" ] || mount "$INIT_CHECKPOINT" /init_checkpoint ,readonly
    options+=(--env INIT_CHECKPOINT=/init_checkpoint)
fi
LOGDIR=${LOGDIR:-runs/$(date -u +%Y%m%dT%H%M%SZ)-$name}
mount "$LOGDIR" /logs
mkdir -p -- "$LOGDIR" 2>/dev/null || fail "LOGDIR: '$LOGDIR' cannot be created; set it to a directory that you can write to"
options+=(--env LOGDIR=/logs --env "LOGDIR_OUTSIDE=$LOGDIR")
options+=(--env "GO_ON_BY=RESUME=auto LOGDIR=$(printf %q "$LOGDIR")$given$(printf ' %q' "$0" "$@")")
case ${RESUME:=none} in
none) ;;
auto) options+=(--env RESUME=auto) ;;
*)
    [ -d "$RESUME" ] || fail "RESUME: no such directory '$RESUME'; set it to none, auto, or a directory with a checkpoint"
    mount "$RESUME" /checkpoint ,readonly
    options+=(--env RESUME=/checkpoint --env "GO_ON_FROM=$(printf %q "$RESUME")")
    ;;
esac
for variable in NEXP SEED CLEAR_CACHES CACHE_CLEARED; do
    [ -z "${!variable:-}" ] || options+=(--env "$variable=${!variable}")
done

echo "/logs in the container is $LOGDIR on this machine"
exec "$DOCKER" run "${options[@]}" "$IMAGE" ./run_and_time.sh "$@"
