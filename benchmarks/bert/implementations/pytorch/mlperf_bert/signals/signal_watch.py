"""The signals that ask for an end, who catches them, and what they do at once.

A command that does nothing else with them ends in order (`ending_in_order`); `tune` notes them
(tune/stop_signal.py), and so do ranks in the loop (stop_request.py). Ranks that have not come to
the first step, or have none, end at once (`SignalWatch`), and at a second Ctrl-C all do. A handler
in Python runs when the main thread is back in the interpreter, which it is not for minutes where it
waits for other ranks: so there a thread is told, and acts whatever the main one does. A process
also ends with the one that started it: nobody would see it go on.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

from mlperf_bert.common.errors import INTERRUPTED, STOPPED, say
from mlperf_bert.signals.whereabouts import Whereabouts

Handler = Callable[[int, FrameType | None], None]
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)  # SIGHUP: no terminal
TWICE_S = 1.0  # within which the first Ctrl-C may come again: from the terminal and from a launcher

_PR_SET_PDEATHSIG = 1  # of Linux
_LIBC = ctypes.CDLL(None)  # opened here: a child that has just been forked may not
_SCRIPT = "MLPERF_BERT_SCRIPT"  # the process of run_and_time.sh, which set it


def catch(handler: Handler) -> dict[int, Any]:
    """Have SIGNALS call `handler`; what they called before, for `give_back`.

    Not SIGHUP where it is ignored: `nohup` began this, and the terminal does not count.
    """
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    numbers = [each for each in SIGNALS if each != signal.SIGHUP or not ignored]
    return {number: signal.signal(number, handler) for number in numbers}


def give_back(previous: dict[int, Any]) -> None:
    """End what `catch` began."""
    for number, handler in previous.items():
        signal.signal(number, handler)


class Ended(KeyboardInterrupt):
    """A signal other than Ctrl-C asked for the end; what is half done is left as after Ctrl-C."""


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Have the first signal raise Ended, with its name; Ctrl-C does as before."""

    def end(number: int, frame: FrameType | None) -> None:
        _catch_all_but_ctrl_c(_do_nothing)  # a session that ends sends two or three
        raise Ended(signal.Signals(number).name)

    previous = _catch_all_but_ctrl_c(end)
    yield
    give_back(previous)


def _catch_all_but_ctrl_c(handler: Handler) -> dict[int, Any]:
    previous = catch(handler)
    signal.signal(signal.SIGINT, previous[signal.SIGINT])
    return previous


class CtrlC:
    """Tells a second Ctrl-C from the first one that came twice."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first_at: float | None = None

    def came_again(self) -> bool:
        """To be called at each SIGINT: whether it asks for an end at once."""
        if self._first_at is None:
            self._first_at = self._clock()
            return False
        return self._clock() - self._first_at > TWICE_S


class SignalWatch:
    """Acts on the signals of a rank while used as a context, in the main thread.

    Before the first step they end the process with status 75. After it a StopRequest sees them,
    and this only says what the first Ctrl-C does and obeys the second.

    Args:
        whereabouts: what this rank is doing; None where there are no steps.
        speaks: whether this rank, of all, says what a Ctrl-C does.
        status_file: gets the status as well, where a launcher may hide it (`--status-file`).
    """

    def __init__(
        self, whereabouts: Whereabouts | None, *, speaks: bool, status_file: Path | None = None
    ) -> None:
        self._whereabouts = whereabouts
        self._speaks = speaks
        self._status_file = status_file
        self._ctrl_c = CtrlC()
        self._said = False
        self._came = False
        self._previous: dict[int, Any] = {}
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)

    def __enter__(self) -> Self:
        self._hears, self._tells = os.pipe()
        os.set_blocking(self._tells, False)
        self._previous_fd = signal.set_wakeup_fd(self._tells)
        # A signal that Python has no handler for would not be told.
        self._previous = catch(_do_nothing)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._tells)
        self._thread.join()
        os.close(self._hears)
        if not self._came:  # else more of them may come, and this rank leaves in order
            give_back(self._previous)

    def _listen(self) -> None:
        while told := os.read(self._hears, 1):
            if told[0] in SIGNALS:
                self._came = True
                self._act(signal.Signals(told[0]))

    def _act(self, number: signal.Signals) -> None:
        if number == signal.SIGINT and self._ctrl_c.came_again():
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


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """For signals that the thread sees."""


def write_status(path: Path, status: int) -> bool:
    """Write or replace the file in one step; whether it is there now. Raises nothing.

    Several ranks may write it at once; readers see one whole status. A file that cannot be written
    is a warning on stderr.
    """
    # Ranks on two nodes may have the same process id.
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
    """Have the kernel send `number` to this process when `parent`, which started it, is gone.

    Else it would train on, unseen, beside those that take its place. On Linux only, and what counts
    there is the end of the thread that started it: a parent's main one. To be called before
    anything else, as by `preexec_fn`: a parent that is gone by then is not missed either.
    """
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number))
        if os.getppid() != parent:
            os.kill(os.getpid(), number)


def end_with_script(environ: Mapping[str, str] = os.environ) -> None:
    """Have a command end in order, by SIGTERM, when run_and_time.sh, which started it, is gone."""
    script = environ.get(_SCRIPT, "")
    if not (script.isdecimal() and len(script) < 10):
        return
    with suppress(ProcessLookupError, PermissionError):
        os.kill(int(script), 0)
        if os.getppid() != int(script):
            return  # started by something between them, as ranks are
    end_with_parent(int(script), signal.SIGTERM)
