"""How far a measurement has come, on stderr: a live line on a terminal, plain lines elsewhere."""

import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from rich.live import Live
from rich.text import Text

from mlperf_bert.common.console import OutputConsole

LIVE_INTERVAL_S = 0.2
LINE_INTERVAL_S = 10.0


class PlannedSteps:
    """Counts planned steps up to `total`, and says their rate and the time remaining."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._console = OutputConsole(stderr=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._interval_s = LIVE_INTERVAL_S if self._console.is_terminal else LINE_INTERVAL_S
        self._start_s = time.monotonic()
        self._next_s = self._start_s + self._interval_s

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def advance(self) -> None:
        """Another step is planned."""
        self._done += 1
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._interval_s
        rate = self._done / (now_s - self._start_s)
        line = Text(
            f"planned {self._done} of {self._total} steps, {rate:.0f} steps/s, "
            f"{(self._total - self._done) / rate:.0f} s left"
        )
        if self._console.is_terminal:
            self._live.update(line, refresh=True)
        else:
            with suppress(BrokenPipeError):  # nobody reads it: the plan is made all the same
                self._console.print(line, soft_wrap=True)
