"""Measure the training loop, and write one record per metrics interval to `metrics.jsonl`.

The counters stay on the device. At the end of each interval, one small all-reduce averages them,
and the host reads the result. The file has one JSON object per line. A resumed run removes the
records after its checkpoint and continues the file.
"""

import json
import math
import re
import resource
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from statistics import median, median_low
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.loader import StepBatch
from mlperf_bert.distributed.clipping import ClipOutcome
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.files import LineFile, open_regular_file, reading_error, replaced_file

_STATUS = Path("/proc/self/status")
MOST_STEPS = 64  # Only the newest steps of an interval are compared.


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a training step, as 0-d tensors on the device."""

    loss: Tensor  # of this rank; the mean over ranks is the loss of the update
    clip: ClipOutcome
    learning_rate: Tensor


@dataclass(frozen=True, slots=True)
class Slowest:
    """The slowest rank and its step time divided by the median, or None if not measured."""

    rank: int | None = None
    over_median: float | None = None


class Metrics:
    """Counters for the steps of a metrics interval, from which the record is built.

    Rates and `step_ms` exclude evaluations. `loss` is the mean over the steps of the interval that
    were not skipped, or over all steps if all were skipped. `clipped_fraction` is the mean over
    steps and ranks (see `ClipOutcome`).
    """

    def __init__(self, config: RunConfig, world_size: int, device: torch.device) -> None:
        self._config = config
        self._world_size = world_size
        self._device = device
        self.start()

    def start(self, skipped_in_a_row: int = 0) -> None:
        """Reset all counters and start counting now.

        `skipped_in_a_row` is the number of steps that were skipped in a row right before the
        checkpoint from which a run resumes.
        """
        self._last_step = 0
        self._samples_since_evaluation = 0
        self._evaluated = time.perf_counter()
        self._skipped_until_now = torch.full(
            (), skipped_in_a_row, dtype=torch.float64, device=self._device
        )
        self._start_interval()

    def _start_interval(self) -> None:
        self._started = time.perf_counter()
        self._steps, self._samples, self._eager_steps = 0, 0, 0
        self._imbalance, self._data_wait_ms = 0.0, 0.0  # sums over the steps
        # Tokens and masked positions of all ranks, without and with the padding.
        self._used, self._capacity = np.zeros(2, np.int64), np.zeros(2, np.int64)
        # Loss of all steps, loss of unskipped steps, clipped fraction, skipped steps.
        self._sums = torch.zeros(4, dtype=torch.float64, device=self._device)

    def exclude(self, seconds: float) -> None:
        """Exclude `seconds` spent on other work, such as an evaluation, from all rates."""
        self._started += seconds
        self._evaluated += seconds

    def throughput_since_evaluation(self) -> float:
        """Return the training throughput since the previous call, in samples/s."""
        now = time.perf_counter()
        throughput = self._samples_since_evaluation / (now - self._evaluated)
        self._samples_since_evaluation, self._evaluated = 0, now
        return throughput

    def add(self, batch: StepBatch, result: StepResult) -> None:
        """Count a finished step, without reading from the device."""
        plan = batch.plan
        self._last_step = plan.step
        self._steps += 1
        self._samples += plan.sample_ids.size
        self._imbalance += plan.imbalance_tokens
        self._data_wait_ms += batch.data_wait_ms
        is_captured = self._config.run.step_mode == "captured"
        shape = batch.micro_batches[0].shape  # the same for all micro-batches of the step
        self._eager_steps += is_captured and shape is None
        used = np.array([plan.num_tokens.sum(), plan.num_masked.sum()])
        self._used += used
        if shape is None:
            self._capacity += used
        else:
            self._capacity += plan.num_tokens.size * np.array([shape.tokens, shape.masked])
        self._samples_since_evaluation += plan.sample_ids.size
        loss, skip = result.loss.double(), result.clip.skip.double()
        loss_of_updates = torch.where(skip > 0, 0.0, loss)  # The loss may be NaN.
        clipped = result.clip.clipped_fraction.double()
        self._sums += torch.stack([loss, loss_of_updates, clipped, skip])
        self._skipped_until_now = (self._skipped_until_now + skip) * skip
        self._last = result

    @property
    def interval_is_full(self) -> bool:
        """True if the last step ends a metrics interval of `run.log_interval_steps` steps."""
        return self._last_step % self._config.run.log_interval_steps == 0

    def skipped_in_a_row(self) -> int:
        """Return how many steps in a row were skipped up to now, equal on every rank.

        The number is 0 after a step that updated the weights. The call waits for the device.
        """
        return int(self._skipped_until_now.item())  # host sync, once per interval or checkpoint

    def record(
        self, samples: int, mlm_accuracy: float | None, slowest: Slowest | None = None
    ) -> dict[str, Any]:
        """End the metrics interval, which has at least one step, and return its record.

        Every rank must call this collective method at the same step, because it averages the loss
        over ranks. docs/reference/glossary.md explains the keys.
        """
        means = self._mean_over_ranks().tolist()  # host sync, once per interval
        loss, loss_of_updates, clipped, skipped = means
        count, waste = self._steps, self._capacity / self._used - 1
        updates = count - int(skipped)
        seconds = time.perf_counter() - self._started
        record = {
            "step": self._last_step,
            "samples": samples,
            "loss": loss_of_updates / updates if updates else loss / count,
            "mlm_accuracy": mlm_accuracy,
            "learning_rate": self._last.learning_rate.item(),  # host sync, once per interval
            "samples_per_s": self._samples / seconds,
            "tokens_per_s": int(self._used[0]) / seconds,
            "imbalance_tokens": self._imbalance / count,
            "capacity_waste": float(waste[0]),
            "capacity_waste_masked": float(waste[1]),
            "skipped_steps": int(skipped),
            "eager_steps": self._eager_steps,
            "clipped_fraction": clipped / count,
            "grad_norm": self._last.clip.grad_norm.item(),  # host sync, once per interval
            "memory_bytes": memory_bytes(self._device),
            "step_ms": 1e3 * seconds / count,
            "data_wait_ms": self._data_wait_ms / count,
            "straggler_ratio": slowest.over_median if slowest else None,
            "slowest_rank": slowest.rank if slowest else None,
        }
        self._start_interval()
        return record

    def _mean_over_ranks(self) -> Tensor:
        means = self._sums
        if self._world_size > 1:
            dist.all_reduce(means)
            means /= self._world_size
        return means


def memory_bytes(device: torch.device) -> int:
    """Return the peak of the allocated GPU memory or of the resident CPU memory in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # On Linux, ru_maxrss starts at the memory of the parent process, so it is only the fallback.
    with suppress(OSError):
        peak = re.search(r"^VmHWM:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
        if peak:
            return int(peak[1]) * 1024
    kilobyte = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobyte


class SlowestRank:
    """A timer that finds the slowest rank by comparing how long each rank works in a step.

    In data-parallel training all ranks have the same step time, because fast ranks wait for slow
    ones. Each rank therefore measures the time that it works before it waits for other ranks. This
    time consists of the wait for its own data, and the time from the start of a step to its last
    gradient. The measurement does not wait for the device. Nothing is measured if there is only one
    rank, or if a graph replays the steps, because a replay runs no hooks.
    """

    def __init__(
        self, info: RankInfo, embeddings: nn.Module, device: torch.device, *, replays: bool
    ) -> None:
        """Register hooks on the parameters of `embeddings`, whose gradients are computed last.

        Create the object before the first step.
        """
        self._info, self._device = info, device
        self._is_on = info.world_size > 1 and not replays
        self._steps: deque[list[float | torch.cuda.Event]] = deque(maxlen=MOST_STEPS)
        self._waits_s: deque[float] = deque(maxlen=MOST_STEPS)
        if self._is_on:
            for parameter in embeddings.parameters():
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._on_gradient
                )

    def step_begins(self, batch: StepBatch) -> None:
        """Record the start of a step. Call this right before the step that computes `batch`."""
        if self._is_on:
            self._waits_s.append(batch.data_wait_ms / 1e3)
            self._steps.append([_mark(self._device)] * 2)

    def compare(self) -> Slowest:
        """Compare the step times of the ranks, and start a new interval.

        Every rank must call this collective method at the same step, because it uses one small
        all-reduce. Call it when the host waits for the device anyway.
        """
        if not self._is_on:
            return Slowest()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # host sync, once per interval
        own = [
            wait + _seconds(*step) for wait, step in zip(self._waits_s, self._steps, strict=True)
        ]
        self._steps.clear()
        self._waits_s.clear()
        row = torch.zeros(self._info.world_size, dtype=torch.float64)
        row[self._info.rank] = median(own) if own else 0.0
        row = row.to(self._device)
        dist.all_reduce(row)
        seconds = row.tolist()
        usual = median_low(seconds)  # With two ranks, this is the faster one.
        rank = max(range(len(seconds)), key=seconds.__getitem__)
        return Slowest(rank, seconds[rank] / usual) if usual > 0 else Slowest()

    def _on_gradient(self, parameter: Tensor) -> None:
        if self._steps:  # There is none during the warm-up.
            self._steps[-1][1] = _mark(self._device)


