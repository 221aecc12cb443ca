"""`bench train --profile`: time of a training step by kernel or operator, from torch's profiler.

It lists kernels on CUDA, and operators on a CPU, without the time of the operators they call.
"""

import gzip
import re
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
MOST_ROWS = 10
OTHER = "other"
# The first pattern found in a name decides its kind; our own kernels' names begin with "_".
_KINDS = (
    ("attention", r"attention|flash|fmha|sdpa|attend"),
    ("matrix product", r"gemm|matmul|addmm|::mm|::bmm|baddbmm|linear|cutlass|nvjet|xmma"),
    (
        "update",
        r"adam|lamb|optim|multi_tensor|clip|norm_squared|^_(moments_and_squares|sum_squares|apply)",
    ),
    ("normalisation", r"layer_?norm|norm"),
    ("loss", r"softmax|nll|cross_entropy"),
    ("copy", r"memcpy|memset|copy|fill|zero|index|gather|scatter|cat|embedding|^_transpose"),
    (
        "elementwise",
        r"elementwise|gelu|dropout|^_keep_bits|^_cast_to_fp8|add|mul|sum|reduce|vectorized",
    ),
)


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
    """Tables of a step: the largest names, times by kind, and time in which nothing ran.

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
    names = [(name, len(us), sum(us)) for name, us in of_name.items()]
    spans = [(each.time_range.start, each.time_range.end) for each in events]
    total = sum(us for _, _, us in names)
    of_kind: dict[str, float] = {}
    for name, _, us in names:
        of_kind[kind_of(name)] = of_kind.get(kind_of(name), 0.0) + us
    whole_us, idle_us = gaps(spans)
    return {
        "steps": num_steps,
        "step_ms": whole_us / 1e3 / num_steps,
        "rows": [
            {
                "name": name,
                "kind": kind_of(name),
                "ms": us / 1e3 / num_steps,
                "share": us / total,
                "calls": calls / num_steps,
            }
            for name, calls, us in sorted(names, key=lambda each: -each[2])[:MOST_ROWS]
        ],
        "kinds": {
            kind: {"ms": us / 1e3 / num_steps, "share": us / total}
            for kind, us in sorted(of_kind.items(), key=lambda pair: -pair[1])
        },
        "calls": len(spans) / num_steps,
        "gap_ms": sum(idle_us) / 1e3 / num_steps,
        "gap_share": sum(idle_us) / whole_us,
        "gaps": len(idle_us) / num_steps,
        "longest_gap_us": max(idle_us, default=0.0),
    }


def kind_of(name: str) -> str:
    """The kind of a kernel or operator, as far as its name tells."""
    lower = name.lower()
    return next((kind for kind, pattern in _KINDS if re.search(pattern, lower)), OTHER)


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


def in_words(result: dict[str, Any]) -> str:
    """What `profiled` found, for people."""
    what = result["unit_of_work"]
    lines = [
        f"{result['step_ms']:.2f} ms a step under the profiler, {result['calls']:.0f} {what}s; "
        f"between them {result['gap_ms']:.2f} ms ({result['gap_share']:.1%}) in "
        f"{result['gaps']:.0f} gaps, the longest {result['longest_gap_us']:.0f} us",
        f"{'ms a step':>9} {'share':>6} {'calls':>6}  kind: {what}",
    ]
    lines += [
        f"{row['ms']:9.3f} {row['share']:6.1%} {row['calls']:6.4g}  {row['kind']}: {row['name']}"
        for row in result["rows"]
    ]
    lines.append("by kind:")
    lines += [
        f"{kind['ms']:9.3f} {kind['share']:6.1%}         {name}"
        for name, kind in result["kinds"].items()
    ]
    return "\n".join(lines)


def _steps(run: TrainingRun, count: int) -> None:
    for number in range(count):
        loss = run(number)
    loss.item()  # the device has finished


def _write_trace(recorded: Any, path: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:  # torch does not report a full disk
        plain = Path(directory) / "trace.json"
        recorded.export_chrome_trace(str(plain))
        write_file(path, gzip.compress(plain.read_bytes()))
