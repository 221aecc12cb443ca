"""`bench train`, `eval` and `checkpoints`: what they report, and how long they measure."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_cases import CPU, TINY, bench, measured, tiny

from bert_tools.bench import flops
from bert_tools.bench.checkpoints import block
from bert_tools.bench.flops import measure_peak
from bert_tools.bench.synthetic import make_held_out
from bert_tools.bench.timing import FEWEST_STEPS, time_steps
from bert_tools.bench.training_run import ALONE, training_run
from mlperf_bert.checkpoint.manifest import complete_checkpoints, verify
from mlperf_bert.checkpoint.writer import CheckpointWriter
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.data.shards import SampleReader
from support import run_process

BRIEF = ("--steps", "4", "--seconds", "0.01", "--peak-seconds", "0.01")
EVAL = ("--steps", 3, "--seconds", 0.01, "--rounds", 2, "--samples", 48)
PAIRS = ("--pairs", 3, "--steps", 4)
# Stands for an interpreter that has nothing beyond what `tools/gpu_check.sh` asks for.
WITHOUT = """
import sys

sys.modules |= dict.fromkeys(
    ("matplotlib", "safetensors", "rich", "mlperf_logging", "optuna", "transformers", "tokenizers")
)
"""


@pytest.mark.parametrize("step_mode", ["eager", "captured"])
def test_train(step_mode: str) -> None:
    settings = (f"run.step_mode={step_mode}", "parallel.grad_accum_steps=2", "model.num_layers=2")
    result, words, progress = measured("train", *BRIEF, settings=settings)
    for part in ("samples/s", "tokens/s", "TFLOP/s", "MFU", "MiB", "2 layers, hidden 32"):
        assert part in words
    assert "building on cpu" in progress
    assert FEWEST_STEPS <= result["steps"] <= 4
    assert result["step_ms_p10"] <= result["step_ms"] <= result["step_ms_p90"]
    assert result["tokens_per_s"] / result["samples_per_s"] == pytest.approx(result["mean_length"])
    assert result["tflops"] == pytest.approx(
        result["samples_per_s"] * result["gflop_per_sequence"] / 1e3
    )
    assert result["mfu"] == pytest.approx(result["tflops"] / result["peak_long_tflops"])
    assert result["mfu_of_burst"] == pytest.approx(result["tflops"] / result["peak_burst_tflops"])
    assert result["gflop_per_sequence_done"] < result["gflop_per_sequence"]
    assert (result["padding_share"] > 0) == (step_mode == "captured")
    assert result["config"]["run"]["step_mode"] == step_mode
    assert result["config"]["parallel"]["grad_accum_steps"] == 2
    assert result["loss"] > 0


def test_steps_behind_the_last_learning_rate_begin_again() -> None:
    config = tiny("run.max_steps=2", "optim.learning_rate=1e-3")
    with training_run(config, CPU, num_updates=1) as run:
        losses = [run(number).item() for number in range(5)]
    assert losses[-1] < losses[0]


def test_a_peak_that_cannot_be_measured_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError("no such product\nstack")

    monkeypatch.setattr(flops, "_products", refuse)
    found = measure_peak(ModelSection(precision="bf16"), 128, CPU, 0.01)
    assert (found.dtype, found.burst_tflops, found.long_tflops) == ("bfloat16", None, None)
    assert found.reason == "no such product"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_peak_of_each_dtype(precision: Any) -> None:
    model = ModelSection(hidden_size=32, intermediate_size=64, precision=precision)
    threads = torch.get_num_threads()
    found = measure_peak(model, 100, CPU, 0.01)
    assert torch.get_num_threads() == threads
    if found.reason is None:
        assert found.burst_tflops and found.burst_tflops > 0
        assert found.long_tflops and found.long_tflops > 0
    else:
        assert precision == "fp8"  # of which a processor may have none


def test_steps_are_timed_in_order_and_not_for_longer_than_asked() -> None:
    numbers: list[int] = []

    def run(number: int) -> torch.Tensor:
        numbers.append(number)
        return torch.zeros(())

    assert len(time_steps(run, CPU, warm_up=2, steps=5, seconds=60.0)) == 5
    assert numbers == list(range(7))
    assert len(time_steps(run, CPU, warm_up=2, steps=5, seconds=1e-12)) == FEWEST_STEPS
    assert all(ms >= 0 for ms in time_steps(run, CPU, warm_up=1, steps=5, seconds=60.0))


def test_train_profile_and_eval_need_few_packages(tmp_path: Path) -> None:
    """All in one process, as importing torch takes most of the time."""
    model = [word for each in TINY for word in ("--set", each)]
    forms = [
        ["train", *model, *BRIEF],
        ["profile", *model, "--steps", "1", "--out", str(tmp_path / "step.json.gz")],
        ["eval", *model, *BRIEF[:4], "--samples", "8", "--rounds", "1"],
    ]
    script = tmp_path / "forms.py"
    script.write_text(
        f"""{WITHOUT}
