"""No process of a run takes anything out of a pickle but numba's own cache, the user's own files.

What runs is watched, by an audit hook in every process, not the text of our files.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from support import PACKAGE, TOOLS, make_tiny_inputs, run_cli, run_process

HOOK = Path(__file__).parents[1] / "pickle_audit"
TWO_RANKS = ("--set", "parallel.ranks_per_node=2", "--set", "parallel.local_batch_size=8")
SQUAD = ("--layers", 4, "--hidden", 16, "--heads", 2, "--updates", 1, "--max-length", 64)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_tiny_inputs(tmp_path_factory.mktemp("tiny"))


def watched(directory: Path, *arguments: object, status: int, processes: int = 3) -> None:
    """Run a command; fail where one of its processes, so many at least, unpickles."""
    log = directory / "audit.jsonl"
    path = os.pathsep.join(map(str, (HOOK, PACKAGE.parent, TOOLS.parent)))
    done = run_cli(*arguments, PICKLE_AUDIT=str(log), PYTHONPATH=path)
    assert done.returncode == status, done.stderr
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert len({entry["pid"] for entry in entries if "command" in entry}) >= processes
    found = [entry for entry in entries if "found" in entry and not is_own_cache(entry["cache"])]
    assert not found, found[:3]


def is_own_cache(directory: str | None) -> bool:
    """Whether only this user can have written there: numba's index and code are pickles."""
    if directory is None:
        return False
    status = os.stat(directory)
    return status.st_uid == os.geteuid() and status.st_mode & 0o022 == 0


def test_training_on_two_ranks(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    """With evaluations and a checkpoint."""
    data, config = tiny
    place = ("--config", config, "--data", data, "--run-dir", tmp_path / "run")
    watched(tmp_path, "train", *place, *TWO_RANKS, status=3)
    assert list((tmp_path / "run/run_0/checkpoints").glob("step_*"))


@pytest.mark.real
@pytest.mark.parametrize("engine", ["fsdp:2", "pipeline:2@interleaved"])
def test_fine_tuning(engine: str, tmp_path: Path) -> None:
    run_dir = ("--run-dir", tmp_path / "run", "--save", "nothing")
    watched(tmp_path, "squad", "train", "--engine", engine, *SQUAD, *run_dir, status=0)


@pytest.mark.real
def test_the_network_test(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    config = ("--config", tiny[1], *TWO_RANKS, "--device", "cpu")
    watched(tmp_path, "doctor", "--only", "network", *config, status=0)


def test_it_would_be_seen(tmp_path: Path) -> None:
    code = "import pickle; pickle.loads(pickle.dumps(pickle.Pickler))"
    log = tmp_path / "audit.jsonl"
    run_process(sys.executable, "-c", code, PICKLE_AUDIT=str(log), PYTHONPATH=str(HOOK))
    command, found = map(json.loads, log.read_text().splitlines())
    assert "command" in command and found["found"] == "_pickle.Pickler"
    assert not is_own_cache(found["cache"])
