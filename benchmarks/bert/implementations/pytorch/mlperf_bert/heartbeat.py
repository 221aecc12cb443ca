"""Ends the process when a step does not end: what a graph replays, NCCL's watchdog cannot see."""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Self

EXIT_STATUS = 70  # of a process that was ended because a step hung
POLL_S = 0.5


class Heartbeat:
    """Watches the steps of a rank from a thread of its own, while used as a context.

    Args:
        timeout_s: seconds after the last sign of life at which a step counts as hung.
        on_hang: called in the thread, once, with the number of that step.
        poll_s: seconds between two looks.
    """

    def __init__(
        self, timeout_s: float, on_hang: Callable[[int], None], *, poll_s: float = POLL_S
    ) -> None:
        self._timeout_s = timeout_s
        self._on_hang = on_hang
        self._poll_s = poll_s
        self._steps: deque[tuple[int, Callable[[], bool]]] = deque()
        self._alive_at = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def watch(self, step: int, is_done: Callable[[], bool]) -> None:
        """From now on, wait for a step: `is_done` says whether it has ended, without waiting."""
        if not self._steps:
            self._alive_at = time.monotonic()
        self._steps.append((step, is_done))

    def _watch(self) -> None:
        while not self._over.wait(self._poll_s):
            while self._steps and self._steps[0][1]():
                self._steps.popleft()
                self._alive_at = time.monotonic()
            if self._steps and time.monotonic() - self._alive_at > self._timeout_s:
                self._on_hang(self._steps[0][0])
                return


def end_process(line: str) -> None:
    """Say why and leave at once: a thread that waits for the device cannot be asked to."""
    sys.stdout.flush()
    print(line, file=sys.stderr, flush=True)
    os._exit(EXIT_STATUS)
