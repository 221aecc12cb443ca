"""Timing of training steps, of one contender or of several in turn.

Contenders take turns on the same work, so that a busy machine slows all of them equally. A baseline
that runs out of memory is left out and freed, so that the others can continue.
"""

import gc
import statistics
import time
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from bert_tools.bench.progress import Progress

Contender = Callable[[int], Tensor]
"""Runs one step on the batch with this number and returns a scalar that depends on its work."""
OUT_OF_MEMORY = "out of memory"
FEWEST_STEPS = 3


def reason_of(error: Exception) -> str:
    """Return the first line of an error, as the reason why there is no measurement."""
    line = (str(error).splitlines() or [""])[0]
    is_memory = isinstance(error, torch.OutOfMemoryError)
    return f"{OUT_OF_MEMORY} ({line})" if is_memory else f"{type(error).__name__}: {line}"


def free_memory() -> None:
    """Free unused memory.

    Call it after an `except` block, not within, because the error keeps references to tensors.
    """
    gc.collect()  # because the parts of a model refer to each other
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def seconds_of(run: Contender, batch: int) -> float:
    """Return the wall-clock seconds of one step, including the wait for the device."""
    start = time.perf_counter()
    run(batch).item()
    return time.perf_counter() - start


def time_steps(
    run: Contender, *, warm_up: int, steps: int, seconds: float, progress: Progress
) -> tuple[int, float]:
    """Measure steps, and return their number and their mean duration in milliseconds.

    The last of the `warm_up` steps tells how many fit into `seconds`. At least FEWEST_STEPS and at
    most `steps` are measured. The host waits for the device only after the last step, as it does in
    training.
    """
    progress.start("warming up", total=warm_up)
    for number in range(warm_up):
        taken = seconds_of(run, number)
        progress.advance()
    count = max(FEWEST_STEPS, min(steps, int(seconds / taken)))
    progress.start(f"measuring {count} steps", seconds=count * taken)
    start = time.perf_counter()
    for number in range(warm_up, warm_up + count):
        scalar = run(number)
    scalar.item()
    return count, 1e3 * (time.perf_counter() - start) / count


class InterleavedTimes:
    """The wall-clock seconds of every step, by contender and batch."""

    def __init__(
        self,
        contenders: Mapping[str, Contender],
        num_batches: int,
        *,
        may_fail: Collection[str] = (),
    ) -> None:
        """Prepare to time these contenders.

        Those named in `may_fail` are left out and freed when they fail, for example when they run
        out of memory. A failure of any other contender ends the measurement.
        """
        self._contenders = dict(contenders)
        self._may_fail = frozenset(may_fail)
        self.reasons: dict[str, str] = {}  # why a contender was left out
        self._seconds: dict[str, list[list[float]]] = {
            name: [[] for _ in range(num_batches)] for name in contenders
        }
        self.num_steps = 0

    @property
    def names(self) -> list[str]:
        """Names of the contenders that have not failed."""
        return list(self._contenders)

    def run_once(self, progress: Progress) -> None:
        """Warm up each contender with one step on the first batch, which is not recorded."""
        progress.start("warming up all contenders", total=len(self.names))
        for name in self.names:
            self._seconds_of(name, 0)
            progress.advance()

    def _seconds_of(self, name: str, batch: int) -> float | None:
        """Return the seconds of a step. If it fails, free the contender and return None."""
        try:
            return seconds_of(self._contenders[name], batch)
        except RuntimeError as error:
            if name not in self._may_fail:
                raise
            self.reasons[name] = reason_of(error)
        del self._contenders[name], self._seconds[name]
        free_memory()
        return None

    def measure(self, *, num_steps: int, seconds: float, progress: Progress) -> None:
        """Run the contenders in turn on one batch after another, and record their times.

        The measurement stops after `num_steps` steps, or after the first step that ends later than
        `seconds`, but not before every batch was measured once. Call `run_once` first.
        """
        num_batches = len(next(iter(self._seconds.values())))
        progress.start(f"measuring up to {num_steps} steps of each of {', '.join(self.names)}")
        start = time.perf_counter()
        while self.num_steps < num_steps:
            elapsed = time.perf_counter() - start
            if self.num_steps >= num_batches and elapsed > seconds:
                return
            batch = self.num_steps % num_batches
            parts = []
            for name in self.names:
                taken = self._seconds_of(name, batch)
                if taken is None:
                    parts.append(f"{name} stopped ({self.reasons[name]})")
                    continue
                self._seconds[name][batch].append(taken)
                parts.append(f"{name} {taken:.3f} s")
            self.num_steps += 1
            left = self._seconds_left(num_steps, seconds, time.perf_counter() - start)
            line = f"step {self.num_steps}/{num_steps}: {', '.join(parts)}"
            progress.say(f"{line}; at most about {left:.0f} s left")

    def _seconds_left(self, num_steps: int, seconds: float, elapsed: float) -> float:
        """Estimate how long `measure` will still take, from the steps so far."""
        num_batches = len(next(iter(self._seconds.values())))
        per_step = elapsed / self.num_steps
        until_all_batches = (num_batches - self.num_steps) * per_step
        until_limit = max(until_all_batches, seconds - elapsed)
        return max(0.0, min((num_steps - self.num_steps) * per_step, until_limit))

    def seconds_per_batch(self, name: str) -> float:
        """Return the median time of each measured batch, averaged over the batches."""
        visits = [visits for visits in self._seconds[name] if visits]
        return statistics.fmean(statistics.median(seconds) for seconds in visits)

    def range_of_ratios(self, above: str, below: str) -> list[float]:
        """Return the lowest, median and highest ratio of two contenders' times.

        Each ratio divides the seconds of `above` for one pass over all batches by those of `below`.
        """
        rounds = [
            [sum(visits) for visits in zip(*self._seconds[name], strict=False)]
            for name in (above, below)
        ]
        ratios = [a / b for a, b in zip(*rounds, strict=True)]
        return [min(ratios), statistics.median(ratios), max(ratios)]
