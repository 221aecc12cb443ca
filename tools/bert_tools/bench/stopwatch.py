"""Milliseconds between marks, on the device where the work is done; the host waits at the end."""

import itertools
import time
from collections.abc import Callable

import torch
from torch import Tensor

FEWEST_STEPS = 3


class Stopwatch:
    """On CUDA marks are events on the current stream, so that marking does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._seconds: list[float] = []

    def mark(self) -> None:
        """Now; on CUDA: when all that was queued is done."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._seconds.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        """Of each stretch from one mark to the next, all of them over."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return [
                before.elapsed_time(after) for before, after in itertools.pairwise(self._events)
            ]
        marks = self._seconds
        return [1e3 * (after - before) for before, after in itertools.pairwise(marks)]


def time_steps(
    run: Callable[[int], Tensor], device: torch.device, *, warm_up: int, steps: int, seconds: float
) -> list[float]:
    """Milliseconds of each measured step, queued one behind the other.

    As many as the last one of the warm-up lets expect within `seconds`: FEWEST_STEPS at least,
    `steps` at most.
    """
    taken = 0.0
    for number in range(warm_up):
        start = time.perf_counter()
        run(number).item()  # waits for the device
        taken = time.perf_counter() - start
    count = max(FEWEST_STEPS, min(steps, int(seconds / taken)))
    stopwatch = Stopwatch(device)
    stopwatch.mark()
    for number in range(warm_up, warm_up + count):
        run(number)
        stopwatch.mark()
    return stopwatch.milliseconds()
