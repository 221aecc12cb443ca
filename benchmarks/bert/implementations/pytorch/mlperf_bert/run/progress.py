"""A run's progress for a person: a line for each record, printed and kept in a file."""

import time
from pathlib import Path
from typing import Any, Self

from mlperf_bert.files import LineFile
from mlperf_bert.run.console import ProgressLines, as_clock


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
