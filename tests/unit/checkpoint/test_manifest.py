"""Manifest, state and LATEST, hostile ones too; which checkpoints stay, and none is half there."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mlperf_bert.checkpoint.manifest import (
    CheckpointState,
    FileEntry,
    Manifest,
    bring_back,
    complete_checkpoints,
    discard,
    prune,
    put_aside,
    read_manifest,
    read_state,
    resolve,
    sweep,
    verify,
)
from mlperf_bert.checkpoint.writer import complete
from mlperf_bert.errors import CheckpointError

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
    attention="flash",
    kernels="fused",
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


def make(path, manifest=MANIFEST, state=STATE):
    path.mkdir(exist_ok=True)
    (path / "manifest.json").write_bytes(manifest.to_json())
    (path / "state.json").write_bytes(state.to_json())


def test_both_come_back(tmp_path):
    make(tmp_path)
    assert read_manifest(tmp_path) == MANIFEST
    assert read_state(tmp_path) == STATE
    with pytest.raises(CheckpointError):  # whose files are not there
        verify(tmp_path)
    values = json.loads(STATE.to_json())
    values |= {"noise": {}, "health": {}}  # of before they were left out
    del values["attention"], values["kernels"]  # of before they were written
    (tmp_path / "state.json").write_text(json.dumps(values))
    assert read_state(tmp_path) == replace(STATE, attention=None, kernels=None)


def changed(contents, change):
    """A JSON text with other values; None takes a value away."""
    values = {**json.loads(contents), **change}
    gone = [name for name, value in change.items() if value is None]
    return json.dumps({name: value for name, value in values.items() if name not in gone})


FORGED = {"size": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("manifest.json", {"format_version": 1}),
        ("manifest.json", {"files": {"../../etc/passwd": FORGED}}),
        ("manifest.json", {"files": {"optimizer/../../x": FORGED}}),
        ("manifest.json", {"files": {"/etc/passwd": FORGED}}),
        ("manifest.json", {"files": {"optimizer/rank_0.safetensors": FORGED}}),
        ("manifest.json", {"files": {"state.json": 5}}),
        ("manifest.json", {"files": None}),
        ("state.json", {"step": 8}),
        ("state.json", {"samples": 3}),
        ("state.json", {"vocabulary_sha256": "cd"}),
        ("state.json", {"seed": None}),
    ],
)
def test_wrong_ones_are_refused(tmp_path, file, change):
    make(tmp_path)
    (tmp_path / file).write_text(changed((tmp_path / file).read_text(), change))
    with pytest.raises(CheckpointError) as caught:
        (read_manifest if file == "manifest.json" else read_state)(tmp_path)
    assert "\n" not in str(caught.value) and file in str(caught.value)


def test_latest_names_a_checkpoint_beside_it_or_what_to_give_is_said(tmp_path):
    run = tmp_path / "run_0"
    directory = run / "checkpoints"
    directory.mkdir(parents=True)
    make(run / "step_00000007")
    for name in ("..", "../step_00000007", "step_7", "step_00000008", "\xff" * 3):
        (directory / "LATEST").write_text(name, encoding="utf-8")
        with pytest.raises(CheckpointError):
            resolve(directory)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/config.json").write_text("{}")
    for place, remedy in (
        (run, f"pass {directory}"),
        (tmp_path, f"pass {directory}"),
        (tmp_path / "theirs", f"convert {tmp_path / 'theirs'} --from huggingface --out NEW"),
        (run / "step_00000008", f"no such directory; did you mean {run / 'step_00000007'}?"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(remedy)):
            resolve(place)


def steps(directory):
    return [int(path.name[5:]) for path in complete_checkpoints(directory)]


def save(directory, step):
    same = {"step": step, "samples": step}
    state = replace(STATE, **same)
    make(directory / f"step_{step:08d}", replace(MANIFEST, **same), state)


def test_the_newest_stay(tmp_path):
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, step)
    prune(tmp_path, keep_last=2)
    assert steps(tmp_path) == [50, 40]
    save(tmp_path, 60)
    save(tmp_path, 70)
    (tmp_path / "step_00000070/manifest.json").unlink()  # so it does not count
    prune(tmp_path, keep_last=1)
    assert steps(tmp_path) == [60]


def test_a_removal_that_is_interrupted_leaves_none_behind(tmp_path, monkeypatch):
    save(tmp_path, 10)

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, ignore_errors: path.exists() and killed())
        with pytest.raises(KeyboardInterrupt):
            discard(tmp_path / "step_00000010")
    assert steps(tmp_path) == []
    (tmp_path / ".step_00000020.abcd.partial").mkdir()
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_those_that_were_passed_over_do_not_count_as_the_newest(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    put_aside(tmp_path, last_step=10)  # a run went on from 10, as the others are damaged
    save(tmp_path, 15)
    prune(tmp_path, keep_last=2)
    assert steps(tmp_path) == [15, 10]
    save(tmp_path, 30)
    put_aside(tmp_path, last_step=15)  # and that one too, later
    assert {path.name for path in tmp_path.glob("damaged_*")} == {
        *("damaged_step_00000020", "damaged_step_00000030", "damaged_step_00000030_1")
    }


def test_one_of_the_same_step_is_there_until_the_other_is(tmp_path, monkeypatch):
    save(tmp_path, 10)
    final, partial = tmp_path / "step_00000010", tmp_path / ".step_00000010.abcd.partial"
    (partial / "optimizer").mkdir(parents=True)
    rename = Path.rename

    def killed(path, target):
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
    (partial / "optimizer").mkdir(parents=True)
    with monkeypatch.context() as patch:  # another one is killed before it removes what it replaced
        patch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)
        complete(partial, final, read_manifest(final))
    assert {path.name for path in tmp_path.iterdir()} == {final.name, f"replaced_{final.name}"}
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == [final]
