"""The README's lines that build the image and train in it; the runs inside.

The base is nothing but Debian, Python and pip, under the name of the Dockerfile's default. Minutes
and 25 GB below the tests' temporary directory, which are given back at the end.
"""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

from support import REDUCED, REPOSITORY, write_program

USER = 10001
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
(BASE,) = re.findall(r"^ARG FROM_IMAGE_NAME=(.+)$", DOCKERFILE, re.MULTILINE)
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
(BUILD,) = re.findall(r"\| `docker (build .+?)` \|", README)
(TRAIN,) = re.findall(r"\| `(\S+/docker\.sh)` \|", README)
IMAGE = "mlperf-bert"
# Does by buildah what docker.sh asks of docker, in a container that is there.
DOCKER = f"""#!/bin/bash
case $1 in
--version) echo "Docker version 29" ;;
image) buildah inspect --type=image "$3" ;;
run)
    options=() && shift
    while [ "$1" != {IMAGE} ]; do
        case $1 in
        --env | --user) options+=("$1" "$2") ;;
        --mount) options+=("$1" "$2,rw") ;; # buildah's default is read-only
        esac
        case $1 in --rm | --ipc=*) shift ;; *) shift 2 ;; esac
    done
    exec buildah run "${{options[@]}}" "$CONTAINER" -- "${{@:2}}"
    ;;
esac
"""
PACKAGES = "python3,python3-venv,python3-pip"

pytestmark = [pytest.mark.longest, pytest.mark.timeout(1800)]


