"""Progress over the files of a set: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

LINE_INTERVAL_S = 10.0


@contextmanager
def progress_of(
    total_files: int,
    total_bytes: int,
    *,
    quiet: bool,
    words: tuple[str, str] = ("prepared", "texts"),
    stream: TextIO | None = None,
) -> Iterator[Callable[[str, int], None]]:
    """Show how much of `total_bytes` is done, its rate and the time remaining.

    It yields a function to call with the name and the bytes of each finished file. Plain lines say
    `words[0] 3 of 7 words[1]` on `stream` (default: stdout).
    """
    if quiet:
        yield lambda name, num_bytes: None
        return
    from rich import progress  # without a bar, as in tests on a GPU, rich is not needed
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
        yield _plain_lines(total_files, total_bytes, words, stream or sys.stdout)


def _plain_lines(
    total_files: int, total_bytes: int, words: tuple[str, str], stream: TextIO
) -> Callable[[str, int], None]:
    files = num_bytes_done = 0
    start_s, last_line_s = time.monotonic(), float("-inf")

    def advance(_name: str, num_bytes: int) -> None:
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
