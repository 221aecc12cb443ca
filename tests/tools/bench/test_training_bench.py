"""`bench train` and its parts: what they report, and what a config or options make of it."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_tools.bench import cli, peak
from bert_tools.bench.peak import measure_peak
from bert_tools.bench.run_options import make_config
from bert_tools.bench.train import FEWEST_STEPS, time_steps
from bert_tools.bench.training_run import training_run
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.sections import ModelSection
from support import CONFIGS, run_process

CPU = torch.device("cpu")
MODEL = (
    *("--layers", "2", "--hidden", "32", "--heads", "2", "--vocab", "101", "--max-length", "32"),
    *("--batch", "4", "--threads", "1", "--device", "cpu"),
)
BRIEF = ("--steps", "4", "--seconds", "0.01", "--peak-seconds", "0.01")
# Stands for an interpreter that has nothing beyond what `tools/gpu_check.sh` asks for.
WITHOUT = """
import sys

sys.modules |= dict.fromkeys(
    ("matplotlib", "safetensors", "rich", "mlperf_logging", "optuna", "transformers", "tokenizers")
)
"""
CPU_TINY = str(CONFIGS / "cpu_tiny.toml")


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(arguments)


def bench(*arguments: str) -> int:
    return cli.run(parse(*arguments))


@pytest.mark.parametrize("step_mode", ["eager", "captured"])
def test_json_of_options(step_mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("train", *MODEL, *BRIEF, "--step-mode", step_mode, "--accum", "2", "--json") == 0
    printed = capsys.readouterr()
    result: dict[str, Any] = json.loads(printed.out)
    assert result["schema_version"] == 1
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
    assert "building on cpu" in printed.err


def test_words_name_the_rates(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("train", *MODEL, *BRIEF) == 0
    words = capsys.readouterr().out
    for part in ("samples/s", "tokens/s", "TFLOP/s", "MFU", "MiB", "2 layers, hidden 32"):
        assert part in words


def test_a_config_is_measured_as_one_of_its_ranks() -> None:
    args = parse("train", "--config", CPU_TINY, "--set", "model.num_layers=1", "--seed", "7")
    config = make_config(args)
    assert config.parallel.world_size == 1
    assert config.parallel.local_batch_size == 16
    assert config.model.num_layers == 1
    assert config.run.seed == 7


def test_steps_behind_the_last_learning_rate_begin_again() -> None:
    args = parse(
        "train", "--config", CPU_TINY, "--set", "run.max_steps=2", "--set", "optim.name=lamb"
    )
    with training_run(make_config(args), CPU, num_updates=1) as run:
        losses = [run(number).item() for number in range(5)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layers", "2"), "--hidden: is missing"),
        (("--hidden", "32"), "--layers: is missing"),
        (("--config", CPU_TINY, "--layers", "2"), "--layers: is given beside --config"),
        (("--config", CPU_TINY, "--dropout", "0"), "--dropout: is given beside --config"),
        (("--config", CPU_TINY, "--attention", "auto"), "--attention: is given beside"),
        ((*MODEL, "--set", "run.seed=1"), "--set: is given without --config"),
        ((*MODEL, "--attention", "none"), "model.attention: is 'none'"),
        ((*MODEL, "--precision", "fp12"), "model.precision: is 'fp12'"),
        ((*MODEL, "--batch", "0"), "--batch: is 0"),
        ((*MODEL, "--steps", "0"), "--steps: is 0"),
        ((*MODEL, "--seconds", "0"), "--seconds: is 0"),
        ((*MODEL, "--peak-seconds", "0"), "--peak-seconds: is 0"),
        ((*MODEL, "--dropout", "1"), "model.hidden_dropout: is 1"),
        ((*MODEL, "--heads", "5"), "model.num_heads: 5 does not divide"),
    ],
)
def test_options_that_cannot_be(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench("train", *arguments)


def test_a_peak_that_cannot_be_measured_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError("no such product\nstack")

    monkeypatch.setattr(peak, "_products", refuse)
    found = measure_peak(ModelSection(precision="bf16"), 128, CPU, 0.01)
    assert (found.dtype, found.burst_tflops, found.long_tflops) == ("bfloat16", None, None)
    assert found.reason == "no such product"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_peak_of_each_dtype(precision: Any) -> None:
    model = ModelSection(hidden_size=32, intermediate_size=64, precision=precision)
    found = measure_peak(model, 100, CPU, 0.01)
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


def test_config_of_another_machine_size_needs_no_renaming() -> None:
    path = str(CONFIGS / "h100_1x8x96x1.toml")
    config = make_config(parse("train", "--config", path, "--set", "parallel.local_batch_size=4"))
    assert config.parallel.global_batch_size == 4


def test_train_profile_and_eval_need_few_packages(tmp_path: Path) -> None:
    """All in one process, as importing torch takes most of the time."""
    forms = [
        ["train", *MODEL, *BRIEF],
        ["profile", *MODEL, "--steps", "1"],
        ["eval", *MODEL, *BRIEF[:4], "--samples", "8", "--rounds", "1"],
    ]
    script = tmp_path / "forms.py"
    script.write_text(
        f"""{WITHOUT}
from mlperf_bert.__main__ import main

for form in {forms}:
    assert main(["bench", *form, "--json"]) == 0
""",
        encoding="utf-8",
    )
    done = run_process(sys.executable, script)
    assert done.returncode == 0, done.stderr
    assert len([json.loads(line) for line in done.stdout.splitlines()]) == len(forms)
