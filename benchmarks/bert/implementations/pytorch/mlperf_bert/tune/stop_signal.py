"""A signal asks the study to end: what trains is stopped, marked and repeated later."""

import os
import signal
from types import FrameType
from typing import Any, Self

from mlperf_bert.exit_statuses import INTERRUPTED
from mlperf_bert.messages import say

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignal:
    """Notes SIGTERM, SIGINT and SIGUSR1 while used as a context; a second Ctrl-C ends at once.

    What trains then dies with this process.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def came(self) -> bool:
        """Whether a signal asked for the end."""
        return self.name is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.name == "SIGINT" and number == signal.SIGINT:
            os._exit(INTERRUPTED)
        self.name = signal.Signals(number).name
        say(f"{self.name}: ending what trains; the same command goes on with the study")
