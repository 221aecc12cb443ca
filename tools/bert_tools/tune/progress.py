"""What a person sees of a study: a live line on a terminal, plain lines elsewhere, on stderr."""

import time
from collections import deque
from contextlib import suppress
from types import TracebackType
from typing import Self

from rich.live import Live
from rich.text import Text

from bert_tools.tune.objective import Curve
from mlperf_bert.common.console import OutputConsole
from mlperf_bert.common.errors import one_line

_REMEMBERED = 30  # trainings whose mean time foretells the rest


class StudyProgress:
    """Says which trial of how many it is, the best so far, and about how long the rest takes."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._console = OutputConsole(stderr=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._is_live = workers == 1 and self._console.is_terminal  # several would overwrite theirs
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._began = 0.0
        self._doing = ""

    def __enter__(self) -> Self:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def line(self, text: str) -> None:
        """A line that stays."""
        with suppress(OSError):  # of a disk or a pipe that takes no more
            self._console.print(Text(one_line(text)), soft_wrap=True)

    def begins(self, doing: str) -> None:
        """A training begins."""
        self._began = time.monotonic()
        self._doing = doing
        self._show(doing)

    def evaluated(self, curve: Curve, target: float) -> None:
        """It has evaluated."""
        newest = curve[-1]
        self._show(
            f"{self._doing}: accuracy {newest.accuracy:.4f} of {target:g} "
            f"at {newest.samples:,} samples"
        )

    def ended(self, how: str, best: str, remaining: int) -> None:
        """It has ended; so many others are to come."""
        self._seconds.append(time.monotonic() - self._began)
        left_s = remaining * sum(self._seconds) / len(self._seconds) / self._workers
        left = f"about {in_minutes(left_s)} left" if remaining else "the last one"
        self.line(f"{self._doing}: {how}; {best}; {left}")

    def _show(self, text: str) -> None:
        if self._is_live:
            with suppress(OSError):
                self._live.update(Text(text), refresh=True)


def in_minutes(seconds: float) -> str:
    """`1:02:03` h, or `2:03` min."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d} h"
    return f"{minutes}:{rest:02d} min"
