"""Ends a process with the one that started it: nobody would see it go on."""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress

_PR_SET_PDEATHSIG = 1  # of Linux
_LIBC = ctypes.CDLL(None)  # opened here: a child that has just been forked may not
_SCRIPT = "MLPERF_BERT_SCRIPT"  # the process of run_and_time.sh, which set it


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
