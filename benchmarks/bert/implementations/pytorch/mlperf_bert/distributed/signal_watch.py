"""The current activity of a rank, and handlers of the signals that ask a process to end.

A plain command raises an exception at a signal, so that it cleans up (`EndingInOrder`). Three kinds
of processes only record signals: `tune`, ranks in the training loop (stop_request.py), and the
process that started these ranks. Ranks before their first step, and ranks of commands without
steps, exit at once (`SignalWatch`). At a second Ctrl-C all of these processes exit at once.

Python runs a signal handler only when the main thread is back in the interpreter, which may take
minutes while that thread waits for other ranks. In `SignalWatch`, another thread therefore receives
the signals. A process also ends when its parent ends, because nobody would notice that it is still
running.
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
# Only these activities have a time limit, because the others may depend on slow disks or compilers.
_TIMED: frozenset[Doing] = frozenset({"batch", "step", "evaluation"})

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
TWICE_S = 1.0  # one Ctrl-C may arrive twice in this time, from the terminal and from a launcher

_PR_SET_PDEATHSIG = 1  # in Linux's header
_LIBC = ctypes.CDLL(None)  # opened here, because a child must not do so right after a fork
_SCRIPT = "MLPERF_BERT_SCRIPT"  # process id of run_and_time.sh, which sets this variable


class Whereabouts:
    """The current activity of a rank. The training thread sets it, and other threads read it.

    The first activity is the start-up.
    """

    def __init__(self) -> None:
        self._now: tuple[int, Doing, int] = (0, "start-up", 0)  # one object, so reads are atomic

    def at(self, doing: Doing, number: int | None = None) -> None:
        """Set the current activity.

        `number` is the number of the step, or the number of samples trained before an evaluation.
        """
        self._now = (self._now[0] + 1, doing, number or 0)

    @property
    def in_start_up(self) -> bool:
        """True if this rank has not begun its first step."""
        return self._now[1] in ("start-up", "warm-up")

    @property
    def in_words(self) -> str:
        """The current activity in words, such as `step 37`."""
        _, doing, number = self._now
        return _IN_WORDS[doing].format(number)

    @property
    def progress(self) -> int | None:
        """The number of calls of `at`, or None if the current activity has no time limit."""
        count, doing, _ = self._now
        return count if doing in _TIMED else None


class CtrlC:
    """A filter that distinguishes a second Ctrl-C from a single Ctrl-C that arrives twice."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first_at: float | None = None

    def came_again(self) -> bool:
        """Return True if the user has pressed Ctrl-C again. Call this method at each SIGINT."""
        if self._first_at is None:
            self._first_at = self._clock()
            return False
        return self._clock() - self._first_at > TWICE_S


class CaughtSignals:
    """A context manager that records signals. On exit it restores the previous handlers.

    A subclass with `keeps_them` does not restore them after a signal, because more signals may
    follow and must not end a process that is cleaning up. Outside of the main thread no signal is
    caught, because Python does not allow that. SIGHUP is not caught if it is ignored, because then
    `nohup` started this process.
    """

    keeps_them = False

    def __init__(self, numbers: Sequence[signal.Signals] = SIGNALS) -> None:
        self.first = 0  # number of the first signal, or 0
        self.at_once = False  # True after a second Ctrl-C
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
        """Record a signal. Python calls this handler in the main thread, between instructions."""
        self.first = self.first or number
        self.at_once |= number == signal.SIGINT and self._ctrl_c.came_again()


class Ended(KeyboardInterrupt):
    """The exception for a signal other than Ctrl-C.

    It is a KeyboardInterrupt, so that the cleanup is the same as after Ctrl-C.
    """


class EndingInOrder(CaughtSignals):
    """A context manager in which the first signal raises Ended with the signal's name.

    Ctrl-C raises KeyboardInterrupt as usual. While a UserError is being reported, signals are
    ignored, because the error ends the process anyway. When the first rank exits, a launcher sends
    signals to the others, whose error messages would otherwise be lost.
    """

    keeps_them = True  # a terminal session that closes sends two or three signals

    def __init__(self) -> None:
        super().__init__([number for number in SIGNALS if number != signal.SIGINT])

    def note(self, number: int, frame: FrameType | None) -> None:
        """Raise Ended at the first signal, and ignore all further signals."""
        if not self.first and not isinstance(sys.exception(), UserError):
            self.first = number
            raise Ended(signal.Signals(number).name)


