"""Reads the lines that were added to a growing file, whatever becomes of the file meanwhile."""

import os
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from mlperf_bert.common.errors import DataError
from mlperf_bert.common.untrusted import open_regular_file

CHUNK_BYTES = 2**20  # read at one look
FIRST_BYTES = 32 * 2**20  # from the end of a file that is larger when it is first seen
_MARK_BYTES = 64  # before the place that was read to: others there, and the file was rewritten


@dataclass(frozen=True, slots=True)
class Added:
    """What a look found.

    `is_anew`: this is another file than at the last look, or none was there then; what was read
    before does not hold any more. `has_more`: another look finds more at once.
    """

    lines: tuple[bytes, ...] = ()
    is_there: bool = True
    is_anew: bool = False
    has_more: bool = False
    modified_s: float = 0.0  # since the epoch, by the clock of the file system


class Tail:
    """Follows one file, which may not be there yet; opened for each look, and closed after it.

    A last line without its end is left for later. A line of more than `max_line_bytes` comes as its
    first `max_line_bytes + 1`. Of a file that is larger than `first_bytes` when it is first seen,
    only so much of its end is read. Memory is bounded by CHUNK_BYTES, whatever the file holds.
    """

    def __init__(self, path: Path, *, max_line_bytes: int, first_bytes: int = FIRST_BYTES) -> None:
        self.path = path
        self._max_line_bytes = max_line_bytes
        self._first_bytes = first_bytes
        self._forget()

    def look(self) -> Added:
        """The lines since the last look. Raises DataError where there is no regular file."""
        try:
            with open_regular_file(self.path) as file:
                return self._look_into(file)
        except (FileNotFoundError, NotADirectoryError):
            had_one = self._identity is not None
            self._forget()
            return Added(is_there=False, is_anew=had_one)
        except OSError as error:
            reason = error.strerror or "cannot be read"
            raise DataError(str(self.path), reason, "give the directory of a run") from None

    def _forget(self) -> None:
        self._identity: tuple[int, int] | None = None
        self._end = 0  # bytes read, all of whole lines but for one that is too long
        self._mark = b""  # the last of them
        self._in_long_line = False

    def _look_into(self, file: FileIO) -> Added:
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino)
        is_anew = identity != self._identity or not self._goes_on(file, status.st_size)
        if is_anew:
            self._forget()
            self._identity = identity
            if status.st_size > self._first_bytes:
                self._end = status.st_size - self._first_bytes
                self._in_long_line = True  # most likely within a line, which is left out
        size = min(CHUNK_BYTES, status.st_size - self._end)
        contents = os.pread(file.fileno(), size, self._end) if size else b""
        before = self._end
        lines = self._take(contents)
        has_more = before < self._end < status.st_size and len(contents) == CHUNK_BYTES
        return Added(
            lines=lines, is_anew=is_anew, has_more=has_more, modified_s=status.st_mtime_ns / 1e9
        )

    def _goes_on(self, file: FileIO, size: int) -> bool:
        """Whether the file still begins with what was read of it, as far as that is looked at."""
        start = self._end - len(self._mark)
        is_long = size >= self._end
        return is_long and os.pread(file.fileno(), len(self._mark), start) == self._mark

    def _take(self, contents: bytes) -> tuple[bytes, ...]:
        """Cut what was read next into lines, and go on behind them."""
        whole, newline, rest = contents.rpartition(b"\n")
        pieces = whole.split(b"\n") if newline else []
        if len(rest) > self._max_line_bytes:
            pieces.append(rest)
        taken = len(whole) + len(newline)
        goes_on = self._in_long_line and bool(pieces)  # of a line that was dealt with
        if len(rest) > self._max_line_bytes:
            taken += len(rest)
            self._in_long_line = True
        elif newline:
            self._in_long_line = False
        elif self._in_long_line:
            taken += len(rest)
        self._end += taken
        self._mark = (self._mark + contents[:taken])[-_MARK_BYTES:]
        return tuple(piece[: self._max_line_bytes + 1] for piece in pieces[goes_on:])
