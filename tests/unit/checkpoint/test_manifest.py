"""A hostile or damaged manifest, state or LATEST is refused in one line, and leads nowhere else."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlperf_bert.checkpoint.manifest import (
    CheckpointState,
    FileEntry,
    Manifest,
    read_manifest,
    read_state,
    resolve,
    verify,
)
from mlperf_bert.common.errors import CheckpointError

STATE = CheckpointState(
    step=7,
    samples=112,
    seed=2**62,
    mlm_accuracy=None,
    vocabulary_sha256="ab",
    data_sha256="cd",
    world_size=4,
    ended="aborted",
    seconds=1.5,
    skipped_in_a_row=2,
    best_mlm_accuracy=0.5,
    health={"best_loss": 1.0},
    noise={"noise_scale.weight": 0.5},
)
MANIFEST = Manifest(
    step=7,
    samples=112,
    vocabulary_sha256="ab",
    version="1",
    commit=None,
    config={"run": {"seed": 3}},
    files={
        "state.json": FileEntry(3, "0" * 64),
        "optimizer/rank_00003.safetensors": FileEntry(0, "f" * 64),
    },
)


def test_both_come_back(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(MANIFEST.to_json())
    (tmp_path / "state.json").write_bytes(STATE.to_json())
    assert read_manifest(tmp_path) == MANIFEST
    assert read_state(tmp_path) == STATE


def test_a_state_from_before_noise_was_measured_is_read(tmp_path: Path) -> None:
    values = json.loads(STATE.to_json())
    del values["noise"]
    (tmp_path / "manifest.json").write_bytes(MANIFEST.to_json())
    (tmp_path / "state.json").write_text(json.dumps(values))
    assert read_state(tmp_path).noise == {}


def change(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda found: found.update(values)


@pytest.mark.parametrize(
    "edit",
    [
        change(format_version=1),
        change(step=-1),
        change(step="7"),
        change(samples=2**70),
        change(config=[]),
        change(files={"../../etc/passwd": {"size": 1, "sha256": "0" * 64}}),
        change(files={"optimizer/../../x": {"size": 1, "sha256": "0" * 64}}),
        change(files={"/etc/passwd": {"size": 1, "sha256": "0" * 64}}),
        change(files={"optimizer/rank_0.safetensors": {"size": 1, "sha256": "0" * 64}}),
        change(files={"state.json": {"size": 1, "sha256": "z" * 64}}),
        change(files={"state.json": {"size": True, "sha256": "0" * 64}}),
        change(files={"state.json": 5}),
        lambda found: found.pop("files"),
    ],
)
def test_a_wrong_manifest_is_refused(tmp_path: Path, edit: Callable[[Any], object]) -> None:
    values = json.loads(MANIFEST.to_json())
    edit(values)
    (tmp_path / "manifest.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError) as caught:
        read_manifest(tmp_path)
    assert "\n" not in str(caught.value) and "manifest.json" in str(caught.value)


@pytest.mark.parametrize(
    "edit",
    [
        change(ended="maybe"),
        change(mlm_accuracy="high"),
        change(mlm_accuracy=7.0),
        change(best_mlm_accuracy=-1),
        change(skipped_in_a_row=1e299),
        change(step=8),
        change(samples=3),
        change(vocabulary_sha256="cd"),
        change(health={"best": "x"}),
        change(health={"best": float("inf")}),
        change(health={str(number): 1.0 for number in range(2000)}),
        change(noise={"weight": "x"}),
        change(noise=7),
        change(world_size=0),
        change(seed=-1),
        lambda found: found.pop("data_sha256"),
    ],
)
def test_a_wrong_state_is_refused(tmp_path: Path, edit: Callable[[Any], object]) -> None:
    (tmp_path / "manifest.json").write_bytes(MANIFEST.to_json())
    values = json.loads(STATE.to_json())
    edit(values)
    (tmp_path / "state.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"state\.json"):
        read_state(tmp_path)


@pytest.mark.parametrize("name", ["..", "../step_00000007", "step_7", "step_00000008", "\xff" * 3])
def test_latest_names_a_checkpoint_beside_it(tmp_path: Path, name: str) -> None:
    outside = tmp_path / "step_00000007"
    directory = tmp_path / "checkpoints"
    outside.mkdir()
    directory.mkdir()
    (outside / "manifest.json").write_bytes(MANIFEST.to_json())
    (directory / "LATEST").write_text(name, encoding="utf-8")
    with pytest.raises(CheckpointError):
        resolve(directory)


def test_every_file_of_the_manifest_is_verified(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(MANIFEST.to_json())
    (tmp_path / "state.json").write_bytes(STATE.to_json())
    with pytest.raises(CheckpointError):
        verify(tmp_path)


def test_what_is_no_checkpoint_is_told_what_to_give(tmp_path: Path) -> None:
    run = tmp_path / "run_0"
    for file in ("run_0/checkpoints/LATEST", "theirs/config.json", "tf/model.ckpt-7.index"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("")
    for directory, remedy in (
        (run, f"give {run / 'checkpoints'}"),
        (tmp_path / "theirs", f"mlperf_bert convert --from huggingface {tmp_path / 'theirs'}"),
        (tmp_path / "tf", f"mlperf_bert convert --from tensorflow {tmp_path / 'tf'}"),
        (tmp_path, "give a checkpoint directory"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(remedy)):
            resolve(directory)
