"""launch/docker.sh: what it asks the engine for, which only notes it."""

import os
import subprocess
from pathlib import Path

import pytest

from support import PACKAGE, write_program

SCRIPT = PACKAGE.parent / "launch" / "docker.sh"
ENGINE = """#!/bin/bash
case $1 in
--version) echo "{version}" ;;
info) echo "{info}"; exit {info_status} ;;
image) [ "$3" = known ] ;;
run) printf '%s\\0' "$@" >"$RECORD"; exit 7 ;;
esac
"""


class Machine:
    """A directory of commands that come first on PATH, and a user's own directory."""

    def __init__(self, directory):
        self.home = directory / "own files"
        self.home.mkdir()
        self.commands = directory / "bin"
        self.commands.mkdir()
        self.record = directory / "asked"

    def command(self, name, text):
        write_program(self.commands / name, text)

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
    given = {
        "CONFIG": "tiny one.toml",
        "DATADIR": "my data",
        "INIT_CHECKPOINT": "the weights",
        "LOGDIR": "the logs",
        "NEXP": "3",
        "SEED": "5",
        "CACHE_CLEARED": "1",
        "SECRET": "word",
    }
    config, data, weights, logs = (machine.home / name for name in list(given.values())[:4])
    data.mkdir()
    weights.mkdir()
    config.touch()
    done = machine.call("--", "--set", "run.max_steps=9", **given)
    assert done.returncode == 7, done.stderr  # the container's own
    assert logs.is_dir()
    assert machine.options("--mount") == [
        f"type=bind,source={config},target=/config/tiny one.toml,readonly",
        f"type=bind,source={data},target=/data,readonly",
        f"type=bind,source={weights},target=/init_checkpoint,readonly",
        f"type=bind,source={logs},target=/logs",
    ]
    assert machine.options("--env") == [
        *("CONFIG=/config/tiny one.toml", "DATADIR=/data", "INIT_CHECKPOINT=/init_checkpoint"),
        *("LOGDIR=/logs", "LOGDIR_OUTSIDE=the logs", "NEXP=3", "SEED=5", "CACHE_CLEARED=1"),
    ]
    after_image = machine.asked()[machine.asked().index("known") + 1 :]
    assert after_image == ["./run_and_time.sh", "--", "--set", "run.max_steps=9"]
    assert machine.options("--user") == [f"{os.getuid()}:{os.getgid()}"]
    assert machine.options("--ulimit") == ["memlock=-1", "stack=67108864"]


def test_the_container_names_the_command_that_goes_on_from_outside(machine):
    (machine.home / "my data").mkdir()
    given = {"DATADIR": "my data", "LOGDIR": "the logs", "DOCKER": "docker"}
    done = machine.call("--", "--set", "mlperf.submitter=a b", **given)
    assert done.stdout == "/logs in the container is the logs on this machine\n"
    before, environ = machine.asked(), {"PATH": f"{machine.commands}:{os.environ['PATH']}"}
    typed = ["bash", "-c", machine.go_on_by()]
    subprocess.run(typed, cwd=machine.home, env=environ | {"RECORD": str(machine.record)})
    assert "RESUME=auto" in machine.options("--env")
    assert set(before) == set(machine.asked()) - {"RESUME=auto"}


def test_without_data_or_config_the_image_has_its_own(machine):
    machine.call()
    logs = next((machine.home / "runs").glob("*-cpu_tiny"))
    assert machine.options("--mount") == [f"type=bind,source={logs},target=/logs"]
    outside = f"LOGDIR_OUTSIDE={logs.relative_to(machine.home)}"
    assert machine.options("--env") == ["LOGDIR=/logs", outside]
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


def test_gpus_and_the_user_as_each_engine_names_them(machine):
    machine.command("nvidia-smi", "#!/bin/sh\n")
    machine.call()
    assert machine.options("--gpus") == ["all"]
    machine.engine("docker", info=" name=rootless")
    machine.call()
    assert machine.options("--user") == ["0:0"]  # root inside is the user
    machine.engine("podman", version="podman version 6", info="rootless: true")
    machine.call(DOCKER="podman")
    assert machine.options("--device") == ["nvidia.com/gpu=all"]
    assert machine.options("--userns") == ["keep-id"]
    assert "--ulimit" not in machine.asked()  # may not be raised without root


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"IMAGE": "other"}, "build it with docker build --tag other ., or pull it"),
        ({"DATADIR": "none"}, "DATADIR: no such directory 'none'"),
        ({"INIT_CHECKPOINT": "none"}, "INIT_CHECKPOINT: no such directory 'none'"),
        ({"CONFIG": "none.toml"}, "CONFIG: no such file 'none.toml'"),
        ({"LOGDIR": "a,b"}, "has a comma or a quotation mark"),
        ({"DOCKER": "broken"}, "broken: does not answer"),
        ({"RESUME": "none.such"}, "RESUME: no such directory 'none.such'; set it to none, auto"),
        ({"PATH": "tools"}, "neither docker nor podman was found"),
    ],
)
def test_mistakes_are_one_line(given, said, machine):
    machine.engine("broken", status=1)
    if "PATH" in given:
        (machine.commands / "docker").unlink()
        (machine.home / "tools").mkdir()
        for program in ("/bin/bash", "/usr/bin/env"):
            (machine.home / "tools" / Path(program).name).symlink_to(program)
    done = machine.call(**given)
    assert done.returncode == 2 and not machine.record.exists()
    assert done.stderr.startswith("docker.sh: error: ") and done.stderr.count("\n") == 1
    assert said in done.stderr
