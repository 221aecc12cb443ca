"""The memory plan beside a process's peak; what is refused, and what the command prints."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bert_tools.bench import training_run as bench_run
from bert_tools.bench.training_run import run_updates
from bert_tools.plan.buckets import parameter_shapes
from mlperf_bert.__main__ import main
from mlperf_bert.common.errors import MISTAKE, ConfigError
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.parts.build import check_memory
from mlperf_bert.parts.memory_plan import (
    GIB,
    USABLE_OF_NAMED,
    expected_forward,
    forward_of_lengths,
    largest_batch,
    plan_memory,
    refuse_what_cannot_fit,
)
from support import CONFIGS, run_process

CPU = torch.device("cpu")
LARGE = ModelSection(precision="bf16")
NAMED_80, NAMED_141 = 80 * USABLE_OF_NAMED, 141 * USABLE_OF_NAMED


def of_large(*changes: str) -> RunConfig:
    """BERT-large, captured, 448 sequences in closed division, with changes."""
    settings = ("mlperf.enforce_rules=false", *changes)
    return load_config(CONFIGS / "h200_1x1x448x1.toml", settings)


_STEPS = """
import gc, re, sys
import torch
from pathlib import Path
from bert_tools.bench.training_run import training_run
from mlperf_bert.config.files import load_config

def kilobytes(name):
    return int(re.search(rf"^{name}:\\s+(\\d+) kB", Path("/proc/self/status").read_text(), re.M)[1])

def run(*changes):
    config = load_config(Path(sys.argv[1]), sys.argv[2:] + list(changes))
    with training_run(config, torch.device("cpu"), num_updates=2) as run:
        for number in range(2):
            run(number)

run("parallel.local_batch_size=1")
gc.collect()
before = kilobytes("VmRSS")
run()
print(1024 * (kilobytes("VmHWM") - before))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_of_a_process_is_as_planned() -> None:
    settings = (
        *("run.device=cpu", "run.seed=1", "run.warm_up_steps=0", "parallel.ranks_per_node=1"),
        *("model.hidden_size=256", "model.num_heads=4", "model.intermediate_size=1024"),
        *("model.hidden_dropout=0.1", "model.attention_dropout=0.1"),
        "parallel.local_batch_size=256",
    )
    config = load_config(CONFIGS / "cpu_tiny.toml", settings)
    # Every block that is freed goes back to the system, so the peak is that of the tensors.
    environ = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    command = (sys.executable, "-c", _STEPS, CONFIGS / "cpu_tiny.toml", *settings)
    done = run_process(*command, **environ)
    assert done.returncode == 0, done.stderr
    forwards = [
        forward_of_lengths(config, np.array(batch.lengths), np.array(batch.masked_counts))
        for (batch,) in run_updates(config, 2)
    ]
    planned = max(plan_memory(config, each, evaluates=False).num_bytes for each in forwards)
    assert planned == pytest.approx(int(done.stdout), rel=0.15)


@pytest.mark.parametrize(
    ("architecture", "objective"), [("bert", "mlm_nsp"), ("bert", "mlm"), ("modern", "mlm")]
)
def test_parameters_are_counted(architecture: Any, objective: Any) -> None:
    model = replace(LARGE, architecture=architecture, objective=objective)
    shapes = parameter_shapes(model).values()
    assert model.num_parameters == sum(torch.Size(shape).numel() for shape in shapes)


def test_448_sequences_are_refused_on_80_gb_and_not_on_141() -> None:
    config = of_large()
    forward = expected_forward(config)
    with pytest.raises(ConfigError, match=r"parallel\.local_batch_size") as refused:
        refuse_what_cannot_fit(config, forward, NAMED_80)
    line = str(refused.value)
    assert "79.0 GiB" in line
    assert f"the largest that fits is {largest_batch(config, forward, NAMED_80)}" in line
    assert "224 with parallel.grad_accum_steps 2" in line
    refuse_what_cannot_fit(config, forward, NAMED_141)


MODERN = ("model.architecture=modern", "model.objective=mlm", "model.num_layers=22")
BASE = ("model.hidden_size=768", "model.num_heads=12", "model.intermediate_size=1152")


@pytest.mark.parametrize("precision", ["bf16", "bf16_autocast", "fp8"])
def test_modernbert_fits_where_berts_of_its_size_do(precision: str) -> None:
    """It has fewer bytes a token than BERT-base of 22 layers, whose feed-forward half is wider."""
    sizes = []
    for changes in ((*MODERN, *BASE), (*MODERN[1:], *BASE[:2], "model.intermediate_size=3072")):
        config = of_large(*changes, f"model.precision={precision}")
        sizes.append(plan_memory(config, expected_forward(config)).num_bytes)
    assert 0.5 * sizes[1] < sizes[0] < sizes[1]


