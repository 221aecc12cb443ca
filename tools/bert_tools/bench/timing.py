"""Times of steps of one contender or of several in turn, and handling of out-of-memory errors.

Contenders take turns on the same work, so that a busy machine slows all of them.
"""

import gc
import statistics
import time
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

Contender = Callable[[int], Tensor]
"""Does one step on the batch of this number and returns a scalar that depends on its work."""
OUT_OF_MEMORY = "out of memory"
FEWEST_STEPS = 3


def reason_of(error: Exception) -> str:
    """The error's first line: the reason why there is no figure."""
    line = (str(error).splitlines() or [""])[0]
    is_memory = isinstance(error, torch.OutOfMemoryError)
    return f"{OUT_OF_MEMORY} ({line})" if is_memory else f"{type(error).__name__}: {line}"


def free_memory() -> None:
    """Free unused memory; call it after the `except` block, as an error holds tensors."""
    gc.collect()  # a model's parts refer to each other
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def seconds_of(run: Contender, batch: int) -> float:
    """Wall seconds of one step; reading its scalar waits for the device."""
    start = time.perf_counter()
    run(batch).item()
    return time.perf_counter() - start


def time_steps(run: Contender, *, warm_up: int, steps: int, seconds: float) -> tuple[int, float]:
    """Number of measured steps and mean milliseconds of one; the host waits at the end only.

    Runs as many as fit into `seconds` by the last one of the warm-up: FEWEST_STEPS at least,
    `steps` at most.
    """
    for number in range(warm_up):
        taken = seconds_of(run, number)
    count = max(FEWEST_STEPS, min(steps, int(seconds / taken)))
    start = time.perf_counter()
    for number in range(warm_up, warm_up + count):
        scalar = run(number)
    scalar.item()
    return count, 1e3 * (time.perf_counter() - start) / count


class InterleavedTimes:
    """Wall seconds of every visit to every batch by every contender."""

    def __init__(
        self,
        contenders: Mapping[str, Contender],
        num_batches: int,
        *,
        may_fail: Collection[str] = (),
    ) -> None:
        """Contenders in `may_fail` are left out and freed when they fail, as of want of memory."""
        self._contenders = dict(contenders)
        self._may_fail = frozenset(may_fail)
        self.reasons: dict[str, str] = {}  # reasons for those left out
        self._seconds: dict[str, list[list[float]]] = {
            name: [[] for _ in range(num_batches)] for name in contenders
        }
        self.num_steps = 0

    @property
    def names(self) -> list[str]:
        """Names of the contenders."""
        return list(self._contenders)

    def run_once(self) -> None:
        """Run the first batch on each, unmeasured."""
        for name in self.names:
            self._seconds_of(name, 0)

    def _seconds_of(self, name: str, batch: int) -> float | None:
        """Seconds of a step; None if it failed, after freeing its parts."""
        try:
            return seconds_of(self._contenders[name], batch)
        except RuntimeError as error:
            if name not in self._may_fail:
                raise
            self.reasons[name] = reason_of(error)
        del self._contenders[name], self._seconds[name]
        free_memory()
        return None

    def measure(self, *, num_steps: int, seconds: float, report: Callable[[str], None]) -> None:
        """Run each step on all contenders in turn, batch after batch, again and again.

        Stops after `num_steps` steps, or at the first step that ends after `seconds` once every
        batch was visited; `report` gets a line for each step. Each contender must have run before.
        One that may fail and does has no times from then on.
        """
        num_batches = len(next(iter(self._seconds.values())))
        start = time.perf_counter()
        while self.num_steps < num_steps:
            if self.num_steps >= num_batches and time.perf_counter() - start > seconds:
                return
            batch = self.num_steps % num_batches
            parts = []
            for name in self.names:
                taken = self._seconds_of(name, batch)
                if taken is None:
                    parts.append(f"{name} {self.reasons[name]}")
                    continue
                self._seconds[name][batch].append(taken)
                parts.append(f"{name} {taken:.3f} s")
            self.num_steps += 1
            report(f"step {self.num_steps}/{num_steps}: " + ", ".join(parts))

    def seconds_per_batch(self, name: str) -> float:
        """Mean over the visited batches of the median of their visits."""
        visits = [visits for visits in self._seconds[name] if visits]
        return statistics.fmean(statistics.median(seconds) for seconds in visits)

    def range_of_ratios(self, above: str, below: str) -> list[float]:
        """Lowest, median and highest ratio of two contenders' seconds, one pass over batches."""
        rounds = [
            [sum(visits) for visits in zip(*self._seconds[name], strict=False)]
            for name in (above, below)
        ]
        ratios = [a / b for a, b in zip(*rounds, strict=True)]
        return [min(ratios), statistics.median(ratios), max(ratios)]
