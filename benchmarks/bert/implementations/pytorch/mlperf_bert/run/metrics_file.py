"""`metrics.jsonl`: one JSON object an interval, in a file that a full disk does not end.

It is cut and continued where a run is resumed.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

from mlperf_bert.common.atomic import replaced_file
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.common.untrusted import not_through_a_link, open_regular_file, reading_error

_MOST_BYTES = 2**20  # of a line, far more than one of ours has


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


class MetricsFile:
    """Appends records; on ranks other than 0 nothing is kept.

    Args:
        path: the file; None keeps nothing.
        after_step: the step after which a resumed run goes on: later records, which it makes anew,
            are taken out. None begins a new file.

    Raises ConfigError or DataError where the file cannot be read or written.
    """

    def __init__(self, path: Path | None, after_step: int | None = None) -> None:
        self._file: LineFile | None = None
        if path is not None:
            if after_step is not None:
                # Line by line: the memory that a whole file took would stay with the process.
                with replaced_file(path) as temporary, temporary.open("xb") as kept:
                    kept.writelines(_until(path, after_step))
            self._file = LineFile(path, _warn, continued=after_step is not None)

    def write(self, record: dict[str, Any]) -> None:
        """Append one record."""
        if self._file:
            # JSON knows no NaN: null, as of a loss that is no number.
            finite = {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in record.items()
            }
            self._file.append(json.dumps(finite, allow_nan=False))

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()


def _until(path: Path, last_step: int) -> Iterator[bytes]:
    """The lines up to a step, without one that a killed run did not end."""
    for line in _lines(path):
        try:
            step = json.loads(line)["step"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return
        if not isinstance(step, int) or step > last_step or not line.endswith(b"\n"):
            return
        yield line


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with BufferedReader(open_regular_file(path)) as file:
            yield from iter(partial(file.readline, _MOST_BYTES), b"")
    except FileNotFoundError:
        return
    except OSError as error:
        raise reading_error(path, error, missing="", remedy="move it away") from None


def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
