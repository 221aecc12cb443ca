"""`bench train`: rate of our training step, the share of the machine that it uses, its profile.

A profile is the step's time by kernel on CUDA, and by operator on a CPU, without the time of the
operators that it calls, from torch's profiler.
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
from mlperf_bert.run.metrics import memory_bytes

NUM_UPDATES = 4  # distinct ones; each is measured several times
PROFILED_STEPS = 3
MOST_ROWS = 20  # of a profile


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


def profiled(run: TrainingRun, out: Path | None) -> dict[str, Any]:
    """What a step of a warm run is made of, from PROFILED_STEPS steps.

    With `out`, the trace of one more step is written there: gzipped JSON, for chrome://tracing and
    Perfetto. Raises DataError if it cannot be written, or nothing was recorded.
    """
    device = run.device
    record(lambda: _steps(run, 1), device)  # the first record of a process may lack kernels
    recorded = record(lambda: _steps(run, PROFILED_STEPS), device)
    if out is not None:
        _write_trace(record(lambda: _steps(run, 1), device), out)
    unit = "kernel" if device.type == "cuda" else "operator"
    return {**tables(recorded, PROFILED_STEPS, device), "unit_of_work": unit}


def record(run: Callable[[], None], device: torch.device) -> Any:
    """The profile of everything that `run` does on `device`."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize(device)
    # Of CUDA alone, records have come back empty.
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profiler(activities=activities) as found:
        run()
        if is_cuda:
            torch.cuda.synchronize(device)
    return found


def tables(recorded: Any, num_steps: int, device: torch.device) -> dict[str, Any]:
    """The largest names of a step, and the time in which nothing ran.

    Raises DataError if nothing was recorded.
    """
    is_cuda = device.type == "cuda"
    wanted = DeviceType.CUDA if is_cuda else DeviceType.CPU
    events = [
        event
        for event in recorded.events() or ()
        if event.device_type == wanted and not getattr(event, "is_user_annotation", False)
    ]
    if not events:
        raise DataError("torch's profiler", "recorded no kernel", "start it once more")
    of_name: dict[str, list[float]] = {}
    for each in events:
        own_us = each.time_range.elapsed_us() if is_cuda else each.self_cpu_time_total
        of_name.setdefault(each.name, []).append(own_us)
    total = sum(map(sum, of_name.values()))
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
            for name, us in sorted(of_name.items(), key=lambda each: -sum(each[1]))[:MOST_ROWS]
        ],
        "calls": len(events) / num_steps,
        "gap_share": sum(idle_us) / whole_us,
        "gaps": len(idle_us) / num_steps,
        "longest_gap_us": max(idle_us, default=0.0),
    }


def gaps(spans: Sequence[tuple[float, float]]) -> tuple[float, list[float]]:
    """Time from the first start to the last end, and each stretch in which nothing ran.

    `spans` are starts and ends, at least one, on any streams and threads.
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
    loss.item()  # the device has finished


def _write_trace(recorded: Any, path: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:  # torch does not report a full disk
        plain = Path(directory) / "trace.json"
        recorded.export_chrome_trace(str(plain))
        write_file(path, gzip.compress(plain.read_bytes()))
