"""Progress in words: a line for each record, the same on a terminal and in a file.

This file is imported before torch, so that nobody waits in silence while torch is loaded.
"""

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TextIO

from mlperf_bert.files import LineFile

LINE_INTERVAL_S = 10.0
SILENCE_S = 2.0, 15.0  # on a terminal, in a file
TICK_S = 1.0


class ProgressLines:
    """Progress of some work, in lines on stderr or else on stdout.

    A full disk or a closed pipe loses a line and never ends the work. Without `speaks` it prints
    nothing, as on all ranks but one.
    """

    def __init__(self, *, stderr: bool = True, speaks: bool = True) -> None:
        self._stderr, self._speaks = stderr, speaks
        self._spoke_s = time.monotonic()
        self._next_s = self._spoke_s + LINE_INTERVAL_S
        self._over = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def never_silent(self, doing: Callable[[], str]) -> Self:
        """Until the end of the context, print `doing()` whenever nothing was printed for a while.

        That is 2 s on a terminal, where a person waits, and 15 s elsewhere. `doing` is called in
        its own thread.
        """
        if self._speaks:
            threading.Thread(target=self._tick, args=(doing,), name="ticks", daemon=True).start()
        return self

    def line(self, text: str) -> None:
        """Print a line."""
        self._spoke_s = time.monotonic()
        self._print(text)

    def is_due(self) -> bool:
        """True every 10 s, for work whose every step would be too many lines."""
        now_s = time.monotonic()
        if not self._speaks or now_s < self._next_s:
            return False
        self._next_s = now_s + LINE_INTERVAL_S
        return True

    def _tick(self, doing: Callable[[], str]) -> None:
        said_s = 0.0
        stream = self._stream
        patience_s = SILENCE_S[stream is None or not stream.isatty()]
        while not self._over.wait(TICK_S):
            now_s, spoke_s = time.monotonic(), self._spoke_s
            if now_s - max(spoke_s, said_s) >= patience_s:
                said_s = now_s
                self._print(f"... {doing()} ({as_clock(now_s - spoke_s)})")

    @property
    def _stream(self) -> TextIO | None:
        """None if it was closed when the process began."""
        return sys.stderr if self._stderr else sys.stdout

    def _print(self, text: str) -> None:
        if self._speaks:
            with suppress(OSError):  # full disk, closed pipe, or a terminal that is gone
                print(f"{text}\n", end="", file=self._stream, flush=True)  # one write


def count_bytes(
    total_files: int,
    total_bytes: int,
    *,
    words: tuple[str, str] = ("prepared", "texts"),
    stream: TextIO | None = None,
) -> Callable[[int], None]:
    """A function to call with the bytes of each finished file; it prints how much is done.

    Its lines say `words[0] 3 of 7 words[1]`, the rate and the remaining time, on `stream` (default:
    stdout).
    """
    files = num_bytes_done = 0
    start_s, last_line_s = time.monotonic(), float("-inf")

    def advance(num_bytes: int) -> None:
        nonlocal files, num_bytes_done, last_line_s
        files += 1
        num_bytes_done += num_bytes
        now_s = time.monotonic()
        if files < total_files and now_s - last_line_s < LINE_INTERVAL_S:
            return
        last_line_s = now_s
        rate = num_bytes_done / max(now_s - start_s, 1e-9)
        left_s = (total_bytes - num_bytes_done) / max(rate, 1e-9)
        line = f"{words[0]} {files} of {total_files} {words[1]}, "
        line += f"{rate / 1e6:.2f} MB/s, {left_s:.0f} s left"
        print(line, file=stream, flush=True)

    return advance


def as_clock(seconds: float) -> str:
    """Seconds in clock form: `1:02:03` for 3,723 seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class Reporter:
    """Prints on rank 0 and keeps a copy in `stdout.log`; silent (no path) on other ranks.

    A resumed run appends to the copy (`continued`). `shown` has printed the start.
    """

    def __init__(
        self,
        log_path: Path | None,
        max_steps: int,
        *,
        continued: bool = False,
        shown: ProgressLines | None = None,
    ) -> None:
        self._max_steps = max_steps
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
        """Print a line that stays."""
        self._shown.line(text)
        self._to_file(text)

    def progress(self, record: dict[str, Any], accuracy: float | None) -> None:
        """Print a metrics record as a line."""
        if self._file:
            self.line(progress_line(record, accuracy, self._max_steps))

    def _to_file(self, text: str) -> None:
        if self._file:
            self._file.append(f"{time.strftime('%H:%M:%S')} {text}")


def progress_line(record: dict[str, Any], accuracy: float | None, max_steps: int) -> str:
    """One metrics record in words; its remaining time runs to `max_steps`, an upper bound."""
    seconds_left = (max_steps - record["step"]) * record["step_ms"] / 1e3
    shown_accuracy = "-" if accuracy is None else f"{accuracy:.4f}"
    parts = (
        f"step {record['step']}/{max_steps}",
        f"{record['samples_per_s']:,.0f} samples/s",
        f"{record['tokens_per_s']:,.0f} tokens/s",
        f"loss {record['loss']:.4f}",
        f"lr {record['learning_rate']:.3e}",
        f"accuracy {shown_accuracy}",
        f"at most {as_clock(seconds_left)} left",
    )
    return "  ".join(parts)
