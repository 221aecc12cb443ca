"""A signal asks the run to end: the ranks agree on the step after which all of them do.

SLURM sends SIGTERM at `scancel` and at the time limit, SIGUSR1 where a job asks for it ahead of
that (`sbatch --signal`), `docker stop` SIGTERM. They do not reach all ranks between the same two
steps, and a rank that left by itself would leave the others waiting.
"""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

EXIT_STATUS = 75  # of a run that was asked to end and did, after saving what it had
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
CHECK_S = 1.0  # between two agreements, about
MOST_STEPS = 1000  # between two agreements


class StopRequest:
    """Catches the signals while used as a context, and makes one decision of them on all ranks.

    An agreement is one all-reduce of two numbers, about once a second. On CUDA its outcome is read
    at the next one, so that the host does not wait for the device. Outside the main thread no
    signal can be caught, and none is.
    """

    def __init__(
        self,
        world_size: int,
        device: torch.device,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._world_size = world_size
        self._device = device
        self._clock = clock
        self._seen = 0  # number of the signal that came to this rank
        self._pending: Tensor | None = None
        self._checked_at = (0, 0.0)  # step, time
        self._next_check = 1
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        self._checked_at = (0, self._clock())
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def agreed(self, step: int) -> str | None:
        """The signal's name where all ranks end after this step; called by each after each step."""
        if self._world_size == 1:
            return _name(self._seen)
        if step < self._next_check:
            return None
        signal_number, step_s = self._largest_of_ranks(step)
        self._next_check = step + max(1, min(MOST_STEPS, int(CHECK_S / max(step_s, 1e-9))))
        return _name(int(signal_number))

    def _largest_of_ranks(self, step: int) -> tuple[float, float]:
        """Of signal number and seconds a step; on CUDA what the agreement before found."""
        (before, then), now = self._checked_at, self._clock()
        self._checked_at = (step, now)
        own = (float(self._seen), (now - then) / max(1, step - before))
        numbers = torch.tensor(own, dtype=torch.float64, device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        ready, self._pending = self._pending, numbers
        if self._device.type == "cpu":
            ready = numbers
        if ready is None:  # the first on CUDA: ask again after the next step
            return 0.0, CHECK_S
        signal_number, step_s = ready.tolist()  # host sync, once a second
        return signal_number, step_s

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._seen = number


def _name(number: int) -> str | None:
    return signal.Signals(number).name if number else None
