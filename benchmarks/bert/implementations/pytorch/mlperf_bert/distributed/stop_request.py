"""Agreement of the ranks on the step after which all end, when a signal asks for it.

SLURM sends SIGTERM at `scancel` and at the time limit, and SIGUSR1 if a job asks for it ahead of
that (`sbatch --signal`); `docker stop` sends SIGTERM, Ctrl-C SIGINT, a closed terminal SIGHUP.
Signals do not reach all ranks between the same two steps, and a rank that left by itself would
leave the others waiting.
"""

import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Self

import torch
import torch.distributed as dist

from mlperf_bert.distributed.signal_watch import CaughtSignals

CHECK_S = 1.0  # seconds between two agreements, about
MOST_STEPS = 1000  # steps between two agreements


class StopRequest(CaughtSignals):
    """One decision on all ranks about the signals they received.

    An agreement is one all-reduce of two numbers, about once a second. On CUDA its outcome is read
    at the next one, so that the host does not wait for the device. SLURM and a shell may send a
    signal twice, and the second must not end a rank that is saving (a second Ctrl-C may:
    signal_watch.py).
    """

    keeps_them = True

    def __init__(
        self,
        world_size: int,
        device: torch.device,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._world_size = world_size
        self._device = device
        self._clock = clock
        self._step_s: float | None = None
        self._pending: _Agreement | None = None
        self._entered_at = 0.0
        self._checked_at: tuple[int, float] | None = None  # step, time
        self._next_check = 0

    def __enter__(self) -> Self:
        self._entered_at = self._clock()
        return super().__enter__()

    @property
    def step_s(self) -> float | None:
        """Seconds a step of the slowest rank, the same on all; None before an agreement."""
        return self._step_s

    def agreed(self, step: int) -> str | None:
        """The signal's name if all ranks end after this step; each calls it after each step."""
        if self._checked_at is None:  # the first step of this process, not always the run's
            self._checked_at = (step - 1, self._entered_at)
        if self._world_size == 1:
            self._measure_alone(step, self._checked_at)
            return _name(self.first)
        if step < self._next_check:
            return None
        signal_number, step_s = self._largest_of_ranks(step, self._checked_at)
        self._next_check = step + max(1, min(MOST_STEPS, int(CHECK_S / max(step_s, 1e-9))))
        return _name(int(signal_number))

    def _measure_alone(self, step: int, checked_at: tuple[int, float]) -> None:
        (before, then), now = checked_at, self._clock()
        if now - then >= CHECK_S:
            self._step_s = (now - then) / (step - before)
            self._checked_at = (step, now)

    def _largest_of_ranks(self, step: int, checked_at: tuple[int, float]) -> tuple[float, float]:
        """The largest signal number and seconds a step; on CUDA from the previous agreement."""
        (before, then), now = checked_at, self._clock()
        self._checked_at = (step, now)
        agreement = _Agreement((float(self.first), (now - then) / (step - before)), self._device)
        ready, self._pending = self._pending, agreement
        if self._device.type == "cpu":
            ready = agreement
        if ready is None:  # the first on CUDA: ask again after the next step
            return 0.0, CHECK_S
        signal_number, self._step_s = ready.outcome()
        return signal_number, self._step_s

    def note(self, number: int, frame: FrameType | None) -> None:
        """Note a signal; the largest number counts, so SIGTERM wins over the others."""
        self.first = max(self.first, number)


class _Agreement:
    """An all-reduce under way: the maximum over ranks of each of two numbers."""

    def __init__(self, own: tuple[float, float], device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        staged = torch.tensor(own, dtype=torch.float64, pin_memory=on_cuda)
        numbers = staged.to(device, non_blocking=True)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        self._host = torch.empty_like(staged, pin_memory=on_cuda).copy_(numbers, non_blocking=True)
        self._event: torch.cuda.Event | None = None
        if on_cuda:
            self._event = torch.cuda.current_stream(device).record_event()

    def outcome(self) -> tuple[float, float]:
        """Both numbers."""
        if self._event is not None:
            self._event.synchronize()  # from a second ago
        first, second = self._host.tolist()
        return first, second


def _name(number: int) -> str | None:
    return signal.Signals(number).name if number else None
