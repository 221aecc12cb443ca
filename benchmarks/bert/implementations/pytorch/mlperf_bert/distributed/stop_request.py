"""The ranks' agreement on the step after which all of them stop because of a signal.

SLURM sends SIGTERM at `scancel` and at the time limit, and SIGUSR1 before the time limit if the job
asks for it (`sbatch --signal`). `docker stop` sends SIGTERM, Ctrl-C sends SIGINT, and a terminal
that closes sends SIGHUP. A signal may reach the ranks at different steps. If one rank stopped by
itself, the others would wait for it forever.
"""

import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Self

import torch
import torch.distributed as dist

from mlperf_bert.distributed.signal_watch import CaughtSignals

CHECK_S = 1.0  # approximate number of seconds between two agreements
MOST_STEPS = 1000  # maximum number of steps between two agreements


class StopRequest(CaughtSignals):
    """The common decision of all ranks about the signals that they received.

    To agree, the ranks all-reduce the signal's number and the seconds per step, about once per
    second. On CUDA the result is read at the next agreement, so that the host does not wait for the
    device. SLURM and shells may send a signal twice, and the second one must not end a rank that is
    saving. Only a second Ctrl-C ends such a rank (signal_watch.py).
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
        """The seconds per step of the slowest rank, or None before the first agreement.

        The value is the same on all ranks.
        """
        return self._step_s

    def agreed(self, step: int) -> str | None:
        """Return the name of the signal that makes all ranks stop after this step.

        Returns None if the ranks continue. All ranks must call this method after each step.
        """
        if self._checked_at is None:  # the first step of this process, not always the run's
            self._checked_at = (step - 1, self._entered_at)
        if self._world_size == 1:
            self._measure(step, self._checked_at)
            return _name(self.first)
        if step < self._next_check:
            return None
        signal_number, step_s = self._largest_of_ranks(step, self._checked_at)
        self._next_check = step + max(1, min(MOST_STEPS, int(CHECK_S / max(step_s, 1e-9))))
        return _name(int(signal_number))

    def exclude(self, seconds: float) -> None:
        """Exclude `seconds` spent on other work, such as an evaluation, from the time of a step."""
        if self._checked_at is not None:
            step, then = self._checked_at
            self._checked_at = (step, then + seconds)

    def _measure(self, step: int, checked_at: tuple[int, float]) -> None:
        """Update the measured seconds per step of a single rank, about once per CHECK_S seconds."""
        (before, then), now = checked_at, self._clock()
        if now - then >= CHECK_S:
            self._step_s = (now - then) / (step - before)
            self._checked_at = (step, now)

    def _largest_of_ranks(self, step: int, checked_at: tuple[int, float]) -> tuple[float, float]:
        """Return the largest signal number of all ranks, and the largest seconds per step.

        On CUDA both numbers are those of the previous agreement.
        """
        (before, then), now = checked_at, self._clock()
        self._checked_at = (step, now)
        agreement = _Agreement((float(self.first), (now - then) / (step - before)), self._device)
        ready, self._pending = self._pending, agreement
        if self._device.type == "cpu":
            ready = agreement
        if ready is None:  # the first agreement on CUDA, whose outcome is read after a step
            return 0.0, CHECK_S
        signal_number, self._step_s = ready.outcome()
        return signal_number, self._step_s

    def note(self, number: int, frame: FrameType | None) -> None:
        """Record a signal. If several arrive, the one with the largest number is kept (SIGTERM)."""
        self.first = max(self.first, number)


class _Agreement:
    """An all-reduce that was started to find the maxima of two numbers over the ranks."""

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
        """Wait for the all-reduce, and return the maxima of the two numbers."""
        if self._event is not None:
            self._event.synchronize()  # does not block, because it was recorded about CHECK_S ago
        first, second = self._host.tolist()
        return first, second


def _name(number: int) -> str | None:
    return signal.Signals(number).name if number else None
