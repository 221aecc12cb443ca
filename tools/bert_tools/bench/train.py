"""The measurement of `bench train`, which times and, on request, profiles a training step.

The profile comes from torch's profiler. It lists the time of each kernel on CUDA, and of each
operator on a CPU. The time of an operator excludes the time of the operators that it calls.
"""

import gzip
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from bert_tools.bench.flops import measure_peak, model_flops, peak_dtype
from bert_tools.bench.timing import time_steps
from bert_tools.bench.training_run import TrainingRun, training_run
from mlperf_bert.config.files import config_to_tables
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.errors import ConfigError, DataError
from mlperf_bert.files import check_writable, write_file
from mlperf_bert.run.console import ProgressLines
from mlperf_bert.run.metrics import memory_bytes

NUM_UPDATES = 4  # distinct updates, each of which is measured several times
PROFILED_STEPS = 3
MOST_ROWS = 20  # in a profile


def measure(
    config: RunConfig,
    device: torch.device,
    progress: ProgressLines,
    *,
    steps: int,
    seconds: float,
    peak_seconds: float,
    profile: bool,
    out: Path | None,
) -> dict[str, Any]:
    """Measure our training step, and return the JSON object of `bench train`.

    Args:
        config: the config to measure, on one rank.
        device: the device to measure.
        progress: shows the user what is being measured.
        steps: largest number of steps to measure, but each update is measured at least once.
        seconds: approximate time for measuring steps, in seconds.
        peak_seconds: time for measuring matrix products, in seconds.
        profile: whether to list the kernels or operators of a step.
        out: file for torch's trace of one step, which needs `profile`.

    Raises:
        ConfigError: `out` is given without `profile`.
        DataError: `out` cannot be written.
    """
    if out is not None:
        if not profile:
            raise ConfigError("--out", "needs --profile", "add --profile or remove --out")
        check_writable(out)
    progress.line(f"building the model on {device} (step {config.run.step_mode})")
    with training_run(config, device, num_updates=NUM_UPDATES) as run:
        count, step_ms = time_steps(
            run, num_updates=NUM_UPDATES, steps=steps, seconds=seconds, progress=progress
        )
        memory = memory_bytes(device)
        loss = run(count).item()
        if profile:
            progress.line("profiling a few steps")
        found = profiled(run, out) if profile else None
    progress.line(f"measuring matrix products (about {peak_seconds:.0f} s)")
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
    """Return the rates of a run whose step takes `step_ms` milliseconds.

    The result contains sequences, real tokens and TFLOP per second, and also TFLOP per sequence,
    the mean length, the share of padding, and the kind of attention.
    """
    batches = [batch for update in run.host_updates for batch in update]
    lengths = [length for batch in batches for length in batch.lengths]
    flops = sum(
        model_flops(run.config.model, batch.lengths, batch.masked_counts).total for batch in batches
    )
    per_s = 1e3 / step_ms / len(run.host_updates)  # passes over all updates per second
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
    """Return the config that was measured, and the device and torch version that ran it."""
    is_cuda = device.type == "cuda"
    return {
        "config": config_to_tables(config),
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if is_cuda else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def profiled(run: TrainingRun, out: Path | None) -> dict[str, Any]:
    """Profile PROFILED_STEPS steps of a run that has been warmed up, and return the tables.

    If `out` is given, the trace of one more step is written to this file, as gzipped JSON for
    chrome://tracing and Perfetto. Raises DataError if `out` cannot be written, or if torch recorded
    nothing.
    """
    device = run.device
    # The first recording of a process may lack kernels, so it is not used.
    record(lambda: _steps(run, 1), device)
    recorded = record(lambda: _steps(run, PROFILED_STEPS), device)
    if out is not None:
        _write_trace(record(lambda: _steps(run, 1), device), out)
    unit = "kernel" if device.type == "cuda" else "operator"
    return {**tables(recorded, PROFILED_STEPS, device), "unit_of_work": unit}


def record(run: Callable[[], None], device: torch.device) -> Any:
    """Call `run`, and return torch's profile of the work that it does on `device`."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize(device)
    # Recording only CUDA activity has returned empty profiles.
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profiler(activities=activities) as found:
        run()
        if is_cuda:
            torch.cuda.synchronize(device)
    return found


def tables(recorded: Any, num_steps: int, device: torch.device) -> dict[str, Any]:
    """Return the kernels or operators that took the most time, and the gaps in which none ran.

    `recorded` is torch's profile of `num_steps` steps. Raises DataError if it is empty.
    """
    is_cuda = device.type == "cuda"
    wanted = DeviceType.CUDA if is_cuda else DeviceType.CPU
    events = [
        event
        for event in recorded.events() or ()
        if event.device_type == wanted and not getattr(event, "is_user_annotation", False)
    ]
    if not events:
        raise DataError("torch's profiler", "recorded no kernel", "run the command again")
    times_us: dict[str, list[float]] = {}
    for each in events:
        own_us = each.time_range.elapsed_us() if is_cuda else each.self_cpu_time_total
        times_us.setdefault(each.name, []).append(own_us)
    total = sum(map(sum, times_us.values()))
    whole_us, idle_us = gaps([(each.time_range.start, each.time_range.end) for each in events])
    return {
        "steps": num_steps,
        "step_ms": whole_us / 1e3 / num_steps,
        "rows": [
            {
                "name": name,
                "ms": sum(us) / 1e3 / num_steps,
                "share": sum(us) / total,
                "calls": len(us) / num_steps,
            }
            for name, us in sorted(times_us.items(), key=lambda each: -sum(each[1]))[:MOST_ROWS]
        ],
        "calls": len(events) / num_steps,
        "gap_share": sum(idle_us) / whole_us,
        "gaps": len(idle_us) / num_steps,
        "longest_gap_us": max(idle_us, default=0.0),
    }


def gaps(spans: Sequence[tuple[float, float]]) -> tuple[float, list[float]]:
    """Return the total time of some spans, and the length of each gap in which nothing ran.

    The total is the time from the first start to the last end. `spans` has at least one pair of
    start and end. The spans may overlap and be in any order.
    """
    idle = []
    ordered = sorted(spans)
    end = ordered[0][1]
    for start, stop in ordered:
        if start > end:
            idle.append(start - end)
        end = max(end, stop)
    return end - ordered[0][0], idle


def _steps(run: TrainingRun, count: int) -> None:
    for number in range(count):
        loss = run(number)
    loss.item()  # waits until the device has finished


def _write_trace(recorded: Any, path: Path) -> None:
    # Unlike torch's export, `write_file` reports that the disk of `path` is full.
    with tempfile.TemporaryDirectory() as directory:
        plain = Path(directory) / "trace.json"
        recorded.export_chrome_trace(str(plain))
        write_file(path, gzip.compress(plain.read_bytes()))
