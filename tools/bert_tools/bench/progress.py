"""Progress of a measurement, shown on stderr with the elapsed and the remaining time.

Building and compiling models can take minutes. While nothing else is printed, a background thread
repeats the current activity with the elapsed time. On a terminal, the thread overwrites the same
line. Otherwise it prints a new line each time, at intervals that grow with the elapsed time.
"""

import shutil
import sys
import threading
import time
from types import TracebackType
from typing import Self, TextIO

TERMINAL_INTERVAL_S = 1.0
LOG_INTERVAL_S = 3.0  # or a tenth of the elapsed time, if that is longer
_ERASE_LINE = "\r\x1b[K"


class Progress:
    """A context manager that prints the progress of a measurement.

    Within its `with` block, a thread repeats the current activity while nothing else is printed.
    """

    def __init__(self, stream: TextIO | None = None, *, log_interval_s: float = LOG_INTERVAL_S):
        """Set the stream to print to, which is stderr by default.

        If the stream is not a terminal, lines are repeated after `log_interval_s` seconds or more.
        """
        self._stream = sys.stderr if stream is None else stream
        self._in_place = self._stream.isatty()
        self._interval_s = TERMINAL_INTERVAL_S if self._in_place else log_interval_s
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="progress", daemon=True)
        self._is_shown_in_place = False
        self._last_printed = time.monotonic()
        self._set("", None, 0)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._erase()

    def start(
        self, activity: str, *, note: str = "", seconds: float | None = None, total: int = 0
    ) -> None:
        """Print the activity that begins now, and repeat it from time to time.

        Args:
            activity: name of the activity, such as "compiling sorted_compiled".
            note: a remark, such as how long the activity usually takes.
            seconds: expected duration, from which the remaining time is computed, or None.
            total: number of steps for which `advance` will be called, or 0 to show no count.
        """
        self._set(activity, seconds, total)
        if seconds is not None:
            note = f"about {seconds:.0f} s"
        self.say(f"{activity} ({note})" if note else activity)

    def advance(self) -> None:
        """Count one finished step of the current activity, without printing."""
        self._num_done += 1

    def say(self, line: str) -> None:
        """Print one line. On a terminal, it replaces the line with the current activity."""
        with self._lock:
            self._erase()
            print(line, file=self._stream, flush=True)
            self._last_printed = time.monotonic()

    def _set(self, activity: str, seconds: float | None, total: int) -> None:
        self._activity, self._seconds, self._total = activity, seconds, total
        self._num_done = 0
        self._started = time.monotonic()

    def _repeat(self) -> None:
        """Print the current activity whenever nothing was printed for some time."""
        while not self._ended.wait(self._interval_s / 4):
            with self._lock:
                now = time.monotonic()
                elapsed = now - self._started
                interval_s = self._interval_s
                if not self._in_place:
                    interval_s = max(interval_s, elapsed / 10)
                if not self._activity or now - self._last_printed < interval_s:
                    continue
                line = self._line(elapsed)
                if self._in_place:
                    width = shutil.get_terminal_size().columns - 1
                    self._stream.write(_ERASE_LINE + line[:width])
                    self._is_shown_in_place = True
                else:
                    self._stream.write(line + "\n")
                self._stream.flush()
                self._last_printed = now

    def _line(self, elapsed: float) -> str:
        """Format the current activity, with its elapsed time, remaining time and finished steps."""
        parts = [f"{elapsed:.0f} s so far"]
        if self._seconds is not None:
            parts.append(f"about {max(0.0, self._seconds - elapsed):.0f} s left")
        if self._total:
            parts.append(f"{self._num_done} of {self._total} steps done")
        return f"{self._activity}: {', '.join(parts)}"

    def _erase(self) -> None:
        """Erase the repeated activity from the terminal, if it is shown there."""
        if self._is_shown_in_place:
            self._stream.write(_ERASE_LINE)
            self._stream.flush()
            self._is_shown_in_place = False
