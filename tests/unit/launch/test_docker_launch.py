"""launch/docker.sh and tools/build_image.sh: what they ask the engine for, which only notes it.

Nothing is built on a base that only a tag names.
"""

import os
import subprocess

import pytest

from support import PACKAGE, REPOSITORY

SCRIPT = PACKAGE.parent / "launch" / "docker.sh"
ENGINE = """#!/bin/bash
case $1 in
--version) echo "{version}" ;;
info) echo "{info}"; exit {info_status} ;;
image) [ "$3" = known ] ;;
run) printf '%s\\0' "$@" >"$RECORD"; exit 7 ;;
esac
"""
DIGEST = f"sha256:{'0a' * 32}"


class Machine:
    """A directory of commands that come first on PATH, and a user's own directory."""

    def __init__(self, directory):
        self.home = directory / "own files"
        self.home.mkdir()
        self.commands = directory / "bin"
        self.commands.mkdir()
        self.record = directory / "asked"

    def command(self, name, text):
        path = self.commands / name
        path.write_text(text)
        path.chmod(0o755)

    def engine(self, name, *, version="Docker version 29", info="", status=0):
        self.command(name, ENGINE.format(version=version, info=info, info_status=status))

    def call(self, *words, **variables):
        known = ("PATH", "HOME")
        environ = {name: os.environ[name] for name in known if name in os.environ}
        environ |= {"RECORD": str(self.record), "IMAGE": "known"} | variables
        environ["PATH"] = f"{self.commands}:{environ['PATH']}"
        return subprocess.run(
            [SCRIPT, *words], cwd=self.home, env=environ, capture_output=True, text=True, timeout=30
        )

    def asked(self):
        return self.record.read_text().split("\0")[:-1]

    def options(self, name):
        words = self.asked()
        found = [words[i + 1] for i, word in enumerate(words) if word == name]
        return [word for word in found if not word.startswith("GO_ON_BY=")]

    def go_on_by(self):
        (hint,) = [word for word in self.asked() if word.startswith("GO_ON_BY=")]
        return hint.removeprefix("GO_ON_BY=")


@pytest.fixture
def machine(tmp_path):
    made = Machine(tmp_path)
    made.engine("docker")
    made.command("nvidia-smi", "#!/bin/sh\nexit 1\n")  # the driver's tool without a driver
    return made


def test_files_variables_and_status(machine):
    data, config = machine.home / "my data", machine.home / "tiny one.toml"
    weights = machine.home / "the weights"
    data.mkdir()
    weights.mkdir()
    config.touch()
    done = machine.call(
        *("--", "--set", "run.max_steps=9"),
        **{"DATADIR": "my data", "CONFIG": "tiny one.toml", "LOGDIR": "the logs"},
        **{
            "INIT_CHECKPOINT": "the weights",
            "NEXP": "3",
            "SEED": "5",
            "CACHE_CLEARED": "1",
            "SECRET": "word",
        },
    )
    assert done.returncode == 7, done.stderr  # the container's own
    logs = machine.home / "the logs"
    assert logs.is_dir()
    assert machine.options("--mount") == [
        f"type=bind,source={config},target=/config/tiny one.toml,readonly",
        f"type=bind,source={data},target=/data,readonly",
        f"type=bind,source={weights},target=/init_checkpoint,readonly",
        f"type=bind,source={logs},target=/logs",
    ]
    assert machine.options("--env") == [
        *("CONFIG=/config/tiny one.toml", "DATADIR=/data", "INIT_CHECKPOINT=/init_checkpoint"),
        *("LOGDIR=/logs", "NEXP=3", "SEED=5", "CACHE_CLEARED=1"),
    ]
    after_image = machine.asked()[machine.asked().index("known") + 1 :]
    assert after_image == ["./run_and_time.sh", "--", "--set", "run.max_steps=9"]
    assert machine.options("--user") == [f"{os.getuid()}:{os.getgid()}"]
    assert machine.options("--ulimit") == ["memlock=-1", "stack=67108864"]


def test_the_container_names_the_command_that_goes_on_from_outside(machine):
    (machine.home / "my data").mkdir()
    given = {"DATADIR": "my data", "LOGDIR": "the logs", "DOCKER": "docker"}
    done = machine.call("--", "--set", "mlperf.submitter=a b", **given)
    assert done.stdout == "in the container /logs is the logs\n"
    before, environ = machine.asked(), {"PATH": f"{machine.commands}:{os.environ['PATH']}"}
    typed = ["bash", "-c", machine.go_on_by()]
    subprocess.run(typed, cwd=machine.home, env=environ | {"RECORD": str(machine.record)})
    assert "RESUME=auto" in machine.options("--env")
    assert set(before) == set(machine.asked()) - {"RESUME=auto"}


