"""The noise scale of a run: what is recorded, what a resumed run records, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.run.noise_record import NoiseRecord
from resume_cases import MISSED, run_train, weights

KEYS = ("noise_scale", "noise_scale_plain")
FORWARDS = ("parallel.grad_accum_steps=2", "parallel.local_batch_size=8")


def noise_scales(directory: Path) -> list[tuple[float | None, ...]]:
    lines = (directory / "run_0/metrics.jsonl").read_text().splitlines()
    return [tuple(json.loads(line)[key] for key in KEYS) for line in lines]


def config(tiny_config: Path, *settings: str) -> RunConfig:
    return load_config(tiny_config, ("run.noise_interval_steps=1", *FORWARDS, *settings))


@pytest.mark.parametrize("forwards", [FORWARDS, ()], ids=["two forwards", "one forward"])
def test_a_run_records_its_noise_and_trains_as_without(
    tiny_config: Path, synthetic_data: Path, tmp_path: Path, forwards: tuple[str, ...]
) -> None:
    def trained(interval: int) -> list[tuple[float | None, ...]]:
        directory = tmp_path / f"every {interval}"
        settings = (*forwards, f"run.noise_interval_steps={interval}")
        assert run_train(tiny_config, synthetic_data, directory, *settings) == MISSED
        return noise_scales(directory)

    off, on = trained(0), trained(4)
    assert off == [(None, None)] * 20
    assert on[:3] == [(None, None)] * 3  # nothing is measured before step 4
    for first in (3, 7, 11, 15):
        assert on[first : first + 4] == on[first : first + 1] * 4  # until the next measurement
    checkpoint = tmp_path / "every 4/run_0/checkpoints/step_00000020"
    smoothed = json.loads((checkpoint / "state.json").read_text())["noise"]
    for key, value in zip(KEYS, on[-1], strict=True):
        assert smoothed[f"{key}.trace"] > 0
        square = smoothed[f"{key}.gradient_square"]
        # So few steps that noise may hide the gradient: it is not known then.
        expected = smoothed[f"{key}.trace"] / square if square > 0 else None
        assert value == (None if expected is None else pytest.approx(expected))
    assert any(plain is not None for _, plain in on)
    assert weights(tmp_path / "every 4") == weights(tmp_path / "every 0")


def test_a_resumed_run_goes_on_smoothing(
    tiny_config: Path, synthetic_data: Path, tmp_path: Path
) -> None:
    same = (*FORWARDS, "run.noise_interval_steps=2", "checkpoint.interval_steps=8")
    same += ("checkpoint.keep_last=9", "eval.interval_samples=100000")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run_train(tiny_config, synthetic_data, whole, *same) == MISSED
    shutil.copytree(whole, killed)
    (killed / "run_0/outcome.json").unlink()
    for step in (16, 20):  # as if it had been killed after step 8 was saved
        shutil.rmtree(killed / f"run_0/checkpoints/step_{step:08d}", ignore_errors=True)
    assert (killed / "run_0/checkpoints/step_00000008").is_dir()
    assert run_train(tiny_config, synthetic_data, killed, *same, resume="auto") == MISSED
    scales = noise_scales(killed)
    assert scales == noise_scales(whole)
    assert scales[-1] != scales[7]


def test_captured_steps_are_refused_in_one_line(tiny_config: Path) -> None:
    with pytest.raises(ConfigError, match=r"noise_interval_steps.*captured.*eager") as caught:
        config(tiny_config, "run.step_mode=captured")
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="noise_interval_steps: is -1"):
        config(tiny_config, "run.noise_interval_steps=-1")


def test_a_record_is_made_of_what_counts(tiny_config: Path) -> None:
    """Batches of 8 and 16: plain 10 and 7 are |G|^2 = 2 * 7 - 10 = 4 and tr(Sigma) = 3 * 16 = 48,
    so 12 sequences; preconditioned 6 and 5 are 4 and 16: 4 sequences.
    """
    record = NoiseRecord(config(tiny_config), world_size=1)
    assert record.values() == {"noise_scale": None, "noise_scale_plain": None}
    record.add(torch.tensor([10.0, 7.0, 6.0, 5.0, 1.0], dtype=torch.float64))
    record.add(None)  # a step that was not measured
    record.add(torch.tensor([1e9, 1.0, 1e9, 1.0, 0.0], dtype=torch.float64))  # clipped before
    record.add(torch.tensor([float("nan")] * 4 + [0.0], dtype=torch.float64))  # skipped
    values = record.values()
    assert values == {
        "noise_scale": pytest.approx(4.0),
        "noise_scale_plain": pytest.approx(12.0),
    }
    assert record.values() == values  # until there is a new one


def test_a_state_of_another_version_is_begun_anew(tiny_config: Path) -> None:
    record = NoiseRecord(config(tiny_config), world_size=1)
    record.add(torch.tensor([10.0, 7.0, 6.0, 5.0, 1.0], dtype=torch.float64))
    values, state = record.values(), record.state()
    other = NoiseRecord(config(tiny_config), world_size=1)
    other.restore(state)
    assert other.values() == values
    for wrong in ({}, {"a": 1.0}, dict(list(state.items())[1:]), {**state, "more": 0.0}):
        other.restore(wrong)
        assert set(other.values().values()) == {None}
