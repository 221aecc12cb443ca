"""Several workers on this machine: the same command again, each with one training at a time."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from bert_tools.tune.stop_signal import StopSignal
from mlperf_bert.common.errors import STOPPED
from mlperf_bert.signals.signal_watch import end_with_parent

WORKER = "--as-worker"
_POLL_S = 0.2


def run_workers(command_line: Sequence[str], count: int, stop: StopSignal) -> int:
    """Run so many and wait; 0, STOPPED after a signal, or the status of the first that failed.

    When one fails, the others are asked to end as a signal would.
    """
    command = [sys.executable, "-m", "mlperf_bert", *command_line, WORKER]
    workers = [
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, os.getpid()),
        )
        for _ in range(count)
    ]
    failed = 0
    told = False
    try:
        while any(each.poll() is None for each in workers):
            failed = failed or next((each.returncode for each in workers if each.returncode), 0)
            if (stop.came or failed) and not told:
                told = True
                _tell(workers)
            time.sleep(_POLL_S)
    finally:
        _tell(workers)
    failed = failed or next((each.returncode for each in workers if each.returncode), 0)
    if stop.came:
        return STOPPED
    return failed if failed >= 0 else 128 - failed


def _tell(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    for each in workers:
        if each.poll() is None:
            with suppress(ProcessLookupError):
                each.terminate()
