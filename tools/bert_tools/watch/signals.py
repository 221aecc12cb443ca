"""Signals that come while a terminal is drawn on: kept, and looked at when nothing is half done."""

import os
import select
import signal
from types import FrameType, TracebackType
from typing import Self

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OTHERS = (signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT)


class Signals:
    """Collects signals while used as a context, in the main thread; whose they were comes back."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, _nothing) for number in (*ENDS, *OTHERS)}
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)

    def wait(self, seconds: float) -> set[signal.Signals]:
        """Those that came, as soon as one has; empty when the time is over."""
        ready, _, _ = select.select([self._read], [], [], seconds)
        return {signal.Signals(number) for number in os.read(self._read, 512)} if ready else set()

    def suspend(self) -> None:
        """Stop this process as Ctrl-Z does; returns when it goes on."""
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, _nothing)


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """What came is in the pipe."""
