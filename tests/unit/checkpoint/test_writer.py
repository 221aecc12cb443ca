"""The writer beside training: nothing waits for a slow disk, a failure is told and undone."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mlperf_bert.checkpoint import writer as writer_module
from mlperf_bert.checkpoint.manifest import CheckpointState, complete_checkpoints, verify
from mlperf_bert.checkpoint.writer import CheckpointWriter
from mlperf_bert.common.errors import CheckpointError
from mlperf_bert.config.files import load_config
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.optim.flat_optimizer import FlatOptimizer
from mlperf_bert.optim.optimizers import make_optimizer_alone
from support import TINY_CONFIG

CPU = torch.device("cpu")
ONE_RANK = RankInfo(0, 1, 0, 1, 0, "single")


def state(step: int) -> CheckpointState:
    return CheckpointState(
        step=step, samples=step, seed=1, mlm_accuracy=None, vocabulary_sha256="ab"
    )


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[tuple[CheckpointWriter, FlatOptimizer, Path]]:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY_CONFIG, encoding="utf-8")
    config = load_config(path)
    model = BertForPretraining(config.model, CPU, seed=1)
    optimizer = make_optimizer_alone(config.optim, model)
    directory = tmp_path / "checkpoints"
    yield (
        CheckpointWriter(directory, optimizer, config, ONE_RANK, CPU, keep_last=2),
        optimizer,
        directory,
    )


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A disk that writes nothing until the event is set."""
    opened = threading.Event()
    write_part = writer_module.write_part

    def slow(*arguments: object) -> object:
        assert opened.wait(60)
        return write_part(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(writer_module, "write_part", slow)
    return opened


def test_training_goes_on_meanwhile_and_changes_nothing_of_what_is_written(
    parts: tuple[CheckpointWriter, FlatOptimizer, Path], gate: threading.Event
) -> None:
    writer, optimizer, directory = parts
    before = optimizer.exact_weights()
    assert writer.begin(state(1))
    weights = optimizer.exact_weights()
    optimizer.set_weights({name: tensor + 1 for name, tensor in weights.items()})
    assert not writer.begin(state(2)), "the first is still being written"
    assert complete_checkpoints(directory) == []
    gate.set()
    writer.finish()
    assert [path.name for path in complete_checkpoints(directory)] == ["step_00000001"]
    from safetensors.torch import load_file

    for name, tensor in load_file(directory / "step_00000001/model.safetensors").items():
        assert torch.equal(tensor, before[name])
    assert writer.lines()[0].startswith("checkpoint step_00000001: ")


def test_a_failure_is_told_leaves_nothing_and_does_not_stay(
    parts: tuple[CheckpointWriter, FlatOptimizer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, _, directory = parts
    writer.begin(state(1))
    writer.finish()
    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "complete", _full_disk)
        assert writer.begin(state(2))
        with pytest.raises(CheckpointError, match="No space left on device"):
            writer.finish()
    assert any("No space left on device" in line for line in writer.lines())
    assert [path.name for path in directory.iterdir() if path.is_dir()] == ["step_00000001"]
    writer.begin(state(3))
    writer.finish()
    assert {path.name for path in directory.iterdir()} == {
        *("LATEST", "step_00000001", "step_00000003")
    }
    for path in complete_checkpoints(directory):
        verify(path)


def test_what_a_killed_run_left_is_removed(
    parts: tuple[CheckpointWriter, FlatOptimizer, Path], tmp_path: Path
) -> None:
    _, optimizer, directory = parts
    partial = directory / ".step_00000009.0badcafe.partial"
    (partial / "optimizer").mkdir(parents=True)
    config = load_config(tmp_path / "tiny.toml")
    CheckpointWriter(directory, optimizer, config, ONE_RANK, CPU)
    assert list(directory.iterdir()) == []


def test_the_same_step_is_replaced(
    parts: tuple[CheckpointWriter, FlatOptimizer, Path],
) -> None:
    writer, _, directory = parts
    for _ in range(2):
        writer.begin(state(5))
        writer.finish()
    assert {path.name for path in directory.iterdir()} == {"LATEST", "step_00000005"}
    verify(directory / "step_00000005")


def test_an_error_of_any_kind_is_heard_of(
    parts: tuple[CheckpointWriter, FlatOptimizer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, _, _ = parts

    def fault(*_: object) -> None:
        raise ValueError("a fault of ours")

    monkeypatch.setattr(writer_module, "complete", fault)
    writer.begin(state(2))
    with pytest.raises(CheckpointError, match="a fault of ours"):
        writer.finish()


def test_a_disk_that_takes_no_more_is_given_up(
    parts: tuple[CheckpointWriter, FlatOptimizer, Path], gate: threading.Event, tmp_path: Path
) -> None:
    _, optimizer, directory = parts
    config = load_config(tmp_path / "tiny.toml", ["run.hang_timeout_s=0.5"])
    writer = CheckpointWriter(directory, optimizer, config, ONE_RANK, CPU)
    writer.begin(state(2))
    with pytest.raises(CheckpointError, match="rank 0 writes no more"):
        writer.finish()
    gate.set()
    writer.finish()


def test_a_checkpoint_that_is_there_is_not_called_failed(
    parts: tuple[CheckpointWriter, FlatOptimizer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, _, directory = parts
    monkeypatch.setattr(writer_module, "write_file", _full_disk)  # LATEST
    writer.begin(state(2))
    writer.finish()
    assert "older ones stay" in writer.lines()[1]
    verify(directory / "step_00000002")


def _full_disk(*_: object) -> None:
    raise OSError(28, "No space left on device")
