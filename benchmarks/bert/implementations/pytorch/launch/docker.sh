#!/usr/bin/env bash
# run_and_time.sh on this machine, in a container: docker or podman, all GPUs, results that belong to who runs it.
#
#   IMAGE=mlperf-bert CONFIG=FILE DATADIR=DIR launch/docker.sh [-- --set section.key=value ...]
#
#   IMAGE    image made from the Dockerfile              [mlperf-bert]
#   CONFIG   TOML file here, or name of a shipped one    [cpu_tiny of the image]
#   DATADIR  prepared data: train/ and eval/             [the embedded corpus, made in the container]
#   INIT_CHECKPOINT   weights to begin with, which the closed division wants; one that CONFIG names is not mounted
#   LOGDIR   run directory on this machine, created      [runs/<utc>-<config>]
#   DOCKER   the container engine                        [docker, else podman]
#   NEXP, SEED, RESUME and CLEAR_CACHES as for run_and_time.sh. A container may not drop the page cache: drop it on the machine
#   (sysctl vm.drop_caches=3) and say so by CACHE_CLEARED=1; the log says it of the first run only.
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

given= # the caller's variables, as the command that goes on with the runs names them again
for variable in IMAGE CONFIG DATADIR INIT_CHECKPOINT DOCKER NEXP SEED CLEAR_CACHES; do
    [ -z "${!variable:-}" ] || given+=" $variable=$(printf %q "${!variable}")"
done
# The engine, its image, and what may be asked of it.
DOCKER=${DOCKER:-$(command -v docker || command -v podman || true)}
[ -n "$DOCKER" ] || fail "neither docker nor podman was found; install one, or run ./run_and_time.sh without"
info=$("$DOCKER" info 2>&1) || fail "$DOCKER does not answer; start its daemon, or let this user talk to it"
IMAGE=${IMAGE:-mlperf-bert}
"$DOCKER" image inspect "$IMAGE" >/dev/null 2>&1 ||
    fail "there is no image '$IMAGE' here; build it (tools/build_image.sh says how), or pull it"
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
docker-yes) options+=(--user 0:0) ;; # who runs the daemon is root inside, and nobody else outside
podman-yes) options+=(--userns keep-id --user "$(id -u):$(id -g)") ;;
*) options+=(--user "$(id -u):$(id -g)" --ulimit memlock=-1 --ulimit stack=67108864) ;;
esac

# Files: fixed places inside.
mount() { # path on this machine, place inside, [,readonly]
    local path
    path=$(realpath --canonicalize-missing -- "$1")
    [[ $path != *[,\"]* ]] || fail "$path has a comma or a quotation mark and cannot be mounted; rename it"
    options+=(--mount "type=bind,source=$path,target=$2${3:-}")
}
name=cpu_tiny
if [ -n "${CONFIG:-}" ]; then
    shipped=$(dirname "${BASH_SOURCE[0]}")/../mlperf_bert/configs/$CONFIG.toml
    if [ ! -e "$CONFIG" ] && [ -f "$shipped" ]; then CONFIG=$shipped; fi
    [ -f "$CONFIG" ] || fail "CONFIG: there is no file '$CONFIG'; give a TOML file of this machine, or a shipped one's name"
    name=$(basename -- "$CONFIG" .toml)
    mount "$CONFIG" "/config/$name.toml" ,readonly
    options+=(--env "CONFIG=/config/$name.toml")
fi
if [ -n "${DATADIR:-}" ]; then
    [ -d "$DATADIR" ] || fail "DATADIR: there is no directory '$DATADIR'; make it with init_datasets.sh"
    mount "$DATADIR" /data ,readonly
    options+=(--env DATADIR=/data)
fi
[ -z "${STAGEDIR:-}" ] || fail "STAGEDIR is for a job of SLURM; copy the data yourself, and give the copy as DATADIR"
if [ -n "${INIT_CHECKPOINT:-}" ]; then
    [ -d "$INIT_CHECKPOINT" ] || [ "${RESUME:-none}" != none ] ||
        fail "INIT_CHECKPOINT: there is no directory '$INIT_CHECKPOINT'; make it with mlperf_bert convert"
    [ ! -d "$INIT_CHECKPOINT" ] || mount "$INIT_CHECKPOINT" /init_checkpoint ,readonly
    options+=(--env INIT_CHECKPOINT=/init_checkpoint)
fi
LOGDIR=${LOGDIR:-runs/$(date -u +%Y%m%dT%H%M%SZ)-$name}
mount "$LOGDIR" /logs
mkdir -p -- "$LOGDIR" 2>/dev/null || fail "LOGDIR: '$LOGDIR' cannot be made; give a directory that you can write to"
options+=(--env LOGDIR=/logs)
options+=(--env "GO_ON_BY=RESUME=auto LOGDIR=$(printf %q "$LOGDIR")$given$(printf ' %q' "$0" "$@")")
case ${RESUME:=none} in
none) ;;
auto) options+=(--env RESUME=auto) ;;
*)
    [ -d "$RESUME" ] || fail "RESUME is '$RESUME'; set it to none, auto, or a directory with a checkpoint"
    mount "$RESUME" /checkpoint ,readonly
    options+=(--env RESUME=/checkpoint)
    ;;
esac
for variable in NEXP SEED CLEAR_CACHES CACHE_CLEARED; do
    [ -z "${!variable:-}" ] || options+=(--env "$variable=${!variable}")
done

echo "in the container /logs is $LOGDIR"
exec "$DOCKER" run "${options[@]}" "$IMAGE" ./run_and_time.sh "$@"
