"""`bench train`: rate of our training step, the share of the machine that it uses, its profile."""

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bert_tools.bench.flops import Peak, done_flops, measure_peak, model_flops
from bert_tools.bench.profile import in_words as profile_in_words
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

    `peak_seconds`: length of the long run of matrix products. With `profile` the object lists the
    kernels or operators of a step, and `out` is a file for torch's trace of one. Raises ConfigError
    for `out` without `profile`, DataError if it cannot be written.
    """
    if out is not None:
        if not profile:
            raise ConfigError("--out", "is for --profile", "add --profile, or leave --out away")
        check_writable(out)
    report(f"building on {device}, step {config.run.step_mode}")
    with training_run(config, device, num_updates=NUM_UPDATES) as run:
        milliseconds = timed(run, steps, seconds)
        memory = memory_bytes(device)
        loss = run(len(milliseconds)).item()
        found = profiled(run, out) if profile else None
    report(f"{len(milliseconds)} steps; now the rate of matrix products alone")
    tokens = statistics.fmean(len(batch.input_ids) for update in run.updates for batch in update)
    peak = measure_peak(config.model, round(tokens), device, peak_seconds)
    return {
        "schema_version": 1,
        **rates(run, milliseconds),
        **_utilisation(run, milliseconds, peak),
        "memory_peak_bytes": memory,
        "loss": loss if math.isfinite(loss) else None,
        "profile": found,
        **surroundings(config, device),
    }


def timed(run: TrainingRun, steps: int, seconds: float) -> list[float]:
    """Milliseconds of each measured step, after a warm-up with every update."""
    warm_up = max(3, len(run.updates))
    return time_steps(run, run.device, warm_up=warm_up, steps=steps, seconds=seconds)


def rates(run: TrainingRun, milliseconds: list[float]) -> dict[str, Any]:
    """Sequences and real tokens per second, and the spread of the step times."""
    lengths = [
        length for update in run.host_updates for batch in update for length in batch.lengths
    ]
    seconds = statistics.fmean(milliseconds) / 1e3
    samples = len(lengths) / len(run.host_updates)
    ordered = sorted(milliseconds)
    return {
        "samples_per_s": samples / seconds,
        "tokens_per_s": samples * statistics.fmean(lengths) / seconds,
        "step_ms": statistics.median(milliseconds),
        "step_ms_p10": ordered[len(ordered) // 10],
        "step_ms_p90": ordered[-1 - len(ordered) // 10],
        "steps": len(milliseconds),
        "mean_length": statistics.fmean(lengths),
        "padding_share": run.padding_share,
        "attention": run.model.attention.note,
    }


def _utilisation(run: TrainingRun, milliseconds: list[float], peak: Peak) -> dict[str, Any]:
    """Operations per sequence and per second, by the published count and as done, and MFU."""
    model, num_updates = run.config.model, len(run.updates)
    batches = [batch for update in run.host_updates for batch in update]
    by_formula = sum(
        model_flops(model, batch.lengths, batch.masked_counts).total for batch in batches
    )
    really = sum(done_flops(model, batch).total for update in run.updates for batch in update)
    num_sequences = sum(len(batch.lengths) for batch in batches)
    seconds = num_updates * statistics.fmean(milliseconds) / 1e3
    tflops = by_formula / seconds / 1e12
    return {
        "gflop_per_sequence": by_formula / num_sequences / 1e9,
        "gflop_per_sequence_done": really / num_sequences / 1e9,
        "tflops": tflops,
        "tflops_done": really / seconds / 1e12,
        "mfu": tflops / peak.long_tflops if peak.long_tflops else None,
        "mfu_of_burst": tflops / peak.burst_tflops if peak.burst_tflops else None,
        "peak_dtype": peak.dtype,
        "peak_burst_tflops": peak.burst_tflops,
        "peak_long_tflops": peak.long_tflops,
        "peak_reason": peak.reason,
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


def heading(result: dict[str, Any]) -> str:
    """Heading of the measurement, one line for people."""
    config = result["config"]
    accum = config["parallel"]["grad_accum_steps"]
    return (
        f"{model_in_words(result)}, batch {config['parallel']['local_batch_size']}"
        + (f" x {accum}" if accum > 1 else "")
        + f", step {config['run']['step_mode']}"
    )


def model_in_words(result: dict[str, Any]) -> str:
    """The model and the machine."""
    model = result["config"]["model"]
    where = result["device_name"] or f"{result['device']}, {result['threads']} threads"
    return (
        f"{model['num_layers']} layers, hidden {model['hidden_size']}, {model['precision']}, "
        f"dropout {model['hidden_dropout']:g}, on {where}"
    )


def in_words(result: dict[str, Any]) -> str:
    """The result for people."""
    if result["peak_long_tflops"] is None:
        peak = f"no peak in {result['peak_dtype']} ({result['peak_reason']})"
    else:
        peak = (
            f"MFU {result['mfu']:.1%} of {result['peak_long_tflops']:.3g} TFLOP/s "
            f"({result['peak_dtype']} products, long run), {result['mfu_of_burst']:.1%} of "
            f"{result['peak_burst_tflops']:.3g} (short burst)"
        )
    return "\n".join(
        (
            heading(result),
            f"{result['samples_per_s']:.1f} samples/s, {result['tokens_per_s']:.0f} tokens/s; mean "
            f"length {result['mean_length']:.1f}, padding {result['padding_share']:.2%} of tokens",
            f"step {result['step_ms']:.2f} ms, median of {result['steps']} (tenth "
            f"{result['step_ms_p10']:.2f}, nine tenths {result['step_ms_p90']:.2f})",
            f"{result['tflops']:.3g} TFLOP/s at {result['gflop_per_sequence']:.4g} GFLOP a "
            f"sequence (published count); done {result['gflop_per_sequence_done']:.4g} GFLOP, "
            f"{result['tflops_done']:.3g} TFLOP/s",
            peak,
            f"memory at most {result['memory_peak_bytes'] / 2**20:.0f} MiB, loss {result['loss']}",
            *([profile_in_words(result["profile"])] if result["profile"] else []),
        )
    )
