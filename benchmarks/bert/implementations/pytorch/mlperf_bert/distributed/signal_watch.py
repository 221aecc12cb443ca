"""What a rank is doing, and handlers of the signals that ask a process to end.

A plain command ends in order (`EndingInOrder`). `tune`, ranks in the loop (stop_request.py) and the
process that started them note the signals. Ranks before the first step, or without steps, end at
once (`SignalWatch`), and at a second Ctrl-C all do. A Python handler runs only when the main thread
is back in the interpreter, which may take minutes while it waits for other ranks; so there another
thread is told and acts. A process also ends with its parent, because nobody would see it go on.
"""

import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Self

from mlperf_bert.errors import INTERRUPTED, STOPPED, UserError, say

Doing = Literal["start-up", "warm-up", "batch", "step", "evaluation", "checkpoint", "end"]

_IN_WORDS: dict[Doing, str] = {
    "start-up": "start-up",
    "warm-up": "warm-up, which compiles kernels",
    "batch": "waiting for the batch of step {:d}",
    "step": "step {:d}",
    "evaluation": "evaluation after {:,d} samples",
    "checkpoint": "checkpoint of step {:d}",
    "end": "end of the run",
}
_MUST_GO_ON: frozenset[Doing] = frozenset({"batch", "step", "evaluation"})  # disks may be slow

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)  # SIGHUP: no terminal
TWICE_S = 1.0  # within this time one Ctrl-C may arrive twice: from the terminal and from a launcher

_PR_SET_PDEATHSIG = 1  # in Linux's header
_LIBC = ctypes.CDLL(None)  # opened here, because a child that has just been forked may not
_SCRIPT = "MLPERF_BERT_SCRIPT"  # process id of run_and_time.sh, set by it


class Whereabouts:
    """The current activity: set by the training thread, read by others; begins with start-up."""

    def __init__(self) -> None:
        self._now: tuple[int, Doing, int] = (0, "start-up", 0)  # one object: read as a whole

    def at(self, doing: Doing, number: int | None = None) -> None:
        """Set the activity; `number` is the step's, or for an evaluation the samples."""
        self._now = (self._now[0] + 1, doing, number or 0)

    @property
    def in_start_up(self) -> bool:
        """True before the first step."""
        return self._now[1] in ("start-up", "warm-up")

    @property
    def in_words(self) -> str:
        """The activity in words, like `step 37`."""
        _, doing, number = self._now
        return _IN_WORDS[doing].format(number)

    @property
    def progress(self) -> int | None:
        """A number that grows with each `at`; None in an activity without a time limit."""
        count, doing, _ = self._now
        return count if doing in _MUST_GO_ON else None


