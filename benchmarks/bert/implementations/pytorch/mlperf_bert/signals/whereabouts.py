"""A rank's current activity, and threads that notice when it, or a step, hangs."""

import math
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Literal, Self

from mlperf_bert.common.errors import LOST, say_error

Doing = Literal["start-up", "warm-up", "batch", "step", "evaluation", "checkpoint", "end"]

_IN_WORDS: dict[Doing, str] = {
    "start-up": "start-up",
    "warm-up": "warm-up, which compiles kernels",
    "batch": "waiting for the batch of step {:d}",
    "step": "step {:d}",
    "evaluation": "evaluation after {:,d} samples",
    "checkpoint": "checkpoint of step {:d}",
    "end": "end of the run",
}
_MUST_GO_ON: frozenset[Doing] = frozenset({"batch", "step", "evaluation"})  # disks may be slow

POLL_S = 0.5


class Whereabouts:
    """The current activity: set by the training thread, read by others; begins with start-up."""

    def __init__(self) -> None:
        self._now: tuple[int, Doing, int] = (0, "start-up", 0)  # one object: read as a whole

    def at(self, doing: Doing, number: int | None = None) -> None:
        """Set the activity; `number` is the step's, or for an evaluation the samples."""
        self._now = (self._now[0] + 1, doing, number or 0)

    @property
    def in_start_up(self) -> bool:
        """True before the first step."""
        return self._now[1] in ("start-up", "warm-up")

    @property
    def in_words(self) -> str:
        """The activity in words, like `step 37`."""
        _, doing, number = self._now
        return _IN_WORDS[doing].format(number)

    def sign_of_life(self) -> int | None:
        """A number that changes with each `at`; None in an activity without a time limit."""
        count, doing, _ = self._now
        return count if doing in _MUST_GO_ON else None


class Watch:
    """A context whose own thread looks for signs of life.

    Time is counted in looks: a process that was stopped and continued (SIGSTOP, SIGCONT) did not
    look meanwhile, so it does not count as hung.

    Args:
        sign_of_life: returns another number if something has happened since the last look; None if
            there is nothing to wait for.
        timeout_s: seconds without a new sign after which it counts as hung.
        on_hang: called in the thread with that sign and the seconds, at every look from then on
            until it returns True, which ends the watch.
        poll_s: seconds between two looks.
    """

    def __init__(
        self,
        sign_of_life: Callable[[], int | None],
        timeout_s: float,
        on_hang: Callable[[int, float], bool],
        *,
        poll_s: float = POLL_S,
    ) -> None:
        self._sign_of_life = sign_of_life
        self._most_looks = math.ceil(timeout_s / poll_s)
        self._on_hang = on_hang
        self._poll_s = poll_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        last, looks = None, 0
        while not self._over.wait(self._poll_s):
            sign = self._sign_of_life()
            looks = looks + 1 if sign == last else 0
            last = sign
            is_silent = sign is not None and looks >= self._most_looks
            if sign is None or not is_silent or self._over.is_set():
                continue
            if self._on_hang(sign, looks * self._poll_s):
                return


class Heartbeat(Watch):
    """A context that watches the steps queued on a device.

    NCCL's own watchdog cannot see what a graph replays.

    Args:
        timeout_s: seconds after the end of a step at which the next counts as hung.
        on_hang: called in a thread, once, with the number of that step.
        poll_s: seconds between two looks.
    """

    def __init__(
        self, timeout_s: float, on_hang: Callable[[int], None], *, poll_s: float = POLL_S
    ) -> None:
        def say(step: int, seconds: float) -> bool:
            on_hang(step)
            return True

        self._steps: deque[tuple[int, Callable[[], bool]]] = deque()
        super().__init__(self._oldest, timeout_s, say, poll_s=poll_s)

    def watch(self, step: int, is_done: Callable[[], bool]) -> None:
        """Start watching a step; `is_done` says without waiting whether it has ended."""
        self._steps.append((step, is_done))

    def _oldest(self) -> int | None:
        """The step that the device is computing."""
        while self._steps and self._steps[0][1]():
            self._steps.popleft()
        return self._steps[0][0] if self._steps else None


def end_process(line: str) -> None:
    """Print why and exit at once: a thread that waits for the device cannot be asked to leave."""
    say_error(line)
    os._exit(LOST)
