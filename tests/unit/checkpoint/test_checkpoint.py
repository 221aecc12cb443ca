"""Checkpoints: format on disk, refusal of what is damaged, weights back bit for bit."""

import json
from pathlib import Path

import pytest
import torch

from checkpoint_cases import save_checkpoint
from mlperf_bert.checkpoint.load import load_weights
from mlperf_bert.checkpoint.manifest import CheckpointState, read_config
from mlperf_bert.common.errors import CheckpointError
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.optim.optimizers import make_optimizer_alone
from support import TINY_CONFIG

CPU = torch.device("cpu")
ONE_RANK = RankInfo(0, 1, 0, 1, 0, "single")
STATE = CheckpointState(step=120, samples=1920, seed=5, mlm_accuracy=0.25, vocabulary_sha256="ab")


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY_CONFIG, encoding="utf-8")
    return load_config(path)


@pytest.fixture
def saved(config: RunConfig, tmp_path: Path) -> tuple[Path, BertForPretraining]:
    model = BertForPretraining(config.model, CPU, seed=1)
    optimizer = make_optimizer_alone(config.optim, model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    rate = torch.tensor(1e-3, dtype=torch.float64)
    optimizer.step(rate, gradient_factor=torch.ones(()), skip=torch.zeros(()))
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    save_checkpoint(directory, optimizer, config, STATE, ONE_RANK, CPU)
    return directory, model


def test_layout_is_the_documented_one(saved: tuple[Path, BertForPretraining]) -> None:
    directory, _ = saved
    step = directory / "step_00000120"
    files = {path.relative_to(step).as_posix() for path in step.rglob("*") if path.is_file()}
    assert files == {
        "manifest.json",
        "model.safetensors",
        "optimizer/rank_00000.safetensors",
        "rank_states.safetensors",
        "state.json",
    }
    assert (directory / "LATEST").read_text() == "step_00000120\n"
    manifest = json.loads((step / "manifest.json").read_text())
    assert set(manifest["files"]) == files - {"manifest.json"}
    for name, entry in manifest["files"].items():
        assert entry["size"] == (step / name).stat().st_size
    assert manifest["vocabulary_sha256"] == "ab"
    assert not list(directory.glob(".*"))


def test_weights_config_and_state_come_back(
    saved: tuple[Path, BertForPretraining], config: RunConfig
) -> None:
    directory, model = saved
    for place in (directory, directory / "step_00000120"):
        other = BertForPretraining(config.model, CPU, seed=2)
        assert load_weights(other, place, "ab") == STATE
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name])
        assert read_config(place) == config


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "not_json", "no_latest"])
def test_damage_is_named(
    saved: tuple[Path, BertForPretraining], config: RunConfig, damage: str
) -> None:
    directory, model = saved
    weights = directory / "step_00000120" / "model.safetensors"
    contents = bytearray(weights.read_bytes())
    if damage == "flip":
        contents[-1] ^= 1
        weights.write_bytes(contents)
    elif damage == "truncate":
        weights.write_bytes(contents[:-1])
    elif damage == "remove":
        weights.unlink()
    elif damage == "not_json":
        (directory / "step_00000120" / "manifest.json").write_text("{")
    else:
        (directory / "LATEST").write_text("../elsewhere")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, directory, "ab")
    assert "\n" not in str(caught.value)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_other_vocabulary_and_other_model_are_refused(
    saved: tuple[Path, BertForPretraining], config: RunConfig, tmp_path: Path
) -> None:
    directory, model = saved
    with pytest.raises(CheckpointError, match="vocabulary"):
        load_weights(model, directory, "cd")
    wider = load_config(tmp_path / "tiny.toml", ["model.intermediate_size=128"])
    with pytest.raises(CheckpointError, match="intermediate"):
        load_weights(BertForPretraining(wider.model, CPU), directory, "ab")
    deeper = load_config(tmp_path / "tiny.toml", ["model.num_layers=3"])
    with pytest.raises(CheckpointError, match="missing"):
        load_weights(BertForPretraining(deeper.model, CPU), directory, "ab")


def test_a_place_that_cannot_be_written_is_named(
    saved: tuple[Path, BertForPretraining], config: RunConfig, tmp_path: Path
) -> None:
    _, model = saved
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    optimizer = make_optimizer_alone(config.optim, model)
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_checkpoint(blocked, optimizer, config, STATE, ONE_RANK, CPU)
    assert blocked.read_text() == "not a directory"
