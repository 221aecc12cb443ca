"""`bench train --profile`: time of a training step by kernel or operator, from torch's profiler.

It lists kernels on CUDA, and operators on a CPU, without the time of the operators they call.
"""

import gzip
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from bert_tools.bench.training_run import TrainingRun
from mlperf_bert.errors import DataError
from mlperf_bert.files import write_file

NUM_STEPS = 3
MOST_ROWS = 20


def profiled(run: TrainingRun, out: Path | None) -> dict[str, Any]:
    """What a step of a warm run is made of, from NUM_STEPS steps.

    With `out`, the trace of one more step is written there: gzipped JSON, for chrome://tracing and
    Perfetto. Raises DataError if it cannot be written, or nothing was recorded.
    """
    device = run.device
    record(lambda: _steps(run, 1), device)  # the first record of a process may lack kernels
    recorded = record(lambda: _steps(run, NUM_STEPS), device)
    if out is not None:
        _write_trace(record(lambda: _steps(run, 1), device), out)
    unit = "kernel" if device.type == "cuda" else "operator"
    return {**tables(recorded, NUM_STEPS, device), "unit_of_work": unit}


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
