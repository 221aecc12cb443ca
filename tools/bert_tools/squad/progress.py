"""How far a fine-tuning run has come, on stderr: a live line on a terminal, plain lines else."""

import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from rich.live import Live
from rich.text import Text

from mlperf_bert.common.console import OutputConsole

LIVE_INTERVAL_S = 0.2
LINE_INTERVAL_S = 10.0


class TrainingProgress:
    """Says update, rate, loss and the time remaining; nothing where `speaks` is False.

    Args:
        name: of the engine.
        updates: of the run.
        global_batch: windows of each.
        speaks: whether this rank is the one of all that does.
    """

    def __init__(self, name: str, updates: int, global_batch: int, *, speaks: bool) -> None:
        self._name = name
        self._updates = updates
        self._global_batch = global_batch
        self._speaks = speaks
        self._console = OutputConsole(stderr=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._is_live = speaks and self._console.is_terminal
        self._interval_s = LIVE_INTERVAL_S if self._is_live else LINE_INTERVAL_S
        self._began = self._next = 0.0

    def __enter__(self) -> Self:
        if self._is_live:
            self._live.start()
        self._began = time.monotonic()
        self._next = self._began + self._interval_s
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def shown(self, update: int, loss: float) -> None:
        """Another update is done."""
        now = time.monotonic()
        if not self._speaks or (now < self._next and update < self._updates):
            return
        self._next = now + self._interval_s
        line = Text(self._line(update, loss, now - self._began))
        with suppress(OSError):  # nobody reads it: the training goes on
            if self._is_live:
                self._live.update(line, refresh=True)
            else:
                self._console.print(line, soft_wrap=True)

    def _line(self, update: int, loss: float, seconds: float) -> str:
        rate = update / max(seconds, 1e-9)
        left = int((self._updates - update) / rate)
        return (
            f"{self._name}: update {update}/{self._updates}  "
            f"{rate * self._global_batch:,.1f} samples/s  loss {loss:.4f}  "
            f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left"
        )
