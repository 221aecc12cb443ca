"""A signal asks the study to end: what trains is stopped, marked and repeated later."""

import os
import signal
from types import FrameType

from mlperf_bert.common.errors import INTERRUPTED, say
from mlperf_bert.signals.signal_watch import CaughtSignals


class StopSignal(CaughtSignals):
    """Says what a signal does; a second Ctrl-C ends at once, and what trains dies with this."""

    @property
    def came(self) -> bool:
        """Whether a signal asked for the end."""
        return self.first != 0

    def note(self, number: int, frame: FrameType | None) -> None:
        """Obey it."""
        super().note(number, frame)
        if self.at_once:
            os._exit(INTERRUPTED)
        name = signal.Signals(number).name
        say(f"{name}: ending what trains; the same command goes on with the study")
