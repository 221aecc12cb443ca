"""Print the progress of a run. The lines on a terminal and in a file are the same.

This file is imported before torch, so that it can print while torch is loaded.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TextIO

from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.files import LineFile
from mlperf_bert.run.remaining import EVALUATIONS, NEWEST, Remaining, estimate_remaining

LINE_INTERVAL_S = 10.0
SILENCE_S = 2.0, 15.0  # on a terminal, in a file
TICK_S = 1.0


class ProgressLines:
    """A printer of lines about the progress of a task, to stderr or stdout.

    If the disk is full or the pipe is closed, a line is lost and the task continues. If `speaks` is
    False, the object prints nothing. Only one rank of a run prints.
    """

    def __init__(self, *, stderr: bool = True, speaks: bool = True) -> None:
        self._stderr, self._speaks = stderr, speaks
        self._spoke_s = time.monotonic()
        self._latest = ""  # the line or the activity that was reported last
        self._next_s = self._spoke_s + LINE_INTERVAL_S
        self._over = threading.Event()
        self._starts_s: dict[str, float] = {}  # when each activity began to be counted

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def never_silent(self, doing: Callable[[], str] | None = None) -> Self:
        """Print `doing()` whenever nothing was printed for a while, until the with block ends.

        Without `doing`, the text is the latest line or activity. The wait is 2 s on a terminal,
        where a person is watching, and 15 s otherwise. A separate thread calls `doing`.
        """
        if self._speaks:
            words = doing or (lambda: self._latest)
            threading.Thread(target=self._tick, args=(words,), name="ticks", daemon=True).start()
        return self

    def line(self, text: str) -> None:
        """Print a line."""
        self._spoke_s = time.monotonic()
        self._latest = text
        self._print(text)

    def is_due(self) -> bool:
        """Return True once every 10 s, for tasks with too many steps to print a line for each."""
        now_s = time.monotonic()
        if not self._speaks or now_s < self._next_s:
            return False
        self._next_s = now_s + LINE_INTERVAL_S
        return True

    def counted(self, activity: str, unit: str, done: float, total: float) -> None:
        """Print how much of an activity is done, its rate and its remaining time, if a line is due.

        A call with `done` = 0 starts the time of the activity.
        """
        if done == 0:
            self._starts_s[activity] = time.monotonic()
            self._latest = activity
        elif self.is_due():
            rate = done / max(time.monotonic() - self._starts_s[activity], 1e-9)
            left = as_clock(max(0, total - done) / rate)
            amount = f"{done:,.0f} of {total:,.0f} {unit}"
            self.line(f"{activity}: {amount}, {rate:,.1f} per s, {left} left")
            self._latest = activity

    def counter(self, activity: str, unit: str, total: float) -> Callable[[float], None]:
        """Return a function that adds to the count of an activity, and calls `counted`.

        The time of the activity starts when that function is first called, which must be with 0.
        """
        done = 0.0

        def advance(count: float) -> None:
            nonlocal done
            done += count
            self.counted(activity, unit, done, total)

        return advance

    def _tick(self, doing: Callable[[], str]) -> None:
        last_tick_s = 0.0
        stream = self._stream
        patience_s = SILENCE_S[stream is None or not stream.isatty()]
        while not self._over.wait(TICK_S):
            now_s, spoke_s = time.monotonic(), self._spoke_s
            if now_s - max(spoke_s, last_tick_s) >= patience_s:
                last_tick_s = now_s
                self._print(f"... {doing()} ({as_clock(now_s - spoke_s)})")

    @property
    def _stream(self) -> TextIO | None:
        """The stream to print to, or None if it was closed when the process started."""
        return sys.stderr if self._stderr else sys.stdout

    def _print(self, text: str) -> None:
        if self._speaks:
            with suppress(OSError):  # full disk, closed pipe or closed terminal
                print(f"{text}\n", end="", file=self._stream, flush=True)  # one write


def as_clock(seconds: float) -> str:
    """Format a duration in seconds as H:MM:SS, for example 3,723 s as `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class Reporter:
    """A printer of lines on rank 0, which also writes them to the run's `stdout.log`.

    On other ranks `log_path` is None, and the reporter prints nothing. If `continued` is True, the
    reporter appends to the file of the run that is resumed. `shown` is the printer that was used
    during start-up, or None.
    """

    def __init__(
        self,
        log_path: Path | None,
        config: RunConfig,
        *,
        continued: bool = False,
        shown: ProgressLines | None = None,
    ) -> None:
        self._config = config
        self._records = deque[dict[str, Any]](maxlen=NEWEST)
        self._evaluations = deque[tuple[float, float]](maxlen=EVALUATIONS)
        self._shown = shown or ProgressLines(stderr=False, speaks=log_path is not None)
        warn = self._shown.line
        self._file = LineFile(log_path, warn, continued=continued) if log_path else None

    def __enter__(self) -> Self:
        self._shown.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._shown.__exit__(*error)
        if self._file:
            self._file.close()

    def line(self, text: str) -> None:
        """Print a line, and write it to `stdout.log` with the time."""
        self._shown.line(text)
        self._to_file(text)

    def progress(self, record: dict[str, Any], accuracy: float | None) -> None:
        """Print a metrics record as a progress line.

        `accuracy` is the accuracy of the last evaluation, or None.
        """
        if not self._file:
            return
        self._records.append(record)
        if record["mlm_accuracy"] is not None:
            self._evaluations.append((record["samples"], record["mlm_accuracy"]))
        remaining = estimate_remaining(self._config, [*self._records], [*self._evaluations])
        self.line(progress_line(record, accuracy, self._config.max_steps, remaining))

    def _to_file(self, text: str) -> None:
        if self._file:
            self._file.append(f"{time.strftime('%H:%M:%S')} {text}")


def progress_line(
    record: dict[str, Any], accuracy: float | None, max_steps: int, remaining: Remaining | None
) -> str:
    """Format a metrics record as a progress line, with the remaining time if it is known.

    `accuracy` is the accuracy of the last evaluation, or None.
    """
    shown_accuracy = "-" if accuracy is None else f"{accuracy:.4f}"
    parts = (
        f"step {record['step']}/{max_steps}",
        f"{record['samples_per_s']:,.0f} samples/s",
        f"{record['tokens_per_s']:,.0f} tokens/s",
        f"loss {record['loss']:.4f}",
        f"lr {record['learning_rate']:.3e}",
        f"accuracy {shown_accuracy}",
        remaining.in_words(as_clock) if remaining else "",
    )
    return "  ".join(filter(None, parts))
