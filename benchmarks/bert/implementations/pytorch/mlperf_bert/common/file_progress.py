"""Progress over the files of a set: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

LINE_INTERVAL_S = 10.0


class Advance(Protocol):
    """Call after each finished file."""

    def __call__(self, name: str, num_bytes: int) -> None:
        """Report that the text `name` of `num_bytes` is done."""


@contextmanager
def progress_of(
    total_files: int,
    total_bytes: int,
    *,
    quiet: bool,
    words: tuple[str, str] = ("prepared", "texts"),
    stream: TextIO | None = None,
) -> Iterator[Advance]:
    """Show how much of `total_bytes` is done, its rate and the time remaining.

    Plain lines say `words[0] 3 of 7 words[1]` on `stream` (default: stdout).
    """
    if quiet:
        yield lambda name, num_bytes: None
        return
    from rich import progress  # who shows none, as tests on a GPU, needs no rich
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
        )
        with progress.Progress(*columns, console=console) as bar:
            task = bar.add_task(words[0], total=total_bytes)
            yield lambda name, num_bytes: bar.update(task, advance=num_bytes, description=name)
    else:
        yield _PlainLines(total_files, total_bytes, words, stream or sys.stdout)


class _PlainLines:
    def __init__(
        self, total_files: int, total_bytes: int, words: tuple[str, str], stream: TextIO
    ) -> None:
        self._done, self._unit = words
        self._stream = stream
        self._total_files = total_files
        self._total_bytes = total_bytes
        self._files = 0
        self._bytes = 0
        self._start_s = time.monotonic()
        self._last_line_s = float("-inf")

    def __call__(self, name: str, num_bytes: int) -> None:
        self._files += 1
        self._bytes += num_bytes
        now_s = time.monotonic()
        if self._files < self._total_files and now_s - self._last_line_s < LINE_INTERVAL_S:
            return
        self._last_line_s = now_s
        rate = self._bytes / max(now_s - self._start_s, 1e-9)
        left_s = (self._total_bytes - self._bytes) / max(rate, 1e-9)
        line = f"{self._done} {self._files} of {self._total_files} {self._unit}, "
        line += f"{rate / 1e6:.2f} MB/s, {left_s:.0f} s left"
        print(line, file=self._stream, flush=True)
