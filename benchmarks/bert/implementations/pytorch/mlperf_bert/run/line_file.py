"""A file of lines that grows during a run, which a full disk does not end."""

import os
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.common.untrusted import not_through_a_link


class LineFile:
    """Appends whole lines, each on file when `append` returns.

    A line that cannot be written is left out, and `warn` told once until one can be written again:
    training is worth more than what it says.
    """

    def __init__(self, path: Path, warn: Callable[[str], None], *, continued: bool = False) -> None:
        """Open a new file, or where it is `continued`, one that may be there.

        Raises ConfigError where that fails.
        """
        self._path = path
        self._warn = warn
        try:
            mode = "a" if continued else "x"
            self._file = FileIO(path, mode, opener=not_through_a_link)
        except OSError as error:
            remedy = "give a run directory that you can write to"
            raise ConfigError(str(path), f"cannot be opened ({error.strerror})", remedy) from None
        self._end = self._file.seek(0, os.SEEK_END)
        self._is_failing = False

    def append(self, line: str) -> None:
        """Write a line; its end is added."""
        contents = memoryview(f"{line}\n".encode())
        try:
            while contents:
                contents = contents[self._file.write(contents) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._end)
                self._file.seek(self._end)
            if not self._is_failing:
                self._warn(f"{self._path} cannot be written ({error.strerror}): going on without")
            self._is_failing = True
        else:
            self._end = self._file.tell()
            self._is_failing = False

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):
            self._file.close()
