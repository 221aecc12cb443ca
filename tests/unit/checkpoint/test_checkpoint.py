"""Checkpoints: format on disk, written beside training, refused where damaged, back bit for bit."""

import hashlib
import json
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mlperf_bert.checkpoint import writer as writer_module
from mlperf_bert.checkpoint.load import load_weights
from mlperf_bert.checkpoint.manifest import (
    CheckpointState,
    complete_checkpoints,
    read_config,
    verify,
)
from mlperf_bert.checkpoint.tensors import write_tensors
from mlperf_bert.checkpoint.writer import CheckpointWriter
from mlperf_bert.config.files import load_config
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.errors import CheckpointError
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.optim.optimizers import make_optimizer_alone

CPU = torch.device("cpu")
ONE_RANK = RankInfo(0, 1, 0, 1, 0, "single")
TENSORS = {
    "matrix": torch.arange(12, dtype=torch.float32).view(3, 4),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "scalar": torch.tensor(3.0, dtype=torch.float64),
    "states": torch.arange(5, dtype=torch.uint8),
    "empty": torch.empty(0, 7),
}


def state(step):
    return CheckpointState(
        step=step, samples=16 * step, seed=5, mlm_accuracy=0.25, vocabulary_sha256="ab"
    )


@pytest.fixture
def config(tiny_config):
    return load_config(tiny_config)


@pytest.fixture
def model(config):
    return BertForPretraining(config.model, CPU, seed=1)


@pytest.fixture
def optimizer(config, model):
    """After one step."""
    optimizer = make_optimizer_alone(config.optim, model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    rate = torch.tensor(1e-3, dtype=torch.float64)
    optimizer.step(rate, gradient_factor=torch.ones(()), skip=torch.zeros(()))
    return optimizer


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def writer(directory, optimizer, config):
    return CheckpointWriter(directory, optimizer, config, ONE_RANK, CPU, keep_last=2)


def save(writer, step):
    assert writer.begin(state(step))
    writer.finish()


@pytest.fixture
def saved(directory, writer):
    """`directory` with a checkpoint of step 120."""
    save(writer, 120)
    return directory


def names(directory):
    return {path.name for path in directory.iterdir()}


@pytest.fixture
def gate(monkeypatch):
    """A disk that writes nothing until the event is set."""
    opened = threading.Event()
    write_part = writer_module.write_part

    def slow(*arguments):
        assert opened.wait(60)
        return write_part(*arguments)

    monkeypatch.setattr(writer_module, "write_part", slow)
    return opened


def test_a_file_of_tensors_is_new_whole_and_as_readable_as_others(tmp_path):
    path = tmp_path / "tensors.safetensors"
    entry = write_tensors(path, TENSORS, {"ranges": "{}"})
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"ranges": "{}"}
    contents = path.read_bytes()
    assert (entry.size, entry.sha256) == (len(contents), hashlib.sha256(contents).hexdigest())
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
    with pytest.raises(FileExistsError):
        write_tensors(path, {})


def test_all_comes_back_from_the_documented_layout(saved, model, config):
    step = saved / "step_00000120"
    files = {path.relative_to(step).as_posix() for path in step.rglob("*") if path.is_file()}
    assert files == {
        "manifest.json",
        "model.safetensors",
        "optimizer/rank_00000.safetensors",
        "rank_states.safetensors",
        "state.json",
    }
    assert (saved / "LATEST").read_text() == "step_00000120\n"
    manifest = json.loads((step / "manifest.json").read_text())
    assert set(manifest["files"]) == files - {"manifest.json"}
    for name, entry in manifest["files"].items():
        assert entry["size"] == (step / name).stat().st_size
    assert manifest["vocabulary_sha256"] == "ab"
    assert not list(saved.glob(".*"))
    for place in (saved, step):
        other = BertForPretraining(config.model, CPU, seed=2)
        assert load_weights(other, place, "ab") == state(120)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name])
        assert read_config(place) == config
    alone = BertForPretraining(replace(config.model, objective="mlm"), CPU, seed=9)
    load_weights(alone, saved, "ab")  # the other way is refused (test_first_weights.py)
    for name, tensor in alone.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "not_json"])
def test_damage_is_named(saved, model, damage):
    weights = saved / "step_00000120" / "model.safetensors"
    contents = weights.read_bytes()
    if damage == "flip":
        weights.write_bytes(contents[:-1] + bytes([contents[-1] ^ 1]))
    elif damage == "truncate":
        weights.write_bytes(contents[:-1])
    elif damage == "remove":
        weights.unlink()
    else:
        (saved / "step_00000120" / "manifest.json").write_text("{")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, saved, "ab")
    assert "\n" not in str(caught.value)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_other_vocabulary_and_other_model_are_refused(saved, model, tiny_config):
    with pytest.raises(CheckpointError, match="vocabulary"):
        load_weights(model, saved, "cd")
    for setting, word in (
        ("intermediate_size=128", "intermediate"),
        ("num_layers=3", "has no bert"),
    ):
        other = load_config(tiny_config, [f"model.{setting}"])
        with pytest.raises(CheckpointError, match=word):
            load_weights(BertForPretraining(other.model, CPU), saved, "ab")


