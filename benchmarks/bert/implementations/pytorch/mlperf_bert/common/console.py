"""Output through rich: the console, and a progress line."""

import errno
import os
import threading
import time
from collections.abc import Callable
from typing import NoReturn, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

LIVE_INTERVAL_S = 0.2
LINE_INTERVAL_S = 10.0
SILENCE_S = 2.0, 15.0  # on a terminal, in a file
TICK_S = 1.0


class OutputConsole(Console):
    """A console that raises BrokenPipeError once when a pipe's reader has gone, and then is silent.

    rich's own exits with status 1, so `| head` would end a training.
    """

    def on_broken_pipe(self) -> NoReturn:
        """Called by rich instead of raising the error."""
        self.quiet = True
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    def forget(self) -> None:
        """Drop output that could not be written; otherwise rich retries all of it each time."""
        was_quiet, self.quiet = self.quiet, True
        self.print()
        self.quiet = was_quiet


class LiveLine:
    """Progress of some work: one line in place on a terminal, plain lines elsewhere.

    A full disk or a closed pipe loses the line and never ends the work.

    It goes to stderr, or else to stdout. Without `speaks` it prints nothing, as on all ranks but
    one. Without `moves` it prints plain lines on a terminal too, for processes that share one.
    """

    def __init__(self, *, stderr: bool = True, speaks: bool = True, moves: bool = True) -> None:
        self._speaks = speaks
        self._console = OutputConsole(stderr=stderr, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self.is_live = speaks and moves and self._console.is_terminal
        self._interval_s = LIVE_INTERVAL_S if self.is_live else LINE_INTERVAL_S
        self._spoke_s = time.monotonic()
        self._next_s = self._spoke_s + self._interval_s
        self._last = ""
        self._over = threading.Event()

    def __enter__(self) -> Self:
        if self.is_live and not self._live.is_started:
            self._try(self._live.start)
            self._try(lambda: self._console.show_cursor(True))  # the process may end without `stop`
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._try(self._live.stop)

    def end(self) -> None:
        """End the line that is shown in place; what is printed from now on stays."""
        self.__exit__()

    def never_silent(self, doing: Callable[[], str]) -> Self:
        """Enter the context, and until its end print `doing()` whenever nothing else was printed.

        On a terminal it appears after 2 s beside the shown text, every second; elsewhere as a line
        after 15 s. `doing` is called in its own thread.
        """
        self.__enter__()
        if self._speaks:
            threading.Thread(target=self._tick, args=(doing,), name="ticks", daemon=True).start()
        return self

    def _tick(self, doing: Callable[[], str]) -> None:
        said_s = 0.0
        while not self._over.wait(TICK_S):
            now_s, spoke_s = time.monotonic(), self._spoke_s
            if now_s - max(spoke_s, said_s) < SILENCE_S[not self.is_live]:
                continue
            text = f"... {doing()} ({as_clock(now_s - spoke_s)})"
            if self.is_live:
                self._show(f"{self._last} {text}".lstrip())
            else:
                said_s = now_s
                self._print(text)

    def update(self, text: str) -> None:
        """Replace the shown text on a terminal; elsewhere, print a line."""
        self._spoke_s, self._last = time.monotonic(), text
        if self.is_live:
            self._show(text)
        else:
            self._print(text)

    def line(self, text: str) -> None:
        """Print a line that stays."""
        self._spoke_s = time.monotonic()
        self._print(text)

    def _show(self, text: str) -> None:
        self._try(lambda: self._live.update(Text(text), refresh=True))

    def _print(self, text: str) -> None:
        self._try(lambda: self._console.print(Text(text), soft_wrap=True))

    @property
    def width(self) -> int | None:
        """Columns of the terminal; None elsewhere."""
        return self._console.width if self.is_live else None

    def is_due(self) -> bool:
        """True if the last update is 0.2 s old on a terminal, 10 s elsewhere."""
        now_s = time.monotonic()
        if not self._speaks or now_s < self._next_s:
            return False
        self._next_s = now_s + self._interval_s
        return True

    def _try(self, action: Callable[[], object]) -> None:
        if self._speaks:
            try:
                action()
            except OSError:  # full disk, closed pipe, or a terminal that is gone
                self._console.forget()


class Counted(LiveLine):
    """A progress line on stderr such as `planned 3 of 9 steps, 12 steps/s, 1 s left`."""

    def __init__(self, done: str, unit: str, total: int) -> None:
        super().__init__()
        self._words = done, unit
        self._total = total
        self._count = 0
        self._start_s = time.monotonic()

    def advance(self) -> None:
        """Count one more as done."""
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
    """Seconds in clock form: `1:02:03` for 3,723 seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