def _mark(device: torch.device) -> float | torch.cuda.Event:
    """Return the current time: the host's clock in seconds, or an event on the CUDA stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    """Return the seconds between two results of `_mark`, which the device must have reached."""
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return float(begin.elapsed_time(end)) / 1e3
    assert isinstance(begin, float) and isinstance(end, float)  # Both marks are of one device.
    return end - begin


class MetricsFile:
    """The file `metrics.jsonl`, to which rank 0 appends records. On other ranks `path` is None.

    `after_step` is the step of the checkpoint from which a run resumes, or None for a new file.
    Records of later steps are removed, because the run writes them again. Lines without a step are
    removed too. Raises ConfigError or DataError if the file cannot be read or written.
    """

    def __init__(self, path: Path | None, after_step: int | None = None) -> None:
        self._file: LineFile | None = None
        if path is not None:
            if after_step is not None:
                # It copies line by line, because the process would keep the memory of a whole file.
                with replaced_file(path) as temporary, temporary.open("xb") as kept:
                    kept.writelines(_until(path, after_step))
            self._file = LineFile(path, _warn, continued=after_step is not None)

    def write(self, record: dict[str, Any]) -> None:
        """Append one record as a line of JSON."""
        if self._file:
            # JSON has no NaN, so a loss that is not finite becomes null.
            finite = {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in record.items()
            }
            self._file.append(json.dumps(finite, allow_nan=False))

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()


def _until(path: Path, last_step: int) -> Iterator[bytes]:
    """Yield the lines of the records up to `last_step`, and warn about damaged lines.

    The function drops damaged lines. An incomplete last line causes no warning, because a killed
    run leaves one.
    """
    dropped, later = list[int](), list[int]()
    for number, line in enumerate(_lines(path), 1):
        if not line.endswith(b"\n"):
            break
        step = _step_of(line)
        if step is None:
            dropped.append(number)
        elif step > last_step:
            later.append(number)
        else:
            dropped += later  # They come before an earlier step, so their numbers are damaged.
            later = []
            yield line
    if dropped:
        more = f" (and {len(dropped) - 1} more)" if len(dropped) > 1 else ""
        _warn(f"{path}, line {min(dropped)}: not a record of the run, so it was dropped{more}")


def _step_of(line: bytes) -> int | None:
    """Return the step of a record's line, or None if the line is not a record."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return step if type(step) is int else None


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of the file `path`, or nothing if the file does not exist."""
    try:
        with BufferedReader(open_regular_file(path)) as file:
            yield from file
    except FileNotFoundError:
        return
    except OSError as error:
        raise reading_error(path, error, missing="", remedy="move this file away") from None


def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
