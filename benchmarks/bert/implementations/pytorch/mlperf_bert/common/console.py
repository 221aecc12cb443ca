"""What this program prints by rich: its console, and a line that moves."""

import errno
import os
import time
from collections.abc import Callable
from typing import NoReturn, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

LIVE_INTERVAL_S = 0.2
LINE_INTERVAL_S = 10.0


class OutputConsole(Console):
    """Where the reader of a pipe has gone, it raises BrokenPipeError once, and then is quiet.

    rich's own leaves the program with status 1 there: a training would end because of `| head`.
    """

    def on_broken_pipe(self) -> NoReturn:
        """Called by rich in the place of the error."""
        self.quiet = True
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    def forget(self) -> None:
        """Drop what could not be written; else rich keeps it, and tries all of it each time."""
        was_quiet, self.quiet = self.quiet, True
        self.print()
        self.quiet = was_quiet


class LiveLine:
    """How far something has come: one line in place on a terminal, plain lines elsewhere.

    No work ends because nobody can read it: a full disk or a closed pipe loses the line alone.

    It goes to stderr, else to stdout. Who does not speak prints nothing, as all ranks but one; what
    does not move is plain lines on a terminal too, as where several processes share it.
    """

    def __init__(self, *, stderr: bool = True, speaks: bool = True, moves: bool = True) -> None:
        self._speaks = speaks
        self._console = OutputConsole(stderr=stderr, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self.is_live = speaks and moves and self._console.is_terminal
        self._interval_s = LIVE_INTERVAL_S if self.is_live else LINE_INTERVAL_S
        self._next_s = time.monotonic() + self._interval_s

    def __enter__(self) -> Self:
        if self.is_live:
            self._try(self._live.start)
        return self

    def __exit__(self, *_: object) -> None:
        self._try(self._live.stop)

    def update(self, text: str) -> None:
        """Show this in the place of what was shown last; elsewhere than on a terminal, print it."""
        if self.is_live:
            self._try(lambda: self._live.update(Text(text), refresh=True))
        else:
            self.line(text)

    def line(self, text: str) -> None:
        """Print a line that stays."""
        self._try(lambda: self._console.print(Text(text), soft_wrap=True))

    def is_due(self) -> bool:
        """Whether it is time for another update: 0.2 s on a terminal, 10 s elsewhere."""
        now_s = time.monotonic()
        if not self._speaks or now_s < self._next_s:
            return False
        self._next_s = now_s + self._interval_s
        return True

    def _try(self, action: Callable[[], object]) -> None:
        if self._speaks:
            try:
                action()
            except OSError:  # of a disk or a pipe that takes no more, or a terminal that is gone
                self._console.forget()


class Counted(LiveLine):
    """`planned 3 of 9 steps, 12 steps/s, 1 s left`, on stderr: `done`, `total` and `unit`."""

    def __init__(self, done: str, unit: str, total: int) -> None:
        super().__init__()
        self._words = done, unit
        self._total = total
        self._count = 0
        self._start_s = time.monotonic()

    def advance(self) -> None:
        """Another one is done."""
        self._count += 1
        if self.is_due():
            done, unit = self._words
            rate = self._count / (time.monotonic() - self._start_s)
            left_s = (self._total - self._count) / rate
            self.update(
                f"{done} {self._count} of {self._total} {unit}, {rate:.0f} {unit}/s, "
                f"{left_s:.0f} s left"
            )


def as_clock(seconds: float) -> str:
    """`1:02:03` of 3,723 seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
