"""Away from the checkout: a wheel works, and what `package` exports, which lacks the tools.

Each is installed into an environment that has this one's packages, but not this package.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bert_tools.package.export import export
from mlperf_bert import package_version
from mlperf_bert.__main__ import COMMANDS
from support import PACKAGE, REDUCED, REPOSITORY, TOOLS, run_process, write_synthetic_text

FITS_SYNTHETIC_DATA = (
    "model.vocab_size=69",
    "data.max_seq_length=32",
    "data.max_predictions=5",
    "parallel.ranks_per_node=1",
    "run.max_steps=2",
    "run.seed=1",
    "eval.target_accuracy=0.001",
    "mlperf.enforce_rules=false",
)
FITS_OWN_TEXT = (
    "model.vocab_size=300",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "parallel.ranks_per_node=1",
    "schedule.warmup_steps=2",
    "schedule.decay_steps=12",
    "mlperf.enforce_rules=false",
    "run.device=cpu",
)


def install(source: Path, directory: Path) -> Path:
    """Build a wheel from a tree and install it into a new environment; its programs are there."""
    done = run_process(sys.executable, "-m", "venv", "--without-pip", directory)
    assert done.returncode == 0, done.stderr
    (packages,) = directory.glob("lib/python*/site-packages")
    # Directories named so are searched, but what lies in them does not add others: not the link
    # to the checkout that an editable installation is.
    shared = [path for path in sys.path if path.endswith("-packages")]
    (packages / "shared.pth").write_text("\n".join(shared) + "\n")
    options = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed")
    done = run_process(directory / "bin/python", "-m", "pip", "install", *options, source)
    assert done.returncode == 0, done.stderr
    return directory / "bin"


def call(directory: Path, *command: object, **variables: object) -> str:
    """What a command prints that runs in `directory`, without this checkout on the path."""
    left_out = ("SLURM_", "PMI_", "OMPI_", "PYTHONPATH")
    environ = {name: each for name, each in os.environ.items() if not name.startswith(left_out)}
    given = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **variables}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=directory,
        env=environ | {name: str(value) for name, value in given.items()},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def settings(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


def test_a_wheel_has_all_commands_and_the_configs(synthetic_data: Path, tmp_path: Path) -> None:
    listed = subprocess.check_output(
        ["git", "ls-files", "-z", "pyproject.toml", "README.md", "LICENSE", PACKAGE, TOOLS],
        cwd=REPOSITORY,
        text=True,
    )
    for name in filter(None, listed.split("\0")):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_bytes((REPOSITORY / name).read_bytes())
    programs = install(tmp_path / "tree", tmp_path / "installed")
    program = programs / "mlperf_bert"
    code = "import bert_tools, mlperf_bert; print(bert_tools.__file__, mlperf_bert.__file__)"
    places = call(tmp_path, programs / "python", "-c", code).split()
    assert all(Path(place).is_relative_to(tmp_path / "installed") for place in places)
    assert call(tmp_path, program, "--version") == f"mlperf_bert {package_version()}\n"
    shown = call(tmp_path, program, "--help")
    assert all(text in shown for _, text in COMMANDS.values())
    assert call(tmp_path, program, "config", "cpu_tiny", "--get", "run.max_steps") == "6000\n"
    words = ("train", "--config", "cpu_tiny", "--data", synthetic_data)
    call(tmp_path, program, *words, *settings(*FITS_SYNTHETIC_DATA))
    assert list(tmp_path.glob("runs/*-cpu_tiny/result_0.txt"))


@pytest.fixture(scope="module")
def submission(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The exported tree, and an interpreter that has it installed."""
    directory = tmp_path_factory.mktemp("submission")
    tree = directory / "tree"
    export(REPOSITORY, REPOSITORY / "results", tree)
    return tree, install(tree, directory / "installed") / "python"


@pytest.mark.real
def test_the_submission_trains_without_the_tools(submission: tuple[Path, Path]) -> None:
    tree, python = submission
    assert not (tree / "tools" / "bert_tools").exists()
    said = call(tree, "./run_and_time.sh", "--", *REDUCED.split(), PYTHON=python, CLEAR_CACHES=0)
    assert "RESULT,bert," in said and "accepted" in said


@pytest.mark.real
def test_the_submission_takes_own_text_without_the_tools(
    submission: tuple[Path, Path], tmp_path: Path
) -> None:
    tree, python = submission
    (tmp_path / "text").mkdir()
    for number in range(3):
        path = tmp_path / "text" / f"{number}.txt"
        write_synthetic_text(path, 150, seed=number)
        path.write_text(path.read_text().translate(str.maketrans("0123456789", "abcdefghij")))
    given = {"CORPUS": tmp_path / "text", "LOGDIR": tmp_path / "run", "CLEAR_CACHES": 0}
    words = ("./run_and_time.sh", "--", *settings(*FITS_OWN_TEXT))
    assert "own text has no target: accuracy" in call(tree, *words, PYTHON=python, **given)
    assert (tmp_path / "run/run_0/huggingface/model.safetensors").is_file()