from mlperf_bert.__main__ import main

for form in {forms}:
    assert main(["bench", *form, "--json", "--device", "cpu"]) == 0
""",
        encoding="utf-8",
    )
    done = run_process(sys.executable, script)
    assert done.returncode == 0, done.stderr
    assert len([json.loads(line) for line in done.stdout.splitlines()]) == len(forms)


@pytest.mark.parametrize("step_mode", ["eager", "captured"])
def test_shares_follow_from_the_rates(step_mode: str) -> None:
    settings = (f"run.step_mode={step_mode}",)
    result, words, progress = measured("eval", *EVAL, settings=settings)
    assert result["num_samples"] == 48
    assert result["interval_samples"] == 150_000  # MLPerf's formula at a global batch of 4
    assert result["floor_share"] == pytest.approx(48 / 3 / 150_000)
    training_s = 150_000 / result["train_samples_per_s"]
    assert result["share_of_training"] == pytest.approx(result["evaluation_s"] / training_s)
    assert result["share_of_run"] == pytest.approx(
        result["evaluation_s"] / (result["evaluation_s"] + training_s)
    )
    assert result["evaluation_samples_per_s"] == pytest.approx(48 / result["evaluation_s"])
    assert "of a run" in words
    assert progress.count("evaluation ") == 3


def test_held_out_set_fits_the_config(tmp_path: Path) -> None:
    config = tiny()
    index = make_held_out(tmp_path, config, 48)
    assert index.manifest.num_samples == 48
    assert index.manifest.vocab_size == config.model.vocab_size
    samples = SampleReader(tmp_path, index.manifest).read(np.arange(48))
    np.testing.assert_array_equal(samples.lengths, index.lengths)
    assert samples.lengths.max() <= config.data.max_seq_length
    assert samples.input_ids.max() < config.model.vocab_size


def test_ratios_follow_from_the_blocks(tmp_path: Path) -> None:
    result, words, progress = measured("checkpoints", *PAIRS, "--out", tmp_path)
    assert result["steps_per_block"] == 4
    ratios = sorted(pair["with_s"] / pair["without_s"] for pair in result["pairs"])
    assert len(ratios) == 3
    assert [result[f"{name}_ratio"] for name in ("lowest", "median", "highest")] == ratios
    for pair in result["pairs"]:
        assert 0 < pair["paused_s"] + pair["waited_s"] < pair["with_s"]
    assert result["checkpoint_bytes"] > 3 * 4 * 104 * 32  # word embedding and its two moments
    assert list(tmp_path.iterdir()) == []
    assert words.count("\npair ") == progress.count("pair ") == 3
    assert "median ratio" in words and "1 layers, hidden 32" in words


def test_a_block_leaves_the_checkpoint_of_its_middle(tmp_path: Path) -> None:
    config = tiny()
    with training_run(config, CPU, num_updates=2) as run:
        writer = CheckpointWriter(tmp_path, run.optimizer, config, ALONE, CPU, keep_last=1)
        block(run, 0, 3, None)
        assert complete_checkpoints(tmp_path) == []
        block(run, 3, 5, writer)
        (found,) = complete_checkpoints(tmp_path)
        assert verify(found).step == 3 + 2


def test_a_directory_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="--out: No such file"):
        bench("checkpoints", "--out", "/nonexistent")
