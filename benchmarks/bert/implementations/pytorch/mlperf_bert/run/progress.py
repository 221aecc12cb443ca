"""A run's progress for a person: a live line on a terminal, else plain lines; kept in a file."""

import time
from pathlib import Path
from typing import Any, Self

from mlperf_bert.common.atomic import LineFile
from mlperf_bert.common.console import LiveLine, as_clock


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
        shown: LiveLine | None = None,
    ) -> None:
        self._max_steps = max_steps
        self._shown = shown or LiveLine(stderr=False, speaks=log_path is not None)
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
        """Show a metrics record: in place on a terminal, else as a line."""
        if self._file:
            text = progress_line(record, accuracy, self._max_steps)
            self._shown.update(progress_line(record, accuracy, self._max_steps, self._shown.width))
            self._to_file(text)

    def _to_file(self, text: str) -> None:
        if self._file:
            self._file.append(f"{time.strftime('%H:%M:%S')} {text}")


def progress_line(
    record: dict[str, Any], accuracy: float | None, max_steps: int, width: int | None = None
) -> str:
    """One metrics record in words; its remaining time runs to `max_steps`, an upper bound.

    To fit `width` columns, tokens/s, learning rate and samples/s are left out in turn.
    """
    seconds_left = (max_steps - record["step"]) * record["step_ms"] / 1e3
    shown_accuracy = "-" if accuracy is None else f"{accuracy:.4f}"
    parts = {
        "step": f"step {record['step']}/{max_steps}",
        "samples": f"{record['samples_per_s']:,.0f} samples/s",
        "tokens": f"{record['tokens_per_s']:,.0f} tokens/s",
        "loss": f"loss {record['loss']:.4f}",
        "rate": f"lr {record['learning_rate']:.3e}",
        "accuracy": f"accuracy {shown_accuracy}",
        "left": f"at most {as_clock(seconds_left)} left",
    }
    for name in ("tokens", "rate", "samples"):
        if width is not None and len("  ".join(parts.values())) > width:
            del parts[name]
    return "  ".join(parts.values())
