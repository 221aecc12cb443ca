"""Which checkpoints stay, and that none is ever half there."""

import shutil
from pathlib import Path

import pytest

from mlperf_bert.checkpoint.manifest import (
    CheckpointState,
    Manifest,
    bring_back,
    complete_checkpoints,
    discard,
    prune,
    put_aside,
    read_manifest,
    sweep,
)
from mlperf_bert.checkpoint.writer import complete


def make(directory: Path, step: int, accuracy: float | None = None) -> None:
    path = directory / f"step_{step:08d}"
    path.mkdir()
    same = {"step": step, "samples": step, "vocabulary_sha256": "ab"}
    state = CheckpointState(seed=1, mlm_accuracy=accuracy, **same)  # type: ignore[arg-type]
    manifest = Manifest(version="1", commit=None, config={}, files={}, **same)  # type: ignore[arg-type]
    (path / "state.json").write_bytes(state.to_json())
    (path / "manifest.json").write_bytes(manifest.to_json())


def steps(directory: Path) -> list[int]:
    return [int(path.name[5:]) for path in complete_checkpoints(directory)]


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    for step, accuracy in ((10, 0.2), (20, 0.5), (30, None), (40, 0.3), (50, None)):
        make(tmp_path, step, accuracy)
    prune(tmp_path, keep_last=2)
    assert steps(tmp_path) == [50, 40, 20]
    prune(tmp_path, keep_last=1)
    assert steps(tmp_path) == [50, 20]


def test_without_an_accuracy_there_is_no_best(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        make(tmp_path, step)
    prune(tmp_path, keep_last=1)
    assert steps(tmp_path) == [30]


def test_one_without_a_manifest_does_not_count(tmp_path: Path) -> None:
    make(tmp_path, 10)
    make(tmp_path, 20)
    (tmp_path / "step_00000020" / "manifest.json").unlink()
    assert steps(tmp_path) == [10]


def test_a_removal_that_is_interrupted_leaves_none_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, 10)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, ignore_errors: path.exists() and killed())
        with pytest.raises(KeyboardInterrupt):
            discard(tmp_path / "step_00000010")
    assert steps(tmp_path) == []
    (tmp_path / ".step_00000020.abcd.partial").mkdir()
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_those_that_were_passed_over_do_not_count_as_the_newest(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        make(tmp_path, step)
    put_aside(tmp_path, last_step=10)  # a run went on from 10, as the others are damaged
    make(tmp_path, 15)
    prune(tmp_path, keep_last=2)
    assert steps(tmp_path) == [15, 10]
    make(tmp_path, 30)
    put_aside(tmp_path, last_step=15)  # and that one too, later
    assert {path.name for path in tmp_path.glob("damaged_*")} == {
        *("damaged_step_00000020", "damaged_step_00000030", "damaged_step_00000030_1")
    }


def test_one_of_the_same_step_is_there_until_the_other_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, 10)
    final, partial = tmp_path / "step_00000010", tmp_path / ".step_00000010.abcd.partial"
    (partial / "optimizer").mkdir(parents=True)
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path == partial:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", killed)
        complete(partial, final, read_manifest(final))
    sweep(tmp_path)  # by the next start
    assert {path.name for path in tmp_path.iterdir()} == {"replaced_step_00000010"}
    bring_back(tmp_path)
    bring_back(tmp_path)
    assert steps(tmp_path) == [10]