def test_where_not_one_sequence_fits() -> None:
    with pytest.raises(ConfigError, match="not one sequence fits"):
        refuse_what_cannot_fit(of_large(), expected_forward(of_large()), 4 * GIB)


@pytest.mark.parametrize(
    "stem", ["h100_1x1x112x4", "h100_1x1x256x1", "h100_1x8x96x1", "dgxa100_128x8x4x1"]
)
def test_shipped_configs_fit_with_their_margin(stem: str) -> None:
    config = load_config(CONFIGS / f"{stem}.toml")
    forward = expected_forward(config)
    assert plan_memory(config, forward).with_margin <= NAMED_80
    # With unequal counts a forward may have far more sequences than the mean, not more tokens.
    assert config.parallel.local_batch_size <= largest_batch(config, forward, NAMED_80) < 400


def test_the_largest_batch_is_the_same_from_any_batch() -> None:
    found = []
    for size in (112, 256, 448):
        config = of_large(f"parallel.local_batch_size={size}")
        found.append(largest_batch(config, expected_forward(config), NAMED_80))
    assert max(found) <= 1.06 * min(found)


@pytest.mark.parametrize(
    ("changes", "less"),
    [
        (("model.precision=fp8",), True),
        (("model.head=chunked",), True),
        (("data.sampler=quantile",), True),
        (("eval.overlap=side_stream",), False),
        (("run.step_mode=eager",), False),  # its warm-up has full-length sequences
    ],
)
def test_what_takes_less_and_what_more(changes: tuple[str, ...], *, less: bool) -> None:
    sizes = []
    for config in (of_large(), of_large(*changes)):
        sizes.append(plan_memory(config, expected_forward(config)).num_bytes)
    assert (sizes[1] < sizes[0]) == less


def parts(*changes: str) -> dict[str, int]:
    config = of_large(*changes)
    plan = plan_memory(config, expected_forward(config))
    return {part.name: part.num_bytes for part in plan.parts}


def test_the_noise_meter_keeps_a_gradient_where_an_update_has_one_forward() -> None:
    measured = ("run.step_mode=eager", "run.noise_interval_steps=10")
    assert parts(*measured)["noise meter"] == 4 * of_large().model.num_parameters
    assert "noise meter" not in parts(*measured, "parallel.grad_accum_steps=2")
    assert "noise meter" not in parts("run.step_mode=eager")


def test_shards_divide_masters_and_moments() -> None:
    ranks = ("parallel.ranks_per_node=8", "parallel.local_batch_size=56")
    whole, cut = parts(*ranks), parts(*ranks, "parallel.data_parallel=shard_world")
    for name in ("fp32 masters", "moments"):
        assert cut[name] == pytest.approx(whole[name] / 8, rel=1e-6)


def test_the_command_prints_parts_sum_and_largest_batch(capsys: pytest.CaptureFixture[str]) -> None:
    command = ("plan", "memory", "--config", str(CONFIGS / "h100_1x1x256x1.toml"))
    assert main([*command, "--device-memory", "80", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert sum(part["num_bytes"] for part in answer["parts"]) == answer["bytes"]
    assert answer["sequences"] == 256 <= answer["largest_batch"]
    assert main([*command, "--device-memory", "80"]) == 0
    words = capsys.readouterr().out
    assert "34.1 KB a token" in words
    assert f"at most {answer['largest_batch']}" in words
    assert main([*command, "--device-memory", "0"]) == MISTAKE


def test_a_gpu_that_is_too_small_is_found_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    properties = SimpleNamespace(total_memory=NAMED_80)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    config = of_large()
    with pytest.raises(ConfigError, match=r"parallel\.local_batch_size"):
        check_memory(config, torch.device("cuda"), lambda: expected_forward(config))
    check_memory(config, CPU, lambda: pytest.fail("a CPU has room for this model"))


def test_a_benchmark_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def small_gpu(config: RunConfig, _: object, largest: Any, *, evaluates: bool) -> None:
        refuse_what_cannot_fit(config, largest(), GIB, evaluates=evaluates)

    monkeypatch.setattr(bench_run, "check_memory", small_gpu)
    monkeypatch.setattr(bench_run, "make_model", lambda *_: pytest.fail("was built"))
    config = of_large("parallel.local_batch_size=16", "run.seed=1")
    with pytest.raises(ConfigError, match=r"parallel\.local_batch_size"):  # noqa: SIM117
        with bench_run.training_run(config, CPU, num_updates=1):
            pytest.fail("runs")


def test_out_of_memory_is_one_line_that_names_the_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: object) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")

    monkeypatch.setattr("bert_tools.bench.cli.run", full)
    assert main(["bench", "train"]) == MISTAKE
    (line,) = capsys.readouterr().err.splitlines()
    assert "bench train: out of memory" in line and "9 GiB" in line and "plan memory" in line
