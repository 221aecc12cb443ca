"""Measure engines by the bubbles of pipelines and the noise of the gradient, without torch.

A bubble is the time of an update in which a rank computes nothing, as a fraction of the time of all
ranks (GPipe, arXiv 1811.06965, section 2.3).

Let G be the gradient of the loss and Sigma the covariance of one sample's gradient. Then the
gradient of a batch of B samples has E|g_B|^2 = |G|^2 + tr(Sigma) / B. The noise scale
phi = tr(Sigma) / |G|^2, in samples, is the batch size at which noise and signal are equally strong.

Sources: McCandlish et al., "An Empirical Model of Large-Batch Training" (arXiv 1812.06162),
appendix A, for both estimates, and Qiao et al., "Pollux" (arXiv 2008.12260), for efficiency and
goodput.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

# Forward pass (F), backward pass for all or only for the inputs (B), or for the weights (W).
Kind = Literal["F", "B", "W"]

SAME_CLOCK_S = 1.0  # clocks that differ by more belong to different machines


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A rank's work on one micro-batch. Times are in seconds since the start of the update."""

    rank: int
    stage: int
    kind: Kind
    microbatch: int
    begin_s: float
    end_s: float


class StageClock:
    """Records when the stages of a rank compute, between `start` and `stop`.

    `synchronize` is called at both ends of each span and waits until the device has finished its
    work. This slows a GPU down, so only some updates are measured.
    """

    def __init__(self, rank: int, synchronize: Callable[[], object] = lambda: None) -> None:
        self._is_running = False
        self._rank = rank
        self._synchronize = synchronize
        self._began = 0.0
        self._spans: list[Span] = []

    def start(self, of_first_rank: float | None = None) -> None:
        """Start an update. Its second 0 is now, or the given `perf_counter` time of rank 0.

        All ranks have met by that time. Processes on one machine share a clock, so it is the same
        second 0 for all of them. Their own times would differ, because they leave a collective at
        different times.
        """
        self._is_running = True
        self._began = perf_counter()
        if of_first_rank is not None and abs(self._began - of_first_rank) < SAME_CLOCK_S:
            self._began = of_first_rank
        self._spans = []

    def stop(self) -> list[Span]:
        """End the update and return its spans."""
        self._is_running = False
        return self._spans

    @contextmanager
    def span(self, stage: int, kind: Kind, microbatch: int) -> Iterator[None]:
        """Record the work inside the `with` block as a span."""
        if not self._is_running:
            yield
            return
        self._synchronize()
        begin_s = perf_counter() - self._began
        yield
        self._synchronize()
        times = {"begin_s": begin_s, "end_s": perf_counter() - self._began}
        span = Span(rank=self._rank, stage=stage, kind=kind, microbatch=microbatch, **times)
        self._spans.append(span)


def measured_bubble(spans: Sequence[Span]) -> float:
    """Return 1 - computing time / (ranks * time from the first begin to the last end)."""
    ranks = {span.rank for span in spans}
    whole = max(span.end_s for span in spans) - min(span.begin_s for span in spans)
    busy = sum(span.end_s - span.begin_s for span in spans)
    return 1 - busy / (len(ranks) * whole)


def gradient_square(
    small_square: float, small_batch: float, big_square: float, big_batch: float
) -> float:
    """Return an unbiased estimate of |G|^2, which noise can make negative.

    Args:
        small_square: |g|^2 of a gradient of `small_batch` samples, or the mean of several.
        small_batch: number of samples, below `big_batch`.
        big_square: |g|^2 of a gradient of `big_batch` samples.
        big_batch: number of samples.
    """
    return (big_batch * big_square - small_batch * small_square) / (big_batch - small_batch)


def covariance_trace(
    small_square: float, small_batch: float, big_square: float, big_batch: float
) -> float:
    """Return an unbiased estimate of tr(Sigma), from the arguments of `gradient_square`."""
    return (small_square - big_square) / (1 / small_batch - 1 / big_batch)


def noise_scale(noise: Sequence[Mapping[str, float]], decay: float = 0.95) -> float | None:
    """Return phi in samples, at least 0, from `gradient_square` and `trace` of updates in order.

    The two are averaged separately, because the ratio of two noisy estimates is biased. An estimate
    counts `decay` times as much as the next one. Returns None without an estimate, or if the mean
    of |G|^2 is not above 0, which happens if noise hides the gradient.
    """
    weights = [decay**number for number in reversed(range(len(noise)))]
    square, trace = (
        sum(weight * each[key] for weight, each in zip(weights, noise, strict=True))
        for key in ("gradient_square", "trace")
    )
    if not square > 0:
        return None
    value = max(trace, 0.0) / square
    return value if math.isfinite(value) else None


def efficiency(noise_scale: float, initial_batch: float, batch: float) -> float:
    """Return (phi + M0) / (phi + M), the progress per sample with batch M relative to batch M0.

    It is 1 if M = M0, for any noise. All arguments are in samples, and `initial_batch` and `batch`
    are above 0.
    """
    return (noise_scale + initial_batch) / (noise_scale + batch)
