"""A model with FP8 products: what it learns beside bf16, its scales, their restored state."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_cases import CPU, TINY, our_loss, ragged_batch
from torch import Tensor

from mlperf_bert.common.errors import TARGET_MISSED, ConfigError
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.model.fp8 import check_fp8
from mlperf_bert.model.fp8_cast import COLUMNS_MULTIPLE
from resume_cases import run_train
from support import metrics_records

STEPS = 12
TOLERANCE = 0.01  # of losses near 5 that fall by several times this much
CONFIG = replace(TINY, precision="fp8", initializer_range=0.1)
BATCHES = tuple(ragged_batch((9, 20, 5), seed=seed) for seed in range(4))


def make_model() -> BertForPretraining:
    return BertForPretraining(CONFIG, CPU).to(torch.bfloat16)


def train_step(model: BertForPretraining, number: int) -> list[Tensor]:
    """Loss and gradients of an update that changes the scales alone."""
    model.step.fill_(number)
    model.zero_grad()
    loss = our_loss(model, BATCHES[number % len(BATCHES)])
    loss.backward()
    return [loss.detach(), *(each.grad for each in model.parameters())]


def losses(precision: str, config: Path, data: Path, directory: Path) -> list[float]:
    """Of the steps of a run by the `train` command."""
    options = (
        *(f"model.precision={precision}", f"run.max_steps={STEPS}", "run.log_interval_steps=1"),
        *(f"schedule.decay_steps={STEPS}", "model.initializer_range=0.1", "checkpoint.save=never"),
        # A CPU multiplies FP8 matrices a number at a time.
        *("eval.interval_samples=10000", "parallel.local_batch_size=8"),
    )
    assert run_train(config, data, directory / precision, *options) == TARGET_MISSED
    records = metrics_records(directory / precision)
    assert not any(record["skipped_steps"] for record in records)
    return [record["loss"] for record in records]


def test_losses_follow_those_of_bf16(
    tiny_config: Path, synthetic_data: Path, tmp_path: Path
) -> None:
    bf16, fp8 = (
        losses(precision, tiny_config, synthetic_data, tmp_path) for precision in ("bf16", "fp8")
    )
    assert len(bf16) == STEPS and fp8 != bf16
    assert fp8 == pytest.approx(bf16, abs=TOLERANCE)
    assert bf16[0] - min(bf16) > 5 * TOLERANCE  # a run that stood still would not pass


def test_every_product_of_the_encoder_has_its_own_scales() -> None:
    model = make_model()
    train_step(model, 1)
    assert model.fp8 is not None
    maxima = model.fp8.state[1].clone()
    assert (maxima > 0).all()
    weights = model.bert.encoder.layer[1].output.dense.weight
    assert maxima[-1, 1] == weights.abs().max()
    with torch.no_grad():
        weights.mul_(2.0)
    train_step(model, 2)
    changed = model.fp8.state[1, :, 1] / maxima[:, 1]
    assert changed.tolist() == [*[1.0] * 7, 2.0]


def test_restored_scales_continue_to_the_bit() -> None:
    model = make_model()
    train_step(model, 1)
    saved = {name: tensor.clone() for name, tensor in model.fp8_state().items()}
    expected = [train_step(model, number) for number in (2, 3)]
    other = make_model()  # the weights are the same, the scales are those of no step
    assert not torch.equal(other.fp8_state()["fp8.state"], saved["fp8.state"])
    for name, tensor in other.fp8_state().items():
        tensor.copy_(saved[name])
    for number, wanted in zip((2, 3), expected, strict=True):
        for one, theirs in zip(train_step(other, number), wanted, strict=True):
            assert torch.equal(one, theirs)
    for name, tensor in other.fp8_state().items():
        assert torch.equal(tensor, model.fp8_state()[name])


def test_evaluation_changes_no_scale() -> None:
    model = make_model()
    train_step(model, 1)
    before = {name: tensor.clone() for name, tensor in model.fp8_state().items()}
    model.step.fill_(2)
    model.eval()
    with torch.inference_mode():
        our_loss(model, BATCHES[0])
    for name, tensor in model.fp8_state().items():
        assert torch.equal(tensor, before[name])


def test_other_precisions_have_no_scales() -> None:
    model = BertForPretraining(TINY, CPU)
    assert model.fp8 is None and model.fp8_state() == {}


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size"])
def test_sizes_must_suit_fp8(name: str) -> None:
    unfit = replace(CONFIG, **{name: COLUMNS_MULTIPLE * 5 // 2})
    with pytest.raises(ConfigError, match=f"model.{name}"):
        BertForPretraining(unfit, CPU)


def test_devices_without_fp8_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    with pytest.raises(ConfigError, match=r"model\.precision.*A100"):
        check_fp8(CONFIG, torch.device("cuda"))
