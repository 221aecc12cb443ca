"""One file of a prepared set: regular, of its size and digest, mapped; a DataError where it is not.

Nothing waits on a pipe or reads a device in a file's place.
"""

import mmap
import os
from pathlib import Path
from stat import S_ISREG

from mlperf_bert.common.errors import DataError
from mlperf_bert.common.untrusted import file_sha256, open_regular_file


def file_size(path: Path, remedy: str) -> int:
    """Bytes of a regular file. Raises DataError for anything else, a pipe or a device too."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(str(path), error.strerror or "is missing", remedy) from None
    except ValueError:  # a name that no file system takes
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
    """Raise DataError where the file is not the one that the manifest names."""
    if file_digest(path, remedy) != sha256:
        problem = "is not the file that the manifest names (its sha256 differs)"
        raise DataError(str(path), problem, remedy)


def map_file(path: Path, size: int, remedy: str) -> mmap.mmap:
    """Map a regular file of `size` bytes, one or more, read-only. Raises DataError if it is not."""
    try:
        with open_regular_file(path) as file:
            found = os.fstat(file.fileno()).st_size
            if found == size:
                return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DataError(str(path), error.strerror or "cannot be mapped", remedy) from None
    except ValueError:  # cut short since its size was asked
        raise DataError(str(path), "cannot be mapped", remedy) from None
    raise _size_error(path, found, size, remedy)


def _size_error(path: Path, found: int, size: int, remedy: str) -> DataError:
    return DataError(str(path), f"is {found} bytes where {size} belong", remedy)