class SignalPipe(CaughtSignals):
    """A context manager that reports signals to a waiting thread at once, through a pipe."""

    def __enter__(self) -> Self:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._previous_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        return super().__enter__()  # installs handlers, without which no signal is reported

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._write_fd)
        self.over()
        os.close(self._read_fd)
        super().__exit__()

    def wait(self, seconds: float | None = None) -> list[signal.Signals]:
        """Wait for signals, and return those that have arrived.

        The list is empty after a timeout of `seconds`, or if the context exits.
        """
        ready, _, _ = select.select([self._read_fd], [], [], seconds)
        return [signal.Signals(number) for number in os.read(self._read_fd, 512)] if ready else []

    def over(self) -> None:
        """Do nothing. Subclasses may wait for their thread here, before the pipe is closed."""


def say_stopped_early(name: str, hint: str | None) -> None:
    """Report that the signal `name` ended a run before its first step.

    `hint` is printed after the message and contains the command to type next, unless it is None.
    """
    say(f"stopped by {name} before the first step, so no training was lost")
    if hint is not None:
        with suppress(OSError):
            print(hint, flush=True)


class SignalWatch(SignalPipe):
    """A context manager for the main thread, which reacts to the signals of a rank at once.

    Before the first step, a signal ends the process with status 75. Afterwards a StopRequest
    handles the signals. This class then only prints a message at the first Ctrl-C, and ends the
    process at the second.

    Args:
        whereabouts: the current activity of this rank, or None if the command has no steps.
        speaks: True on the one rank that prints messages for all ranks.
        status_file: the file to write the status to, because a launcher may hide the exit status
            (`--status-file`).
        hint: the command to type after a stop before the first step.
    """

    keeps_them = True

    def __init__(
        self,
        whereabouts: Whereabouts | None,
        *,
        speaks: bool,
        status_file: Path | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__()
        self._whereabouts = whereabouts
        self._speaks = speaks
        self._status_file = status_file
        self._hint = hint
        self._again = CtrlC()
        self._said = False
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)

    def __enter__(self) -> Self:
        super().__enter__()
        self._thread.start()
        return self

    def over(self) -> None:
        """Wait until the thread that receives the signals has ended."""
        self._thread.join()

    def _listen(self) -> None:
        while came := self.wait():
            for number in sorted(came):  # Ctrl-C before the SIGTERM that may follow it
                if number in SIGNALS:
                    self._act(number)

    def _act(self, number: signal.Signals) -> None:
        if number == signal.SIGINT and self._again.came_again():
            os._exit(INTERRUPTED)
        if self._whereabouts is None or self._whereabouts.in_start_up:
            self._leave(number.name)
        if number == signal.SIGINT and self._speaks and not self._said:
            self._said = True
            say("saving and stopping because of Ctrl-C (press Ctrl-C again to exit at once)")

    def _leave(self, name: str) -> None:
        if self._status_file is not None:
            write_status(self._status_file, STOPPED)
        if self._speaks and self._whereabouts is None:
            say(f"interrupted by {name}")
        elif self._speaks:
            say_stopped_early(name, self._hint)
        os._exit(STOPPED)


def unblock_ctrl_c() -> None:
    """Unblock Ctrl-C in this process, because our own launcher blocks it when it starts a rank."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def write_status(path: Path, status: int) -> bool:
    """Write the exit status to a file, and replace an earlier status atomically.

    Returns True if the file was written. Several ranks may write it at the same time, and a reader
    always finds one complete status. If the file cannot be written, the function prints a warning
    on stderr and raises no error.
    """
    # The name is random because ranks on two nodes may have the same process id.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        temporary.write_text(f"{status}\n")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        say(f"warning: cannot write status {status} to {path} ({error.strerror})")
        return False
    return True


def end_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send the signal `number` to this process when its parent process ends.

    Without the signal, this process could keep training unnoticed next to its replacement. This
    works only on Linux, where the signal is sent when the parent's thread that started this process
    ends. The parent must therefore start this process from its main thread. Call this function
    before anything else, for example in `preexec_fn`. If the parent has already ended, the signal
    is sent at once.
    """
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number))
        if os.getppid() != parent:
            os.kill(os.getpid(), number)


def end_with_script(environ: Mapping[str, str] = os.environ) -> None:
    """Make the kernel send SIGTERM to this process when run_and_time.sh ends.

    The function does nothing unless run_and_time.sh is the parent of this process.
    """
    script = environ.get(_SCRIPT, "")
    if not (script.isdecimal() and len(script) < 10):
        return
    with suppress(ProcessLookupError, PermissionError):
        os.kill(int(script), 0)
        if os.getppid() != int(script):
            return  # the script started the parent of this process, as it does for a rank
    end_with_parent(int(script), signal.SIGTERM)
