"""A signal asks the study to end: what trains is stopped, marked and repeated later."""

import os
import signal
from types import FrameType
from typing import Any, Self

from mlperf_bert.common.errors import INTERRUPTED, say
from mlperf_bert.signals.signal_watch import catch, give_back


class StopSignal:
    """Notes the signals while used as a context; a second Ctrl-C ends at once.

    What trains then dies with this process.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._previous = catch(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        give_back(self._previous)

    @property
    def came(self) -> bool:
        """Whether a signal asked for the end."""
        return self.name is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.name == "SIGINT" and number == signal.SIGINT:
            os._exit(INTERRUPTED)
        self.name = signal.Signals(number).name
        say(f"{self.name}: ending what trains; the same command goes on with the study")
