"""Progress of a long preparation: a bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

LINE_INTERVAL_S = 10.0


class Advance(Protocol):
    """Call after each finished file."""

    def __call__(self, name: str, num_bytes: int) -> None:
        """Report that the text `name` of `num_bytes` is done."""


@contextmanager
def progress_of(total_files: int, total_bytes: int, *, quiet: bool) -> Iterator[Advance]:
    """Show how much of `total_bytes` of text is done, its rate and the time remaining."""
    console = Console(stderr=True)
    if quiet:
        yield lambda name, num_bytes: None
    elif console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("preparing", total=total_bytes)
            yield lambda name, num_bytes: bar.update(task, advance=num_bytes, description=name)
    else:
        yield _PlainLines(total_files, total_bytes)


class _PlainLines:
    def __init__(self, total_files: int, total_bytes: int) -> None:
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
        line = f"prepared {self._files} of {self._total_files} texts, {rate / 1e6:.2f} MB/s, "
        print(line + f"{left_s:.0f} s left", flush=True)