def test_without_data_or_config_the_image_has_its_own(machine):
    machine.call()
    logs = next((machine.home / "runs").glob("*-cpu_tiny"))
    assert machine.options("--mount") == [f"type=bind,source={logs},target=/logs"]
    assert machine.options("--env") == ["LOGDIR=/logs"]
    assert "--gpus" not in machine.asked()


@pytest.mark.parametrize("again", ["auto", "runs/a/run_0/checkpoints"])
def test_a_run_goes_on_in_another_container(machine, again):
    checkpoints = machine.home / "runs/a/run_0/checkpoints"
    checkpoints.mkdir(parents=True)
    machine.call(LOGDIR="runs/a", RESUME=again)
    inside = "auto" if again == "auto" else "/checkpoint"
    assert f"RESUME={inside}" in machine.options("--env")
    mounted = f"type=bind,source={checkpoints},target=/checkpoint,readonly"
    assert (mounted in machine.options("--mount")) == (again != "auto")


def test_gpus_as_each_engine_names_them(machine):
    machine.command("nvidia-smi", "#!/bin/sh\n")
    machine.call()
    assert machine.options("--gpus") == ["all"]
    machine.engine("podman", version="podman version 6", info="rootless: true")
    machine.call(DOCKER="podman")
    assert machine.options("--device") == ["nvidia.com/gpu=all"]
    assert machine.options("--userns") == ["keep-id"]
    assert "--ulimit" not in machine.asked()  # may not be raised without root


def test_root_inside_a_rootless_docker_is_the_user(machine):
    machine.engine("docker", info=" name=rootless")
    machine.call()
    assert machine.options("--user") == ["0:0"]


def test_mistakes_are_one_line(machine):
    machine.engine("broken", status=1)
    mistakes = {
        "there is no image 'other' here": {"IMAGE": "other"},
        "DATADIR: there is no directory 'none'": {"DATADIR": "none"},
        "INIT_CHECKPOINT: there is no directory 'none'": {"INIT_CHECKPOINT": "none"},
        "CONFIG: there is no file 'none.toml'": {"CONFIG": "none.toml"},
        "has a comma or a quotation mark": {"LOGDIR": "a,b"},
        "broken does not answer": {"DOCKER": "broken"},
        "RESUME is 'none.such'; set it to none, auto, or a directory": {"RESUME": "none.such"},
    }
    for message, variables in mistakes.items():
        done = machine.call(**variables)
        assert done.returncode == 2 and not machine.record.exists()
        assert done.stderr.startswith("docker.sh: error: ") and done.stderr.count("\n") == 1
        assert message in done.stderr


def test_no_engine_at_all(machine):
    (machine.commands / "docker").unlink()
    tools = machine.commands.parent / "tools"
    tools.mkdir()
    (tools / "bash").symlink_to("/bin/bash")
    (tools / "env").symlink_to("/usr/bin/env")
    done = machine.call(PATH=str(tools))
    assert done.returncode == 2
    assert "neither docker nor podman was found" in done.stderr


def build(directory, digest):
    """Run tools/build_image.sh with a docker that prints what it is asked for."""
    docker = directory / "docker"
    docker.write_text('#!/bin/sh\n[ "$1" = info ] || echo "$@"\n')
    docker.chmod(0o755)
    environ = {"PATH": f"{directory}:/usr/bin:/bin", "BASE_DIGEST": digest}
    script = REPOSITORY / "tools" / "build_image.sh"
    return subprocess.run([script], env=environ, capture_output=True, text=True)


def test_an_image_is_built_on_a_base_of_a_digest(tmp_path):
    for digest in ("", "latest", "sha256:0a", f"{DIGEST}0"):
        done = build(tmp_path, digest)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith("tools/build_image.sh: error: BASE_DIGEST is '")
    done = build(tmp_path, DIGEST)
    assert done.returncode == 0, done.stderr
    assert f"--build-arg BASE_DIGEST={DIGEST}" in done.stdout
    lines = (REPOSITORY / "Dockerfile").read_text().splitlines()
    bases = [line for line in lines if line.startswith("FROM ")]
    assert bases == ["FROM ${FROM_IMAGE_NAME}@${BASE_DIGEST}"]
