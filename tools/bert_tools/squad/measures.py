"""Pipeline bubbles and the gradient noise scale, computed without torch.

The bubble of an update is the share of its time in which ranks are idle, averaged over all ranks
(GPipe, arXiv 1811.06965, section 2.3).

Let G be the gradient of the loss and Sigma the covariance of one sample's gradient. Then the
gradient of a batch of B samples has E|g_B|^2 = |G|^2 + tr(Sigma) / B. The noise scale phi =
tr(Sigma) / |G|^2, in samples, is the batch size at which noise and signal are equally strong.

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
    """One pass of a stage over a micro-batch, in seconds since the start of the update."""

    rank: int
    stage: int
    kind: Kind
    microbatch: int
    begin_s: float
    end_s: float


class StageClock:
    """A clock that records when the pipeline stages of a rank compute, from `start` to `stop`.

    The clock calls `synchronize` at the beginning and the end of each span, to wait until the
    device has finished its work. These waits slow a GPU down, so the training loop times only some
    updates.
    """

    def __init__(self, rank: int, synchronize: Callable[[], object] = lambda: None) -> None:
        self._is_running = False
        self._rank = rank
        self._synchronize = synchronize
        self._began = 0.0
        self._spans: list[Span] = []

    def start(self, of_first_rank: float | None = None) -> None:
        """Start the clock of an update at time 0.

        Time 0 is `of_first_rank`, a `perf_counter` time of rank 0 at which all ranks had met, or
        now if it is None. Processes on one machine share a clock, so the time of rank 0 is valid
        for all of them. Times taken by each rank would differ, because ranks leave a collective at
        different times.
        """
        self._is_running = True
        self._began = perf_counter()
        if of_first_rank is not None and abs(self._began - of_first_rank) < SAME_CLOCK_S:
            self._began = of_first_rank
        self._spans = []

    def stop(self) -> list[Span]:
        """Stop the clock at the end of an update, and return the recorded spans."""
        self._is_running = False
        return self._spans

    @contextmanager
    def span(self, stage: int, kind: Kind, microbatch: int) -> Iterator[None]:
        """Return a context manager that records the work of the `with` block as a span."""
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
    """Return the bubble of an update, as a fraction from 0 to 1.

    This is 1 - computing time / (ranks * time from the first start to the last end).
    """
    ranks = {span.rank for span in spans}
    whole = max(span.end_s for span in spans) - min(span.begin_s for span in spans)
    busy = sum(span.end_s - span.begin_s for span in spans)
    return 1 - busy / (len(ranks) * whole)


def gradient_square(
    small_square: float, small_batch: float, big_square: float, big_batch: float
) -> float:
    """Return an unbiased estimate of |G|^2, the squared norm of the true gradient.

    Noise can make the estimate negative.

    Args:
        small_square: |g|^2 of a gradient of `small_batch` samples, or the mean over several
            gradients.
        small_batch: number of samples of the small batch, less than `big_batch`.
        big_square: |g|^2 of a gradient of `big_batch` samples.
        big_batch: number of samples of the big batch.
    """
    return (big_batch * big_square - small_batch * small_square) / (big_batch - small_batch)


def covariance_trace(
    small_square: float, small_batch: float, big_square: float, big_batch: float
) -> float:
    """Return an unbiased estimate of tr(Sigma), the total variance of a sample's gradient.

    The arguments are those of `gradient_square`.
    """
    return (small_square - big_square) / (1 / small_batch - 1 / big_batch)


def noise_scale(noise: Sequence[Mapping[str, float]], decay: float = 0.95) -> float | None:
    """Return the gradient noise scale phi in samples, at least 0.

    `noise` has the estimates `gradient_square` and `trace` of several updates, in the order of the
    updates. The two kinds of estimates are averaged separately, because the ratio of two noisy
    estimates is biased. An estimate has `decay` times the weight of the next one.

    Returns None if there is no estimate, or if noise makes the mean of |G|^2 zero or negative.
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
    """Return the progress per sample with batch M, compared with batch M0.

    This is (phi + M0) / (phi + M), where phi is `noise_scale`, M0 is `initial_batch` and M is
    `batch`, all in samples. It is 1 if M = M0, for any noise. M0 and M must be positive.
    """
    return (noise_scale + initial_batch) / (noise_scale + batch)