def test_a_place_that_cannot_be_written_or_has_no_room_is_named(
    optimizer, config, directory, monkeypatch
):
    directory.write_text("not a directory")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save(CheckpointWriter(directory, optimizer, config, ONE_RANK, CPU), 1)
    assert directory.read_text() == "not a directory"
    directory.unlink()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**16))
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(CheckpointWriter(directory, optimizer, config, ONE_RANK, CPU), 2)
    assert names(directory) == set()


def test_training_goes_on_meanwhile_and_changes_nothing_of_what_is_written(
    writer, optimizer, directory, gate
):
    before = optimizer.exact_weights()
    assert writer.begin(state(1))
    weights = optimizer.exact_weights()
    optimizer.set_weights({name: tensor + 1 for name, tensor in weights.items()})
    assert not writer.begin(state(2)), "the first is still being written"
    assert complete_checkpoints(directory) == []
    gate.set()
    writer.finish()
    assert [path.name for path in complete_checkpoints(directory)] == ["step_00000001"]
    for name, tensor in load_file(directory / "step_00000001/model.safetensors").items():
        assert torch.equal(tensor, before[name])
    assert writer.lines()[0].startswith("checkpoint step_00000001: ")


def test_a_failure_is_told_leaves_nothing_and_does_not_stay(writer, directory, monkeypatch):
    save(writer, 1)
    for error in (OSError(28, "No space left on device"), ValueError("a fault of ours")):
        with monkeypatch.context() as patch:
            patch.setattr(writer_module, "complete", Mock(side_effect=error))
            with pytest.raises(CheckpointError, match=str(error.args[-1])):
                save(writer, 2)
        assert any(error.args[-1] in line for line in writer.lines())
    assert names(directory) == {"LATEST", "step_00000001"}
    save(writer, 3)
    assert names(directory) == {"LATEST", "step_00000001", "step_00000003"}
    for path in complete_checkpoints(directory):
        verify(path)


def test_the_same_step_is_replaced_and_what_a_killed_run_left_is_removed(
    optimizer, config, directory, monkeypatch
):
    (directory / ".step_00000009.0badcafe.partial/optimizer").mkdir(parents=True)
    first = CheckpointWriter(directory, optimizer, config, ONE_RANK, CPU)
    assert names(directory) == set()
    places = []
    write_part = writer_module.write_part

    def noted(partial, part):
        places.append(partial)
        return write_part(partial, part)

    monkeypatch.setattr(writer_module, "write_part", noted)
    for writer in (first, CheckpointWriter(directory, optimizer, config, ONE_RANK, CPU)):
        save(writer, 5)
    assert names(directory) == {"LATEST", "step_00000005"}
    verify(directory / "step_00000005")
    # A rank that outlived the first attempt may still leave its note there.
    assert len(set(places)) == 2


def test_everything_is_on_disk_before_it_gets_its_name(writer, directory, monkeypatch):
    """Otherwise a power cut could leave a complete name over incomplete contents."""
    flush = os.fsync
    flushed = set()
    named = []

    def noted(file):
        flushed.add(os.fstat(file).st_ino)
        flush(file)

    def checked(move):
        def moved(path, target):
            named.append(target.name)
            assert {each.stat().st_ino for each in (path, *path.rglob("*"))} <= flushed
            return move(path, target)

        return moved

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", checked(Path.rename))
    monkeypatch.setattr(Path, "replace", checked(Path.replace))
    save(writer, 2)
    assert named == ["step_00000002", "LATEST"]
    assert directory.stat().st_ino in flushed  # the new name itself


def test_a_disk_that_takes_no_more_is_given_up(optimizer, directory, gate, tiny_config):
    impatient = load_config(tiny_config, ["run.hang_timeout_s=0.5"])
    writer = CheckpointWriter(directory, optimizer, impatient, ONE_RANK, CPU)
    with pytest.raises(CheckpointError, match="rank 0 has stopped writing"):
        save(writer, 2)
    gate.set()
    writer.finish()


def test_a_slow_disk_is_waited_for_as_long_as_bytes_move(
    writer, config, directory, gate, monkeypatch
):
    now = 0.0

    def sleep(_):
        nonlocal now
        now += config.run.hang_timeout_s / 2
        if now > 5 * config.run.hang_timeout_s:
            gate.set()

    assert writer.begin(state(2))
    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep, perf_counter=time.perf_counter)
    monkeypatch.setattr(writer_module, "time", clock)
    monkeypatch.setattr(writer_module, "moved_bytes", lambda _: int(now))
    writer.finish()
    verify(directory / "step_00000002")


def test_what_the_thread_moves_is_a_sign_of_life(tmp_path):
    before = writer_module.moved_bytes(threading.current_thread())
    (tmp_path / "file").write_bytes(bytes(10_000))
    assert writer_module.moved_bytes(threading.current_thread()) >= before + 10_000
    thread = threading.Thread(target=bool)
    thread.start()
    thread.join()
    assert writer_module.moved_bytes(thread) == 0


def test_a_checkpoint_that_is_there_is_not_called_failed(writer, directory, monkeypatch):
    error = OSError(28, "No space left on device")
    monkeypatch.setattr(writer_module, "write_file", Mock(side_effect=error))  # LATEST
    save(writer, 2)
    assert "removing older checkpoints failed" in writer.lines()[1]
    verify(directory / "step_00000002")
