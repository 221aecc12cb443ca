"""Resources of a run: processor or GPU time, memory, and the model's floating-point operations.

Shape letters: L tokens of a window, D hidden.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from bert_tools.bench.flops import PASSES, PER_MULTIPLY_ADD, model_flops
from bert_tools.common.nvml import nvml_handle
from mlperf_bert.common.machine import usable_cpus
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.run.metrics import memory_bytes

SAMPLE_S = 0.1  # seconds between two queries of NVML, which averages over 0.17 to 1 s


@contextmanager
def measured_usage(device: torch.device) -> Iterator[dict[str, Any]]:
    """Resources that this rank uses within; filled in at the end, as JSON can hold it.

    `utilisation` is 0 .. 1. On a CPU: processor seconds of all threads of the process over wall
    seconds, divided by the threads that the rank computes with. On a GPU: the mean of NVML's
    utilisation, the share of time in which any kernel ran; a GPU with one busy processor counts as
    used. None if NVML does not report it; `means` says which. `cpus` are the logical CPUs that the
    rank may run on, its own ones if it is bound. `core_wait_seconds` is the time, summed over its
    threads, that they were ready and had no core; None if the system does not count it. Beside them
    stand `cpu_seconds` and `peak_memory_bytes`.
    """
    usage: dict[str, Any] = {}
    on_gpu = device.type == "cuda"
    found = nvml_handle(device.index or 0) if on_gpu else None
    samples: list[float] = []
    with sampled_by_nvml(*found, samples) if found else nullcontext():
        waited_before = core_wait_seconds()
        cpu_begun, begun = time.process_time(), time.perf_counter()
        yield usage
        wall, cpu = time.perf_counter() - begun, time.process_time() - cpu_begun
    utilisation: float | None = sum(samples) / len(samples) if samples else None
    if not on_gpu:
        # Library threads may take the sum a little above 1.
        utilisation = min(1.0, cpu / wall / torch.get_num_threads()) if wall > 0 else 0.0
    waited = core_wait_seconds()
    is_known = waited is not None and waited_before is not None
    usage |= {
        "cpu_seconds": cpu,
        "utilisation": utilisation,
        "means": "NVML utilisation" if on_gpu else "process CPU time over wall time",
        "peak_memory_bytes": memory_bytes(device),
        "cpus": sorted(usable_cpus()),
        "core_wait_seconds": max(0.0, (waited or 0) - (waited_before or 0)) if is_known else None,
    }


@contextmanager
def sampled_by_nvml(
    nvml: Any, handle: Any, samples: list[float], interval_s: float = SAMPLE_S
) -> Iterator[None]:
    """Sample a GPU's utilisation, 0 .. 1, into `samples` from a thread.

    Adds nothing if NVML reports none. `nvml` is the module `pynvml`, `handle` the GPU's.
    """
    ended = threading.Event()

    def sample() -> None:
        with suppress(Exception):  # NVML's own errors: this GPU does not report it
            while True:
                samples.append(nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
                if ended.wait(interval_s):
                    return

    thread = threading.Thread(target=sample, name="nvml", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def core_wait_seconds(tasks: Path = Path("/proc/self/task")) -> float | None:
    """Seconds that the process's present threads have waited for a core so far.

    Source: the second number of Linux's `schedstat`, in nanoseconds; None if there is none.
    """
    waited = 0
    try:
        for task in tasks.iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
                waited += int((task / "schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return waited / 1e9 if waited else None


def squad_flops(model: ModelSection, lengths: Sequence[float]) -> float:
    """Operations of forward and backward over windows of these lengths, by the published count.

    Matrix products only, all layers whole, no padding: 24 D^2 + 4 D L per token of a window of L in
    a layer whose feed-forward part is 4 D wide, and 4 D for the span head, three times each.
    (ModernBERT's as `model_flops` counts them.)
    """
    return encoder_flops(model, lengths) + span_head_flops(model, sum(lengths))


def encoder_flops(model: ModelSection, lengths: Sequence[float]) -> float:
    """The part of `squad_flops` in the layers."""
    flops = model_flops(model, lengths, [0] * len(lengths))
    return flops.encoder + flops.attention


def span_head_flops(model: ModelSection, num_tokens: float) -> float:
    """The part of `squad_flops` in the scores; ModernBERT's are of a projection of [D, D]."""
    columns = 2 + (model.hidden_size if model.architecture == "modern" else 0)
    return PASSES * PER_MULTIPLY_ADD * columns * model.hidden_size * num_tokens
