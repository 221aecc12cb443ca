"""tools/build_image.sh: nothing is built on a base that only a tag names."""

import subprocess
from pathlib import Path

import pytest

from support import REPOSITORY

DIGEST = f"sha256:{'0a' * 32}"


def build(directory: Path, digest: str) -> subprocess.CompletedProcess[str]:
    """Run it with a docker that prints what it is asked for."""
    docker = directory / "docker"
    docker.write_text('#!/bin/sh\n[ "$1" = info ] || echo "$@"\n')
    docker.chmod(0o755)
    environ = {"PATH": f"{directory}:/usr/bin:/bin", "BASE_DIGEST": digest}
    script = REPOSITORY / "tools" / "build_image.sh"
    return subprocess.run([script], env=environ, capture_output=True, text=True)


@pytest.mark.parametrize("digest", ["", "latest", "sha256:0a", f"{DIGEST}0"])
def test_a_base_without_its_digest_is_refused(tmp_path: Path, digest: str) -> None:
    done = build(tmp_path, digest)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("tools/build_image.sh: error: BASE_DIGEST is '")


def test_the_base_is_the_one_of_the_digest(tmp_path: Path) -> None:
    done = build(tmp_path, DIGEST)
    assert done.returncode == 0, done.stderr
    assert f"--build-arg BASE_DIGEST={DIGEST}" in done.stdout
    lines = (REPOSITORY / "Dockerfile").read_text().splitlines()
    bases = [line for line in lines if line.startswith("FROM ")]
    assert bases == ["FROM ${FROM_IMAGE_NAME}@${BASE_DIGEST}"]