class Builder:
    """buildah with a storage of its own; works without daemon, namespaces and overlays."""

    def __init__(self, directory):
        conf = directory / "storage.conf"
        conf.write_text(
            f'[storage]\ndriver = "vfs"\ngraphroot = "{directory}/storage"\n'
            f'runroot = "{directory}/run"\n'
        )
        self.environ = os.environ | {
            "CONTAINERS_STORAGE_CONF": str(conf),
            "STORAGE_DRIVER": "vfs",
            "BUILDAH_ISOLATION": "chroot",
        }

    def __call__(self, *words):
        return self.run("buildah", *words).strip()

    def run(self, *words, **variables):
        """The command's stdout; its stderr goes to the test's own output."""
        command = [str(word) for word in words]
        environ = self.environ | variables
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environ, stdout=subprocess.PIPE, text=True
        )
        print(done.stdout)
        assert done.returncode == 0, f"{command} ended with {done.returncode}"
        return done.stdout

    def start(self, container, *words):
        return subprocess.Popen(
            ["buildah", "run", container, "--", *words],
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def pip_volumes(directory):
    """Options that give this machine's pip configuration, and local indexes of it, to a build."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    sections = defaultdict(dict)
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        sections["global" if section == ":env:" else section][key] = ast.literal_eval(value)
    conf = directory / "pip.conf"
    with conf.open("w") as file:
        for section, settings in sections.items():
            file.write(f"[{section}]\n" + "".join(f"{k} = {v}\n" for k, v in settings.items()))
    shared = {conf: Path("/etc/pip.conf")}
    for settings in sections.values():
        for key, value in settings.items():
            for path in map(Path, value.replace("file://", "").split()):
                if path.is_absolute() and path.exists():
                    # The pages of an index name files beside it.
                    whole = path.parent if key.endswith("index-url") else path
                    shared[whole] = whole
    return [f"--volume={here}:{there}:ro" for here, there in shared.items()]


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    for tool in ("buildah", "debootstrap"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    if os.geteuid() != 0:
        pytest.skip("needs root, for debootstrap")
    directory = tmp_path_factory.mktemp("image")
    made = Builder(directory)
    yield made
    made("rm", "--all")
    made("rmi", "--all", "--force")
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def container(builder, tmp_path_factory):
    """A container of the image, which the README's line made without a build argument."""
    base = builder("from", "scratch")
    builder.run(
        # In a mount namespace of its own: what it mounts in there must not outlive it.
        *("unshare", "--mount", "debootstrap", "--variant=minbase"),
        *(f"--include={PACKAGES}", "bookworm"),
        builder("mount", base),
    )
    builder("umount", base)
    builder("commit", "--rm", base, BASE)
    command, *words = BUILD.split()
    assert (command, words[:2]) == ("build", ["--tag", IMAGE])
    builder("bud", "--pull-never", *pip_volumes(tmp_path_factory.mktemp("pip")), *words)
    return builder("from", IMAGE)


def of_image(builder, container, field):
    return builder("inspect", "--format", f"{{{{.OCIv1.Config.{field}}}}}", container)


def inside(root):
    """Processes whose root directory is `root`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "root").samefile(root):
                found.append(int(process.name))
        except OSError:  # it has just ended
            continue
    return found


def test_what_the_image_says(builder, container):
    assert of_image(builder, container, "User") == str(USER)
    assert of_image(builder, container, "Cmd") == "[./run_and_time.sh]"
    assert of_image(builder, container, "Entrypoint") == "[]"
    assert "PYTHON=/opt/venv/bin/python" in of_image(builder, container, "Env")
    kept = builder("run", container, "--", "find", "/workspace", "-maxdepth", "1", "-printf", "%f ")
    names = {"LICENSE", "README.md", "benchmarks", "pyproject.toml", "run_and_time.sh", "tools"}
    assert names <= set(kept.split())
    assert not {"tests", "docs", "logs", ".git", "Dockerfile"} & set(kept.split())


def test_a_submission_names_the_digest_of_its_base(builder, container, tmp_path):
    start = tmp_path / "Dockerfile"
    start.write_text(DOCKERFILE[: re.search(r"^FROM .*\n", DOCKERFILE, re.MULTILINE).end()])
    digest = builder("inspect", "--type=image", "--format={{.FromImageDigest}}", BASE)
    build = ("bud", "--pull-never", "--build-arg", f"FROM_IMAGE_NAME={BASE}@{digest}", tmp_path)
    assert builder(*build)
    with pytest.raises(AssertionError, match="ended with 125"):
        builder(*build[:3], build[3].replace(digest, f"sha256:{'0a' * 32}"), tmp_path)


def test_the_command_reaches_the_target_as_nobody_special(builder, container):
    with builder.start(container, "./run_and_time.sh", "--", *REDUCED.split()) as process:
        printed = process.communicate()[0]
    print(printed)
    assert process.returncode == 0
    assert re.search(r"^target reached after", printed, re.MULTILINE)
    assert re.search(r"^RESULT,bert,\d+,\d+,bert,", printed, re.MULTILINE)
    assert re.search(r"^log format accepted by .*: .*result_0.txt$", printed, re.MULTILINE)
    root = Path(builder("mount", container))
    log = next(root.glob("workspace/runs/*/result_0.txt"))
    assert (log.stat().st_uid, log.stat().st_gid) == (USER, USER)
    builder("umount", container)


def test_the_line_that_trains(builder, container, tmp_path):
    write_program(tmp_path / "docker", DOCKER)
    environ = {"DOCKER": str(tmp_path / "docker"), "CONTAINER": container}
    logs = tmp_path / "logs"
    printed = builder.run(
        *("bash", "-euc", f"{TRAIN} --{REDUCED}"), LOGDIR=str(logs), SEED="1", **environ
    )
    assert re.search(r"^RESULT,bert,1,\d+,root,", printed, re.MULTILINE)
    assert (logs / "result_0.txt").stat().st_uid == os.geteuid()


def test_term_ends_python(builder, container):
    root = Path(builder("mount", container))
    with builder.start(container, "./run_and_time.sh") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step "):
                break
        running = inside(root)
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in running}
        assert any("mlperf_bert\0train" in command for command in commands.values())
        # What docker would start as process 1.
        first = min(pid for pid in running if commands[pid].startswith("bash\0./run_and"))
        os.kill(first, signal.SIGTERM)
        rest = process.stdout.read()
    print(rest)
    assert "received SIGTERM and stopped after step" in rest
    assert process.returncode == 75, "the status of a run that was asked to stop"
    deadline = time.monotonic() + 60
    while inside(root) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert inside(root) == []
    builder("umount", container)
