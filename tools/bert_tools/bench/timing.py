"""Time measurements of training steps, of one contender or of several contenders in turn.

A contender is a function that runs one training step. Contenders take turns on the same batches, so
that a busy machine slows all of them equally. A baseline that runs out of memory is left out and
freed, so that the others can continue.
"""

import gc
import statistics
import time
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from mlperf_bert.run.console import ProgressLines

Contender = Callable[[int], Tensor]
"""Runs one step on the batch with this number and returns a scalar that depends on its work."""
OUT_OF_MEMORY = "out of memory"


def reason_of(error: Exception) -> str:
    """Return the first line of an error, which explains why a measurement is missing."""
    line = (str(error).splitlines() or [""])[0]
    is_memory = isinstance(error, torch.OutOfMemoryError)
    return f"{OUT_OF_MEMORY} ({line})" if is_memory else f"{type(error).__name__}: {line}"


def free_memory() -> None:
    """Free the memory of objects that are no longer used.

    Call this function after an `except` block, not inside it, because the error refers to tensors
    until the block ends.
    """
    gc.collect()  # because the parts of a model refer to each other
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def seconds_of(run: Contender, batch: int) -> float:
    """Run one step, and return the wall-clock seconds until the device has finished it."""
    start = time.perf_counter()
    run(batch).item()
    return time.perf_counter() - start


def time_steps(
    run: Contender, *, num_updates: int, steps: int, seconds: float, progress: ProgressLines
) -> tuple[int, float]:
    """Run training steps, and return how many were measured and their mean time in milliseconds.

    The steps cycle through `num_updates` updates, and each update is measured equally often,
    because their lengths differ. One pass over the updates is not measured, but its last step
    determines how many passes fit into `steps` and `seconds`. At least one pass is measured. The
    host waits for the device only after the last step, as it does in training.
    """
    progress.line("warming up")
    for number in range(num_updates):
        progress.counted("warming up", "updates", number, num_updates)
        taken = seconds_of(run, number)
    count = num_updates * max(1, min(steps, int(seconds / taken)) // num_updates)
    progress.line(f"measuring {count} steps (about {count * taken:.0f} s)")
    start = time.perf_counter()
    for number in range(num_updates, num_updates + count):
        scalar = run(number)
    scalar.item()
    return count, 1e3 * (time.perf_counter() - start) / count


class InterleavedTimes:
    """A measurement of several contenders in turn, which stores the seconds of every step."""

    def __init__(
        self,
        contenders: Mapping[str, Contender],
        num_batches: int,
        *,
        may_fail: Collection[str] = (),
    ) -> None:
        """Prepare to measure these contenders on batches 0 to `num_batches` - 1.

        If a contender in `may_fail` raises an error, for example because it runs out of memory, it
        is left out and freed. The error of any other contender ends the measurement.
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
        """Names of the contenders that have not failed, and are still measured."""
        return list(self._contenders)

    def run_once(self, progress: ProgressLines) -> None:
        """Warm up each contender with one step on the first batch.

        The times of these steps are not recorded.
        """
        progress.line("warming up all contenders")
        names = self.names
        for number, name in enumerate(names):
            progress.counted("warming up", "contenders", number, len(names))
            self._seconds_of(name, 0)

    def _seconds_of(self, name: str, batch: int) -> float | None:
        """Run one step of a contender and return its seconds.

        If the step fails and the contender is in `may_fail`, free the contender and return None.
        """
        try:
            return seconds_of(self._contenders[name], batch)
        except RuntimeError as error:
            if name not in self._may_fail:
                raise
            self.reasons[name] = reason_of(error)
        del self._contenders[name], self._seconds[name]
        free_memory()
        return None

    def measure(self, *, num_steps: int, seconds: float, progress: ProgressLines) -> None:
        """Run the contenders in turn on one batch after another, and record their times.

        The measurement stops after `num_steps` steps, or when `seconds` have passed and every batch
        was measured at least once. Call `run_once` first.
        """
        num_batches = len(next(iter(self._seconds.values())))
        progress.line(f"measuring up to {num_steps} steps of each of {', '.join(self.names)}")
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
            progress.line(f"{line}; at most about {left:.0f} s left")

    def _seconds_left(self, num_steps: int, seconds: float, elapsed: float) -> float:
        """Estimate from the steps so far how many more seconds `measure` will take."""
        num_batches = len(next(iter(self._seconds.values())))
        per_step = elapsed / self.num_steps
        until_all_batches = (num_batches - self.num_steps) * per_step
        until_limit = max(until_all_batches, seconds - elapsed)
        return max(0.0, min((num_steps - self.num_steps) * per_step, until_limit))

    def seconds_per_batch(self, name: str) -> float:
        """Return the median seconds of a contender's passes, divided by the number of batches.

        The ratio of two contenders' seconds lies in the range that `range_of_ratios` returns.
        """
        return statistics.median(self._passes(name)) / len(self._seconds[name])

    def range_of_ratios(self, above: str, below: str) -> list[float]:
        """Return the lowest, median and highest ratio of two contenders' times over several passes.

        Each ratio is the time that `above` took for one pass over all batches, divided by that of
        `below`.
        """
        ratios = [a / b for a, b in zip(self._passes(above), self._passes(below), strict=True)]
        return [min(ratios), statistics.median(ratios), max(ratios)]

    def _passes(self, name: str) -> list[float]:
        """Return the seconds that a contender took for each complete pass over all batches."""
        return [sum(visits) for visits in zip(*self._seconds[name], strict=False)]
