"""Prints the progress of a run, with the same lines on a terminal and in a file.

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
    """Prints lines on the progress of some work, to stderr or stdout.

    If the disk is full or the pipe is closed, a line is lost, but the work continues. If `speaks`
    is false, it prints nothing. This is so on all ranks except one.
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
        """Print `doing()` after each longer silence, until the end of the context.

        A silence is 2 s long on a terminal, because a person waits there, and 15 s elsewhere.
        `doing` is called in its own thread.
        """
        if self._speaks:
            threading.Thread(target=self._tick, args=(doing,), name="ticks", daemon=True).start()
        return self

    def line(self, text: str) -> None:
        """Print a line."""
        self._spoke_s = time.monotonic()
        self._print(text)

    def is_due(self) -> bool:
        """Return True every 10 s, for work with too many steps to print each."""
        now_s = time.monotonic()
        if not self._speaks or now_s < self._next_s:
            return False
        self._next_s = now_s + LINE_INTERVAL_S
        return True

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
        """The stream to print to; None if it was closed when the process started."""
        return sys.stderr if self._stderr else sys.stdout

    def _print(self, text: str) -> None:
        if self._speaks:
            with suppress(OSError):  # full disk, closed pipe or closed terminal
                print(f"{text}\n", end="", file=self._stream, flush=True)  # one write


def count_bytes(
    total_files: int,
    total_bytes: int,
    *,
    words: tuple[str, str] = ("prepared", "texts"),
    stream: TextIO | None = None,
) -> Callable[[int], None]:
    """Return a function that counts finished files and prints the progress.

    Call it with the number of bytes of each finished file. Its lines have the form `prepared 3 of 7
    texts` with these `words`, then the rate and the remaining time. They go to `stream` (default:
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
    """Format seconds like a clock, for example `1:02:03` for 3,723 seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class Reporter:
    """Prints lines on rank 0 and copies them to `stdout.log`.

    On other ranks `log_path` is None, and nothing is printed. A resumed run appends to the copy
    (`continued`). `shown` is the printer that was used during start-up, if any.
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
        """Print a line and copy it to the file."""
        self._shown.line(text)
        self._to_file(text)

    def progress(self, record: dict[str, Any], accuracy: float | None) -> None:
        """Print a metrics record as a line; `accuracy` is that of the last evaluation."""
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
    """Format one metrics record as a line, with the remaining time if it is known."""
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
