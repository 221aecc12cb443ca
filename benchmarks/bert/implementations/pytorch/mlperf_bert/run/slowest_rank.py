"""The slowest rank of an interval, by the time of each rank's own work.

All ranks of data-parallel training have the same step time, because the fast ones wait for the slow
ones. Each rank therefore measures what it does before it waits: the wait for its own data, and the
time from the start of a step to its last gradient.
"""

import time
from collections import deque
from dataclasses import dataclass
from statistics import median, median_low

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mlperf_bert.data.loader import StepBatch
from mlperf_bert.distributed.launch import RankInfo

MOST_STEPS = 64  # the newest ones of an interval


@dataclass(frozen=True, slots=True)
class Slowest:
    """The slowest rank, and its own time of a step over that of the median rank."""

    rank: int | None = None
    over_median: float | None = None


class SlowestRank:
    """Measures this rank's steps without waiting for the device.

    With one rank, or if a graph replays the steps so that no hook runs, nothing is measured.
    """

    def __init__(
        self, info: RankInfo, embeddings: nn.Module, device: torch.device, *, replays: bool
    ) -> None:
        """`embeddings` have the last gradient of a backward. Called before any step."""
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
        """Called right before the step that computes `batch`."""
        if self._is_on:
            self._waits_s.append(batch.wait_ms / 1e3)
            self._steps.append([_mark(self._device)] * 2)

    def compare(self) -> Slowest:
        """Compare the ranks by one small all-reduce, and begin a new interval.

        Every rank calls it at the same step, where its host waits for the device anyway.
        """
        if not self._is_on:
            return Slowest()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # host sync, once an interval
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
        usual = median_low(seconds)  # of two ranks the fast one
        rank = max(range(len(seconds)), key=seconds.__getitem__)
        return Slowest(rank, seconds[rank] / usual) if usual > 0 else Slowest()

    def _on_gradient(self, parameter: Tensor) -> None:
        if self._steps:  # none before the first step: warm-up
            self._steps[-1][1] = _mark(self._device)


def _mark(device: torch.device) -> float | torch.cuda.Event:
    """This moment: the host's clock in seconds, or an event on the current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    """Seconds between two marks that the device has reached."""
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return float(begin.elapsed_time(end)) / 1e3
    assert isinstance(begin, float) and isinstance(end, float)  # both are of one device
    return end - begin
