#!/usr/bin/env bash
# Build the container image with docker if its daemon answers, and otherwise with buildah, which
# needs no daemon.
#
#   BASE_DIGEST=sha256:... IMAGE=name FROM_IMAGE_NAME=base tools/build_image.sh [options of the builder]
#
#   BASE_DIGEST      the digest of the base image, because its tag may later point to another image. It is in the first
#                    line `Digest:` of `docker buildx imagetools inspect BASE`, and in `skopeo inspect docker://BASE`.
#                    For an image on this machine, use `buildah images --digests` or `docker images --digests`.
#   IMAGE            the name of the new image                         [mlperf-bert]
#   FROM_IMAGE_NAME  a base image with pip and Python 3.11 or newer    [the Dockerfile's, NVIDIA's PyTorch image]
#   BUILDER          docker or buildah                                 [whichever works]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    echo "tools/build_image.sh: error: $1" >&2
    exit 2
}

[[ ${BASE_DIGEST:-} =~ ^sha256:[0-9a-f]{64}$ ]] ||
    fail "BASE_DIGEST: '${BASE_DIGEST:-}' is not a digest; set it to the base image's digest, sha256:<64 digits> (see the top of this file)"
if [ -z "${BUILDER:-}" ]; then
    if docker info >/dev/null 2>&1; then
        BUILDER=docker
    elif command -v buildah >/dev/null; then
        BUILDER=buildah
    else
        fail "BUILDER: neither a running Docker daemon nor buildah was found; install one (Debian: buildah)"
    fi
fi
revision=$(git describe --always --dirty --abbrev=40 '--exclude=*' 2>/dev/null || echo unknown)
options=(--tag "${IMAGE:-mlperf-bert}" --build-arg "REVISION=$revision" --build-arg "BASE_DIGEST=$BASE_DIGEST")
[ -z "${FROM_IMAGE_NAME:-}" ] || options+=(--build-arg "FROM_IMAGE_NAME=$FROM_IMAGE_NAME")

case $BUILDER in
docker) exec docker build "${options[@]}" "$@" . ;;
buildah)
    # These defaults also work inside a container, because they need neither an overlay file system
    # nor namespaces.
    export STORAGE_DRIVER=${STORAGE_DRIVER:-vfs} BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot}
    # If this machine already has the base, for example one that was made by hand, do not pull it.
    exec buildah bud --pull=false "${options[@]}" "$@" .
    ;;
*) fail "BUILDER: '$BUILDER' is not a known builder; set it to docker or buildah" ;;
esac
