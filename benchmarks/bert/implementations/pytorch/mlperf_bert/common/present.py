"""What is there, told from what cannot be seen: a file system that fails has not lost its files.

pathlib's questions answer "no" to some of its failures and end in a traceback at others.
"""

import errno
import os
from pathlib import Path
from stat import S_ISREG

from mlperf_bert.common.errors import DataError, UnreadableError

_NOT_THERE = (errno.ENOENT, errno.ENOTDIR)
_NO_SUCH_FILE = (errno.EINVAL, errno.EFBIG)  # what untrusted.py says of those it does not read


def reading_error(path: Path, error: OSError, *, missing: str, remedy: str) -> DataError:
    """What to raise where a file was not read: UnreadableError, unless the file is to blame.

    Args:
        path: the file.
        error: why.
        missing: the problem where there is no such file.
        remedy: what to do about it where it is missing or of the wrong kind.
    """
    if error.errno in _NOT_THERE:
        return DataError(str(path), missing, remedy)
    problem = error.strerror or "fails"
    if error.errno in _NO_SUCH_FILE:
        return DataError(str(path), problem, remedy)
    remedy = "see to its rights and its file system, then try again"
    return UnreadableError(str(path), f"cannot be read ({problem})", remedy)


def is_there(path: Path) -> bool:
    """Whether there is anything, a broken link too. Raises UnreadableError."""
    return _seen(path, follows=False) is not None


def is_file(path: Path) -> bool:
    """Whether there is a regular file, or a link to one. Raises UnreadableError."""
    seen = _seen(path, follows=True)
    return seen is not None and S_ISREG(seen.st_mode)


def names_in(directory: Path) -> list[str]:
    """Names of what a directory holds, in order; none where it is not there.

    Raises UnreadableError.
    """
    try:
        return sorted(os.listdir(directory))
    except OSError as error:
        if error.errno in _NOT_THERE:
            return []
        raise reading_error(directory, error, missing="", remedy="") from None


def _seen(path: Path, *, follows: bool) -> os.stat_result | None:
    try:
        return os.stat(path, follow_symlinks=follows)
    except OSError as error:
        if error.errno in _NOT_THERE:
            return None
        raise reading_error(path, error, missing="", remedy="") from None
