"""What a run uses: processor or GPU time, memory, and the model's floating-point operations.

Shape letters: T tokens, D hidden.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch

from bert_tools.bench.flops import PASSES, PER_MULTIPLY_ADD, model_flops
from bert_tools.common.nvml import nvml_handle
from mlperf_bert.common.machine import usable_cpus
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.run.metrics import memory_bytes

Means = Literal["process CPU time over wall time", "NVML utilisation"]

SAMPLE_S = 0.1  # between two questions to NVML, which itself averages over 0.17 to 1 s


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Of one rank, while it was measured.

    `utilisation` is 0 .. 1. On a CPU: processor seconds of all threads of the process over wall
    seconds, divided by the threads that the rank computes with. On a GPU: the mean of NVML's
    utilisation, which is the share of the time in which any kernel ran: a GPU that computes on one
    of its processors alone counts as used. None where NVML does not tell. `cpus` are the logical
    CPUs that the rank may run on, its own ones where it is bound. `core_wait_seconds` is how long
    its threads together could have computed and had no core; None where the system does not tell.
    """

    wall_seconds: float
    cpu_seconds: float
    utilisation: float | None
    means: Means
    peak_memory_bytes: int
    cpus: frozenset[int]
    core_wait_seconds: float | None


class UsageMeter:
    """Measures while used as a context; `usage` afterwards."""

    def __init__(
        self,
        device: torch.device,
        *,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._device = device
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._threads = torch.get_num_threads()
        self._sampler: NvmlSampler | None = None
        self._usage: Usage | None = None

    def __enter__(self) -> Self:
        if self._device.type == "cuda":
            found = nvml_handle(self._device.index or 0)
            if found is not None:
                self._sampler = NvmlSampler(*found)
                self._sampler.start()
        self._waited_before = core_wait_seconds()
        self._cpu_begun, self._begun = self._cpu_clock(), self._clock()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        wall = self._clock() - self._begun
        cpu = self._cpu_clock() - self._cpu_begun
        on_gpu = self._device.type == "cuda"
        utilisation: float | None = cpu / wall / self._threads if wall > 0 else 0.0
        if on_gpu:
            utilisation = self._sampler.stop() if self._sampler else None
        elif utilisation is not None:
            # The threads of libraries may add a little over one for each that computes.
            utilisation = min(1.0, utilisation)
        self._usage = Usage(
            wall_seconds=wall,
            cpu_seconds=cpu,
            utilisation=utilisation,
            means="NVML utilisation" if on_gpu else "process CPU time over wall time",
            peak_memory_bytes=memory_bytes(self._device),
            cpus=usable_cpus(),
            core_wait_seconds=self._waited(),
        )

    def _waited(self) -> float | None:
        now, before = core_wait_seconds(), self._waited_before
        return None if now is None or before is None else max(0.0, now - before)

    @property
    def usage(self) -> Usage:
        """What was measured, once the context was left."""
        assert self._usage is not None, "the context was not left"
        return self._usage


class NvmlSampler:
    """Asks NVML for a GPU's utilisation all the time, in a thread of its own.

    Args:
        nvml: the module `pynvml`, or what has its function `nvmlDeviceGetUtilizationRates`.
        handle: of the GPU.
    """

    def __init__(self, nvml: Any, handle: Any, interval_s: float = SAMPLE_S) -> None:
        self._nvml = nvml
        self._handle = handle
        self._interval_s = interval_s
        self._samples: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="nvml", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def stop(self) -> float | None:
        """End; the mean, 0 .. 1, or None where NVML gave no answer."""
        self._ended.set()
        self._thread.join()
        return sum(self._samples) / len(self._samples) if self._samples else None

    def _sample(self) -> None:
        while True:
            try:
                rates = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
            except Exception:  # NVML's own errors: this GPU does not tell
                return
            self._samples.append(rates.gpu / 100)
            if self._ended.wait(self._interval_s):
                return


def core_wait_seconds(tasks: Path = Path("/proc/self/task")) -> float | None:
    """How long the threads that this process has now waited for a core so far.

    The second number of Linux's `schedstat`, in nanoseconds; None where there is none.
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

    Matrix products alone, every layer whole, no padding: 24 D^2 + 4 D L for a token of a window of
    L in a layer whose feed-forward part is 4 D wide, and 4 D for the span head, three times each.
    """
    encoder = model_flops(model, lengths, [0] * len(lengths))
    span_head = PASSES * PER_MULTIPLY_ADD * 2 * model.hidden_size * sum(lengths)
    return encoder.encoder + encoder.attention + span_head