class CtrlC:
    """A filter that tells a second Ctrl-C from a first one that arrived twice."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first_at: float | None = None

    def came_again(self) -> bool:
        """True if this SIGINT asks for an end at once; call it at each SIGINT."""
        if self._first_at is None:
            self._first_at = self._clock()
            return False
        return self._clock() - self._first_at > TWICE_S


class CaughtSignals:
    """A context that notes signals; afterwards they act as before.

    With `keeps_them` they stay caught for good once one came: others may follow, and must not end a
    process that leaves in order. Outside the main thread no signal is caught, because none can be.
    SIGHUP is not caught if it is ignored: then `nohup` started this process.
    """

    keeps_them = False

    def __init__(self, numbers: Sequence[signal.Signals] = SIGNALS) -> None:
        self.first = 0  # number of the first signal
        self.at_once = False  # a second Ctrl-C came
        self._numbers = numbers
        self._ctrl_c = CtrlC()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                before = signal.getsignal(number)
                if number != signal.SIGHUP or before != signal.SIG_IGN:
                    self._previous[number] = before
                    signal.signal(number, self.note)
        return self

    def __exit__(self, *_: object) -> None:
        if not (self.keeps_them and self.first):
            for number, handler in self._previous.items():
                signal.signal(number, handler)

    def note(self, number: int, frame: FrameType | None) -> None:
        """Note a signal; called in the main thread once that is back in the interpreter."""
        self.first = self.first or number
        self.at_once |= number == signal.SIGINT and self._ctrl_c.came_again()


class Ended(KeyboardInterrupt):
    """Raised when a signal other than Ctrl-C asks for the end; cleanup is as after Ctrl-C."""


class EndingInOrder(CaughtSignals):
    """A context in which the first signal raises Ended with its name; Ctrl-C acts as before.

    It does not while a user's error is being reported, which ends the process anyway: a launcher
    ends all ranks when the first has left, and their messages would be lost.
    """

    keeps_them = True  # a closing session sends two or three

    def __init__(self) -> None:
        super().__init__([number for number in SIGNALS if number != signal.SIGINT])

    def note(self, number: int, frame: FrameType | None) -> None:
        """Raise Ended, once."""
        if not self.first and not isinstance(sys.exception(), UserError):
            self.first = number
            raise Ended(signal.Signals(number).name)


class SignalPipe(CaughtSignals):
    """A pipe that reports signals at once to the thread that waits for them."""

    def __enter__(self) -> Self:
        self._hears, self._tells = os.pipe()
        os.set_blocking(self._tells, False)
        self._previous_fd = signal.set_wakeup_fd(self._tells, warn_on_full_buffer=False)
        # A signal without a Python handler would not be reported.
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._tells)
        self.over()
        os.close(self._hears)
        super().__exit__()

    def wait(self, seconds: float | None = None) -> list[signal.Signals]:
        """Wait for signals; return those that came, none once the time or the context is over."""
        ready, _, _ = select.select([self._hears], [], [], seconds)
        return [signal.Signals(told) for told in os.read(self._hears, 512)] if ready else []

    def over(self) -> None:
        """Called when no more signals will be reported, before the pipe is closed."""


class SignalWatch(SignalPipe):
    """A context of the main thread that acts on the signals of a rank.

    Before the first step a signal ends the process with status 75. After it a StopRequest sees the
    signals, and this only explains the first Ctrl-C and obeys the second.

    Args:
        whereabouts: what this rank is doing; None if there are no steps.
        speaks: true on the one rank that explains what a Ctrl-C does.
        status_file: receives the status too, because a launcher may hide it (`--status-file`).
    """

    keeps_them = True

    def __init__(
        self, whereabouts: Whereabouts | None, *, speaks: bool, status_file: Path | None = None
    ) -> None:
        super().__init__()
        self._whereabouts = whereabouts
        self._speaks = speaks
        self._status_file = status_file
        self._again = CtrlC()
        self._said = False
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)

    def __enter__(self) -> Self:
        super().__enter__()
        self._thread.start()
        return self

    def over(self) -> None:
        """Wait for the thread."""
        self._thread.join()

    def _listen(self) -> None:
        while came := self.wait():
            for number in came:
                if number in SIGNALS:
                    self._act(number)

    def _act(self, number: signal.Signals) -> None:
        if number == signal.SIGINT and self._again.came_again():
            os._exit(INTERRUPTED)
        if self._whereabouts is None or self._whereabouts.in_start_up:
            self._leave(number.name)
        if number == signal.SIGINT and self._speaks and not self._said:
            self._said = True
            say("Ctrl-C: saving and ending; again to end at once")

    def _leave(self, name: str) -> None:
        if self._status_file is not None:
            write_status(self._status_file, STOPPED)
        if self._whereabouts is None:
            say(f"interrupted by {name}")
        else:
            say(f"{name} before the first step: nothing to save")
        os._exit(STOPPED)


def write_status(path: Path, status: int) -> bool:
    """Write or replace the file in one step; true if it was written. Raises nothing.

    Several ranks may write it at once; readers see one whole status. A file that cannot be written
    is a warning on stderr.
    """
    # Ranks on two nodes may share a process id.
    beside = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        beside.write_text(f"{status}\n")
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        say(f"warning: {path} cannot be written ({error.strerror}): it was to tell status {status}")
        return False
    return True


def end_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send `number` to this process when `parent`, which started it, is gone.

    Otherwise it would train on unseen beside its replacement. Works on Linux only, where the end of
    the parent's thread that started it counts: its main one. Call it before anything else, for
    example in `preexec_fn`; a parent that is gone by then counts too.
    """
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number))
        if os.getppid() != parent:
            os.kill(os.getpid(), number)


def end_with_script(environ: Mapping[str, str] = os.environ) -> None:
    """End a command in order, by SIGTERM, when run_and_time.sh, which started it, is gone."""
    script = environ.get(_SCRIPT, "")
    if not (script.isdecimal() and len(script) < 10):
        return
    with suppress(ProcessLookupError, PermissionError):
        os.kill(int(script), 0)
        if os.getppid() != int(script):
            return  # started by a process between them, like ranks
    end_with_parent(int(script), signal.SIGTERM)
