"""Progress of work that is counted in steps, with its rate and the time that is left."""

import time

from mlperf_bert.run.console import ProgressLines


class Counted(ProgressLines):
    """Lines on stderr such as `planned 3 of 9 steps, 12 steps/s, 1 s left`."""

    def __init__(self, done: str, unit: str, total: int) -> None:
        super().__init__()
        self._words = done, unit
        self._total = total
        self._count = 0
        self._start_s = time.monotonic()

    def advance(self) -> None:
        """Count one more as done."""
        self._count += 1
        if self.is_due():
            done, unit = self._words
            rate = self._count / (time.monotonic() - self._start_s)
            left_s = (self._total - self._count) / rate
            self.line(
                f"{done} {self._count} of {self._total} {unit}, {rate:.0f} {unit}/s, "
                f"{left_s:.0f} s left"
            )
