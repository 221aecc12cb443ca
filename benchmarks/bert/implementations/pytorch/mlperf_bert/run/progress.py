"""What a person sees of a run: a live line on a terminal, plain lines elsewhere, all on file."""

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.live import Live
from rich.text import Text

from mlperf_bert.common.console import OutputConsole
from mlperf_bert.run.metrics_file import LineFile


class Reporter:
    """Prints on rank 0 and keeps a copy in `stdout.log`; silent (no path) on the other ranks.

    The copy of a resumed run goes on (`continued`).
    """

    def __init__(self, log_path: Path | None, max_steps: int, *, continued: bool = False) -> None:
        self._max_steps = max_steps
        console = OutputConsole(highlight=False)
        self._file = LineFile(log_path, self._print, continued=continued) if log_path else None
        self._console = console
        self._speaks = log_path is not None
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live_is_on = bool(log_path) and console.is_terminal

    def __enter__(self) -> Self:
        if self._live_is_on:
            self._show(self._live.start)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._show(self._live.stop)
        if self._file:
            self._file.close()

    def line(self, text: str) -> None:
        """A line that stays."""
        self._print(text)
        self._to_file(text)

    def progress(self, record: dict[str, Any], accuracy: float | None) -> None:
        """Show a metrics record: in place on a terminal, else as a line."""
        if not self._speaks:
            return
        text = progress_line(record, accuracy, self._max_steps)
        if self._live_is_on:
            self._show(lambda: self._live.update(Text(text), refresh=True))
            self._to_file(text)
        else:
            self.line(text)

    def _print(self, text: str) -> None:
        self._show(lambda: self._console.print(Text(text), soft_wrap=True))

    def _show(self, action: Callable[[], object]) -> None:
        if self._speaks:
            try:
                action()
            except OSError:  # of a disk or a pipe that takes no more, or a terminal that is gone
                self._console.forget()

    def _to_file(self, text: str) -> None:
        if self._file:
            self._file.append(f"{time.strftime('%H:%M:%S')} {text}")


def progress_line(record: dict[str, Any], accuracy: float | None, max_steps: int) -> str:
    """One metrics record in words; the remaining time is that to `max_steps`, so an upper bound."""
    seconds_left = int((max_steps - record["step"]) * record["step_ms"] / 1e3)
    minutes, seconds = divmod(seconds_left, 60)
    hours, minutes = divmod(minutes, 60)
    shown_accuracy = "-" if accuracy is None else f"{accuracy:.4f}"
    return "  ".join(
        [
            f"step {record['step']}/{max_steps}",
            f"{record['samples_per_s']:,.0f} samples/s",
            f"{record['tokens_per_s']:,.0f} tokens/s",
            f"loss {record['loss']:.4f}",
            f"lr {record['learning_rate']:.3e}",
            f"accuracy {shown_accuracy}",
            f"at most {hours}:{minutes:02d}:{seconds:02d} left",
        ]
    )
