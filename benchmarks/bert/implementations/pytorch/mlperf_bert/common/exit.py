"""How the program ends: what is still to be written, and a status that says what became of it."""

import errno
import os
import select
import sys
import traceback
from contextlib import suppress
from typing import NoReturn, TextIO

from mlperf_bert.common.code_caches import remove_temporary
from mlperf_bert.common.errors import FAULT, MISTAKE, NOBODY_READS, say_error

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def leave(status: int) -> NoReturn:
    """End the process with `status`, or with that of output which cannot be written."""
    flushed = _flush_stdout(speaks=status != MISTAKE)
    _flush(sys.stderr)  # or the interpreter's end tries again, and leaves with 120
    if "mlperf_bert.distributed.session" in sys.modules:
        # A rank. DistributedDataParallel keeps its process group, and with it gloo's threads, to
        # the very end (torch 2.13), where taking them down can abort: seen once in a test run;
        # and after an error NCCL's are still up. How it trained counts, not who reads of it; but
        # other commands are for what they print.
        remove_temporary()
        os._exit(MISTAKE if flushed == MISTAKE and "train" not in sys.argv[1:3] else status)
    sys.exit(flushed or status)


def tell_fault(error: Exception) -> int:
    """Show the traceback of the exception at hand; the status to leave with."""
    if _is_gone(error) and _is_unread(sys.stdout):
        return NOBODY_READS
    with suppress(OSError):
        sys.stderr.write(traceback.format_exc())  # one write: ranks may say it at once
    return FAULT


def is_out_of_room(error: OSError) -> bool:
    """Whether a disk, or a share of it, is full."""
    return error.errno in _NO_ROOM


def is_out_of_memory(error: Exception) -> bool:
    """Whether it is Python's, or torch's, which need not be imported; on a CPU that has no kind."""
    torch = sys.modules.get("torch")
    is_gpus = torch is not None and isinstance(error, torch.OutOfMemoryError)
    return is_gpus or isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


def _is_gone(error: Exception) -> bool:
    """Whether it may be of a pipe without a reader, or of a terminal that was closed."""
    return isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.EIO)


def _is_unread(stream: TextIO | None) -> bool:
    """Whether what reads it has gone."""
    if stream is None:
        return False
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _flush_stdout(*, speaks: bool) -> int:
    """Write what is still to be written; 0, or the status for what has become of it."""
    error = _flush(sys.stdout)
    if error is None:
        return 0
    if _is_gone(error):
        return NOBODY_READS
    if speaks:
        say_error(f"stdout: {error.strerror or 'cannot be written'}; write to another place")
    return MISTAKE


def _flush(stream: TextIO | None) -> OSError | None:
    """Write what is still to be written; where that fails, why, and it is dropped."""
    if stream is None:  # closed from the beginning
        return None
    try:
        stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return error
    return None
