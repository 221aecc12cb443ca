"""Progress of a measurement, printed on stderr with the remaining time.

Building and compiling models can take minutes, so the current activity is repeated while nothing
else is printed.
"""

import time
from typing import Self

from mlperf_bert.run.console import ProgressLines


class Progress:
    """A context manager that prints the progress of a measurement, also while it is silent."""

    def __init__(self) -> None:
        self._lines = ProgressLines()
        self._set("", None, 0)

    def __enter__(self) -> Self:
        self._lines.never_silent(self._now)
        return self

    def __exit__(self, *error: object) -> None:
        self._lines.__exit__(*error)

    def start(self, activity: str, *, seconds: float | None = None, total: int = 0) -> None:
        """Print the activity that begins now, and repeat it from time to time.

        Args:
            activity: name of the activity, such as "compiling sorted_compiled".
            seconds: expected duration, from which the remaining time is computed, or None.
            total: number of steps for which `advance` will be called, or 0 to show no count.
        """
        self._set(activity, seconds, total)
        about = "" if seconds is None else f" (about {seconds:.0f} s)"
        self.say(f"{activity}{about}")

    def advance(self) -> None:
        """Count one finished step of the current activity, without printing."""
        self._num_done += 1

    def say(self, line: str) -> None:
        """Print one line."""
        self._lines.line(line)

    def _set(self, activity: str, seconds: float | None, total: int) -> None:
        self._activity, self._seconds, self._total = activity, seconds, total
        self._num_done = 0
        self._started_s = time.monotonic()

    def _now(self) -> str:
        """Format the current activity, with its remaining time and finished steps."""
        parts = [self._activity]
        if self._seconds is not None:
            left = max(0.0, self._seconds - (time.monotonic() - self._started_s))
            parts.append(f"about {left:.0f} s left")
        if self._total:
            parts.append(f"{self._num_done} of {self._total} steps done")
        return ", ".join(parts)
