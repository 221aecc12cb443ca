#!/usr/bin/env bash
# Build the image: by docker where its daemon answers, else by buildah, which needs no daemon.
#
#   BASE_DIGEST=sha256:... IMAGE=name FROM_IMAGE_NAME=base tools/build_image.sh [options of the builder]
#
#   BASE_DIGEST      of the base image: what was looked at is what is built on, wherever its tag points by then. The first
#                    line `Digest:` of `docker buildx imagetools inspect BASE`, or `skopeo inspect docker://BASE`; of an
#                    image of this machine what `buildah images --digests` or `docker images --digests` shows
#   IMAGE            name of the image                            [mlperf-bert]
#   FROM_IMAGE_NAME  base image with Python 3.11 or newer and pip [the Dockerfile's: NVIDIA's PyTorch image]
#   BUILDER          docker or buildah                            [whichever works]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    echo "tools/build_image.sh: error: $1" >&2
    exit 2
}

[[ ${BASE_DIGEST:-} =~ ^sha256:[0-9a-f]{64}$ ]] ||
    fail "BASE_DIGEST is '${BASE_DIGEST:-}'; set it to the base image's, sha256:<64 digits>; the top of this file says how to find it"
if [ -z "${BUILDER:-}" ]; then
    if docker info >/dev/null 2>&1; then
        BUILDER=docker
    elif command -v buildah >/dev/null; then
        BUILDER=buildah
    else
        fail "neither a Docker daemon that answers nor buildah was found; install one (Debian: buildah)"
    fi
fi
revision=$(git describe --always --dirty --abbrev=40 '--exclude=*' 2>/dev/null || echo unknown)
options=(--tag "${IMAGE:-mlperf-bert}" --build-arg "REVISION=$revision" --build-arg "BASE_DIGEST=$BASE_DIGEST")
[ -z "${FROM_IMAGE_NAME:-}" ] || options+=(--build-arg "FROM_IMAGE_NAME=$FROM_IMAGE_NAME")

case $BUILDER in
docker) exec docker build "${options[@]}" "$@" . ;;
buildah)
    # What works everywhere, also inside a container: no overlay file system and no namespaces of its own.
    export STORAGE_DRIVER=${STORAGE_DRIVER:-vfs} BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot}
    # A base that is here already, such as one made by hand, is not looked for elsewhere.
    exec buildah bud --pull=false "${options[@]}" "$@" .
    ;;
*) fail "BUILDER is '$BUILDER'; set it to docker or buildah" ;;
esac
