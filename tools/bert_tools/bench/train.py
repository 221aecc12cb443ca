"""`bench train`: rate of our training step, the share of the machine that it uses, its profile."""

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bert_tools.bench.flops import measure_peak, model_flops, peak_dtype
from bert_tools.bench.profile import profiled
from bert_tools.bench.timing import time_steps
from bert_tools.bench.training_run import TrainingRun, training_run
from mlperf_bert.config.files import config_to_tables
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.errors import ConfigError
from mlperf_bert.files import check_writable
from mlperf_bert.run.metrics import memory_bytes

NUM_UPDATES = 4  # distinct ones; each is measured several times


def measure(
    config: RunConfig,
    device: torch.device,
    report: Callable[[str], None],
    *,
    steps: int,
    seconds: float,
    peak_seconds: float,
    profile: bool,
    out: Path | None,
) -> dict[str, Any]:
    """The JSON object of `bench train`, from at most `steps` steps in about `seconds`.

    `peak_seconds`: length of the run of matrix products. With `profile` the object lists the
    kernels or operators of a step, and `out` is a file for torch's trace of one. Raises ConfigError
    for `out` without `profile`, DataError if it cannot be written.
    """
    if out is not None:
        if not profile:
            raise ConfigError("--out", "is for --profile", "add --profile, or leave --out away")
        check_writable(out)
    report(f"building on {device}, step {config.run.step_mode}")
    with training_run(config, device, num_updates=NUM_UPDATES) as run:
        warm_up = max(3, len(run.updates))  # with every update
        count, step_ms = time_steps(run, warm_up=warm_up, steps=steps, seconds=seconds)
        memory = memory_bytes(device)
        loss = run(count).item()
        found = profiled(run, out) if profile else None
    report(f"{count} steps; now the rate of matrix products alone")
    tokens = statistics.fmean(len(batch.input_ids) for update in run.updates for batch in update)
    peak, peak_reason = measure_peak(config.model, round(tokens), device, peak_seconds)
    rates = rates_of(run, step_ms)
    return {
        "schema_version": 2,
        **rates,
        "steps": count,
        "step_ms": step_ms,
        "mfu": rates["tflops"] / peak if peak else None,
        "peak_dtype": str(peak_dtype(config.model)).removeprefix("torch."),
        "peak_tflops": peak,
        "peak_reason": peak_reason,
        "memory_peak_bytes": memory,
        "loss": loss if math.isfinite(loss) else None,
        "profile": found,
        **surroundings(config, device),
    }


def rates_of(run: TrainingRun, step_ms: float) -> dict[str, Any]:
    """Sequences, real tokens and operations per second."""
    batches = [batch for update in run.host_updates for batch in update]
    lengths = [length for batch in batches for length in batch.lengths]
    flops = sum(
        model_flops(run.config.model, batch.lengths, batch.masked_counts).total for batch in batches
    )
    per_s = 1e3 / step_ms / len(run.host_updates)  # of all updates
    return {
        "samples_per_s": len(lengths) * per_s,
        "tokens_per_s": sum(lengths) * per_s,
        "tflops": flops * per_s / 1e12,
        "gflop_per_sequence": flops / len(lengths) / 1e9,
        "mean_length": statistics.fmean(lengths),
        "padding_share": run.padding_share,
        "attention": run.model.attention.note,
    }


def surroundings(config: RunConfig, device: torch.device) -> dict[str, Any]:
    """The question asked, and the machine."""
    is_cuda = device.type == "cuda"
    return {
        "config": config_to_tables(config),
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if is_cuda else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
