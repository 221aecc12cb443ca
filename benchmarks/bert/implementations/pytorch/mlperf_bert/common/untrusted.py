"""Reading of untrusted input: bounded regular files, JSON, values in brief.

Nothing waits on a pipe or reads a device in a file's place. A missing file is told apart from a
failing file system, where pathlib answers "no" to some failures and raises at others.
"""

import errno
import hashlib
import json
import mmap
import os
from io import BufferedReader, FileIO
from pathlib import Path
from stat import S_ISREG
from typing import Any

from mlperf_bert.common.errors import DataError, UnreadableError

MAX_JSON_BYTES = 8 * 2**20  # a manifest of 5,000 shards has 1.3 MB, a log or a sidecar far less
_BRIEF = 60

_NOT_THERE = (errno.ENOENT, errno.ENOTDIR)
_NO_SUCH_FILE = (errno.EINVAL, errno.EFBIG)  # this file's message for other kinds of files


def open_regular_file(path: Path) -> FileIO:
    """Open a file for reading, unbuffered, without waiting on a pipe in its place.

    Raises OSError, whose `strerror` says what is wrong, for anything but a regular file;
    FileNotFoundError if there is no file.
    """
    try:
        # Opening a pipe without a writer would block, and a terminal must not become ours.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except ValueError:  # a zero byte, or characters outside the file system's encoding
        raise OSError(errno.EINVAL, "is no name of a file") from None
    if S_ISREG(os.fstat(descriptor).st_mode):
        return FileIO(descriptor)
    os.close(descriptor)
    raise OSError(errno.EINVAL, "is not a regular file")


def not_through_a_link(path: str, flags: int, mode: int = 0o666) -> int:
    """Open a file for writing, as `opener` of `open`, without waiting on a pipe in its place.

    Raises OSError (ELOOP, ENXIO) for a symbolic link, and for a pipe that nobody reads.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, mode)


def read_regular_file(path: Path, max_bytes: int) -> bytes:
    """The contents of a regular file of at most `max_bytes`. Raises OSError, as opening does."""
    with BufferedReader(open_regular_file(path)) as file:
        contents = file.read(max_bytes + 1)
    if len(contents) > max_bytes:
        raise OSError(errno.EFBIG, f"has more than {max_bytes:,} bytes")
    return contents


def file_sha256(path: Path) -> str:
    """The digest of a regular file of any size, in hex. Raises OSError, as opening it does."""
    with open_regular_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_json_object(text: str | bytes) -> dict[str, Any]:
    """Parse one JSON object. Raises ValueError for anything else."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("is not a JSON object")
    return found


def in_brief(value: object) -> str:
    """An untrusted value for a message: always one short line of ASCII."""
    if isinstance(value, dict | list):
        return f"a {type(value).__name__}"
    if type(value) is int and value.bit_length() > _BRIEF:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to write a huge one
    if isinstance(value, str | bytes):
        value = value[: _BRIEF + 1]  # so that a long value is not written out in full first
    return f"{value!a:.{_BRIEF}}"


def reading_error(path: Path, error: OSError, *, missing: str, remedy: str) -> DataError:
    """The error for a file that was not read: UnreadableError, unless the file is to blame.

    `missing` is the problem if there is no such file, `remedy` what to do about a file that is
    missing or of the wrong kind.
    """
    if error.errno in _NOT_THERE:
        return DataError(str(path), missing, remedy)
    problem = error.strerror or "fails"
    if error.errno in _NO_SUCH_FILE:
        return DataError(str(path), problem, remedy)
    remedy = "check its permissions and its file system, then try again"
    return UnreadableError(str(path), f"cannot be read ({problem})", remedy)


def is_there(path: Path) -> bool:
    """True if there is anything, even a broken link. Raises UnreadableError."""
    return _seen(path, follows=False) is not None


def is_file(path: Path) -> bool:
    """True if there is a regular file, or a link to one. Raises UnreadableError."""
    seen = _seen(path, follows=True)
    return seen is not None and S_ISREG(seen.st_mode)


def names_in(directory: Path) -> list[str]:
    """Sorted names of a directory's entries; none if it is missing.

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


def file_size(path: Path, remedy: str) -> int:
    """Bytes of a regular file. Raises DataError for anything else, a pipe or a device too."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(str(path), error.strerror or "is missing", remedy) from None
    except ValueError:  # a name that no file system accepts
        raise DataError(repr(str(path)), "is no file name", remedy) from None
    if not S_ISREG(status.st_mode):
        raise DataError(str(path), "is not a regular file", remedy)
    return status.st_size


def check_size(path: Path, size: int, remedy: str) -> None:
    """Raise DataError unless the file is a regular one of `size` bytes; it is not opened."""
    found = file_size(path, remedy)
    if found != size:
        raise _size_error(path, found, size, remedy)


def file_digest(path: Path, remedy: str) -> str:
    """The sha256 of a regular file. Raises DataError when it cannot be read."""
    try:
        return file_sha256(path)
    except OSError as error:
        raise DataError(str(path), error.strerror or "cannot be read", remedy) from None


def check_digest(path: Path, sha256: str, remedy: str) -> None:
    """Raise DataError if the file is not the one that the manifest names."""
    if file_digest(path, remedy) != sha256:
        raise digest_error(str(path), remedy)


def digest_error(where: str, remedy: str) -> DataError:
    """The error for a file that is not the one that the manifest names."""
    return DataError(where, "is not the file that the manifest names (its sha256 differs)", remedy)


def map_file(path: Path, size: int, remedy: str) -> mmap.mmap:
    """Map a regular file of `size` bytes, one or more, read-only. Raises DataError if it is not."""
    try:
        with open_regular_file(path) as file:
            found = os.fstat(file.fileno()).st_size
            if found == size:
                return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DataError(str(path), error.strerror or "cannot be mapped", remedy) from None
    except ValueError:  # truncated since its size was checked
        raise DataError(str(path), "cannot be mapped", remedy) from None
    raise _size_error(path, found, size, remedy)


def _size_error(path: Path, found: int, size: int, remedy: str) -> DataError:
    return DataError(str(path), f"is {found} bytes where {size} belong", remedy)
