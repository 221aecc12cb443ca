"""Detection of ranks that are slower than others, by the time of each rank's own work.

All ranks of data-parallel training have the same step time: the fast ones wait for the slow ones.
So each rank measures its own work: the wait for its own data, and the time from the start of a step
to its last gradient. Waiting for others comes later, in the all-reduce.

Two settings still hide a straggler: with `clip.accumulation = "each_forward"` every backward waits
for the others, and with a sharded optimizer a forward waits for weights that others update.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_low

import torch
import torch.distributed as dist
from torch import Tensor

from mlperf_bert.config.sections import RunSection
from mlperf_bert.data.loader import StepBatch
from mlperf_bert.distributed.launch import RankInfo, host_name
from mlperf_bert.distributed.session import from_all_ranks
from mlperf_bert.model.bert import BertForPretraining

WINDOW_STEPS = 64  # before a comparison count
MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class OwnWork:
    """Times of one rank's own work: medians over steps, 0 if nothing was measured."""

    seconds: float  # a step
    seconds_per_token: float


class StragglerWatch:
    """Measures this rank's steps, and compares the ranks on request.

    A step costs five hooks on gradients and no wait for the device. A comparison is an all-reduce
    of 16 bytes per rank; the host waits for it and for all queued work. A run of one rank measures
    nothing.

    Hooks do not run when a step is replayed. Then the ranks' parts of the evaluation are compared,
    in which no rank waits for another.
    """

    def __init__(
        self, run: RunSection, info: RankInfo, model: BertForPretraining, device: torch.device
    ) -> None:
        """Watch the bare `model`, whose parameters are on `device`.

        Called by every rank at the same time, before any step, and any capture.
        """
        self._factor = run.straggler_factor
        self._info = info
        self._device = device
        self._hosts: list[str] = []
        self.slowest_over_median: float | None = None  # of the last comparison
        if info.world_size == 1:
            return
        on_cuda = device.type == "cuda"
        self._replays = on_cuda and run.step_mode == "captured"
        self._stopwatch = DeviceStopwatch() if on_cuda else HostStopwatch()
        self._planned: deque[tuple[float, int]] = deque(maxlen=WINDOW_STEPS)
        self._hosts = from_all_ranks(info, host_name())
        if self._replays:
            return
        # The last gradient of a backward belongs to one of these parameters.
        for parameter in model.body.embeddings.parameters():
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._on_gradient
            )

    def step_begins(self, batch: StepBatch) -> None:
        """Called right before the step that computes `batch`."""
        if self._hosts and not self._replays:
            tokens = int(batch.plan.num_tokens[self._info.rank].sum())
            self._planned.append((batch.wait_ms / 1e3, tokens))
            self._stopwatch.begin()

    def compare(self, share: tuple[float, int]) -> list[str]:
        """One line for each slow rank, the same on all ranks; every rank calls it at the same step.

        `share` is `Evaluator.own_share`. Starts a new window of steps.
        """
        if not self._hosts:
            return []
        if self._replays:
            own = own_work([share[0]], [(0.0, share[1])])
        else:
            own = own_work(self._stopwatch.read(), list(self._planned))
        self._planned.clear()
        works = self._of_all_ranks(own)
        ratios = over_median(works)
        self.slowest_over_median = max(ratios) or None
        what = "its part of the evaluation" if self._replays else "its own work of a step"
        return in_words(works, ratios, self._hosts, self._factor, what)

    def _on_gradient(self, parameter: Tensor) -> None:
        self._stopwatch.lap()

    def _of_all_ranks(self, own: OwnWork) -> list[OwnWork]:
        rows = torch.zeros(self._info.world_size, 2, dtype=torch.float64)
        rows[self._info.rank] = torch.tensor([own.seconds, own.seconds_per_token])
        rows = rows.to(self._device)
        dist.all_reduce(rows)
        return [OwnWork(*row) for row in rows.tolist()]  # host sync, once an evaluation


class HostStopwatch:
    """Seconds from each `begin` to the last `lap` after it, by the host's clock."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._began = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._seconds.append(0.0)
        self._began = time.perf_counter()

    def lap(self) -> None:
        """Record the time since `begin`; the last call of a step counts."""
        if self._seconds:  # none before the first step: warm-up
            self._seconds[-1] = time.perf_counter() - self._began

    def read(self) -> list[float]:
        """Seconds of the steps since the last call; 0 for a step without a lap."""
        seconds = list(self._seconds)
        self._seconds.clear()
        return seconds


class DeviceStopwatch:
    """The same by events on the current stream, read on request."""

    def __init__(self) -> None:
        self._pairs = [(_event(), _event()) for _ in range(WINDOW_STEPS)]
        self._begun = 0
        self._last = 0  # events of the current step, or of warm-up

    def begin(self) -> None:
        """See HostStopwatch."""
        self._last = self._begun % WINDOW_STEPS
        self._begun += 1
        self._pairs[self._last][0].record()

    def lap(self) -> None:
        """See HostStopwatch."""
        self._pairs[self._last][1].record()

    def read(self) -> list[float]:
        """See HostStopwatch; covers the last WINDOW_STEPS steps."""
        count = min(self._begun, WINDOW_STEPS)
        steps = range(self._begun - count, self._begun)
        self._begun = 0
        if count:
            torch.cuda.current_stream().synchronize()  # host sync, once an evaluation
        pairs = [self._pairs[step % WINDOW_STEPS] for step in steps]
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def own_work(seconds: Sequence[float], planned: Sequence[tuple[float, int]]) -> OwnWork:
    """A rank's own work, from its steps' `seconds` and their (seconds waited for data, tokens)."""
    steps = [
        (wait + worked, tokens)
        for worked, (wait, tokens) in zip(seconds, planned, strict=True)
        if worked > 0 and tokens > 0
    ]
    if not steps:
        return OwnWork(0.0, 0.0)
    return OwnWork(
        median(each for each, _ in steps), median(each / tokens for each, tokens in steps)
    )


def over_median(works: Sequence[OwnWork]) -> list[float]:
    """Each rank's time over the median rank's, per step or per token, whichever is less.

    A rank with more tokens is slower per step only. A rank with fewer tokens is slower per token
    only, because part of a step's cost is fixed. It is the lower median: of two ranks the fast one.
    """
    measured = [work for work in works if work.seconds > 0]
    if not measured:
        return [0.0] * len(works)
    by_step = median_low(work.seconds for work in measured)
    by_token = median_low(work.seconds_per_token for work in measured)
    return [min(work.seconds / by_step, work.seconds_per_token / by_token) for work in works]


def in_words(
    works: Sequence[OwnWork],
    ratios: Sequence[float],
    hosts: Sequence[str],
    factor: float,
    what: str = "its own work of a step",
) -> list[str]:
    """Lines for the slow ranks, slowest first; ranks beyond MOST_NAMED are only counted."""
    slow = [rank for rank, ratio in enumerate(ratios) if ratio > factor]
    slow.sort(key=lambda rank: -ratios[rank])
    usual = median_low([work.seconds for work in works if work.seconds > 0] or [0.0])
    lines = [
        f"rank {rank} on {hosts[rank]} is slow: {works[rank].seconds:.3f} s for {what}, "
        f"{works[rank].seconds / usual:.2f} times the median of {usual:.3f} s "
        f"(run.straggler_factor {factor:g})"
        for rank in slow[:MOST_NAMED]
    ]
    if len(slow) > MOST_NAMED:
        lines.append(f"{len(slow) - MOST_NAMED} more ranks are slow")
    return lines
