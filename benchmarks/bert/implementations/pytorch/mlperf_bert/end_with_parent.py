"""Ends a process with the one that started it: nobody would see it go on."""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # of Linux


def end_with_parent() -> None:
    """Have the kernel kill this process, a rank or a training, when what started it is gone.

    Else it would train on, unseen, beside those that take its place. On Linux only, and what counts
    there is the end of the thread that started it: a parent's main one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
