"""The files of one run, read as they grow: config, metrics, remarks and outcome.

New lines of a file are read, whatever happens to the file meanwhile. Their facts are kept in
bounded memory.
"""

import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from statistics import fmean, median
from typing import Any, Generic, TypeVar

from bert_tools.report.run import Evaluation
from bert_tools.report.run_files import MAX_LINE_BYTES, read_metrics_record
from mlperf_bert.common.errors import DataError, UserError, one_line
from mlperf_bert.common.untrusted import open_regular_file
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.run.outcome import RunOutcome, read_outcome

CHUNK_BYTES = 2**20  # read at one look
FIRST_BYTES = 32 * 2**20  # read from the end of a file that is larger at the first look
_MARK_BYTES = 64  # compared before the read position: a change means a rewritten file
_A_LINE = "a line of the metrics"
_MOST_BAD_LINES = 1000  # after which the rest of the file is ignored

MOST_POINTS = 1024  # of a curve: more than a terminal has dots
RECENT = 32  # records that count as now
KEPT_EVALUATIONS = 16
_LONGEST_MS = 1e12  # limit of a step's time: thirty years

_MAX_SAID_BYTES = 2 * 2**10  # read of a line of stdout.log
_FIRST_SAID_BYTES = 256 * 2**10  # read of a long log, whose end counts
_KEPT_LINES = 8
_TIME = re.compile(r"\d\d:\d\d:\d\d ")
_EVALUATION = re.compile(r"evaluation at [\d,]{1,20} samples: .*\((\d{1,9}\.\d) s\)")
_START_UP = re.compile(r"sampler \w{1,40}, balance \w{1,40}")  # among its first lines
_PROGRESS = re.compile(r"step \d{1,19}/\d{1,19}  ")

Parsed = TypeVar("Parsed")
Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Added:
    """New lines of a file.

    `is_anew`: the file is new since the last look, so earlier contents no longer hold. `has_more`:
    another look finds more at once.
    """

    lines: tuple[bytes, ...] = ()
    is_there: bool = True
    is_anew: bool = False
    has_more: bool = False
    modified_s: float = 0.0  # since the epoch, by the clock of the file system


class Tail:
    """Follows one file, which may not exist yet; it is opened and closed at each look.

    An incomplete last line is left for later. A line of more than `max_line_bytes` is given as its
    first `max_line_bytes + 1`. If a file is larger than `first_bytes` at the first look, only that
    much of its end is read. Memory is bounded by CHUNK_BYTES.
    """

    def __init__(self, path: Path, *, max_line_bytes: int, first_bytes: int = FIRST_BYTES) -> None:
        self.path = path
        self._max_line_bytes = max_line_bytes
        self._first_bytes = first_bytes
        self._forget()

    def look(self) -> Added:
        """The lines since the last look. Raises DataError if it is no regular file."""
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
        self._end = 0  # bytes read: whole lines, or a part of one that is too long
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
                self._in_long_line = True  # probably within a line, which is left out
        size = min(CHUNK_BYTES, status.st_size - self._end)
        contents = os.pread(file.fileno(), size, self._end) if size else b""
        before = self._end
        lines = self._take(contents)
        has_more = before < self._end < status.st_size and len(contents) == CHUNK_BYTES
        return Added(
            lines=lines, is_anew=is_anew, has_more=has_more, modified_s=status.st_mtime_ns / 1e9
        )

    def _goes_on(self, file: FileIO, size: int) -> bool:
        """True if the file still has the bytes before the read position, as far as compared."""
        start = self._end - len(self._mark)
        is_long = size >= self._end
        return is_long and os.pread(file.fileno(), len(self._mark), start) == self._mark

    def _take(self, contents: bytes) -> tuple[bytes, ...]:
        """Cut the next bytes into lines, and move the read position behind them."""
        whole, newline, rest = contents.rpartition(b"\n")
        pieces = whole.split(b"\n") if newline else []
        if len(rest) > self._max_line_bytes:
            pieces.append(rest)
        taken = len(whole) + len(newline)
        goes_on = self._in_long_line and bool(pieces)  # the rest of a handled line
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


class WholeFile(Generic[Parsed]):
    """A small file that is written at once, and read again when it changes."""

    def __init__(self, path: Path, read: Callable[[Path], Parsed]) -> None:
        self._path, self._read = path, read
        self._seen: tuple[int, ...] | None = None
        self.value: Parsed | None = None  # None if it is missing, or cannot be read
        self.problem = ""  # in words, as an error would hold the contents in memory
        self.modified_s = 0.0  # since the epoch, by the clock of the file system

    def look(self) -> None:
        """Read it if it is new or has changed."""
        seen = self._signature()
        if seen == self._seen:
            return
        self._seen, self.value, self.problem = seen, None, ""
        if seen is None:
            return
        self.modified_s = seen[-1] / 1e9 if seen else 0.0
        try:
            self.value = self._read(self._path)
        except UserError as error:
            self.problem = str(error)

    def _signature(self) -> tuple[int, ...] | None:
        """A value that changes when the file is written or replaced; None without a file."""
        try:
            found = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError):
            return ()  # reading it will report the problem
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class Remarks:
    """A run's printed remarks, taken line by line from its `stdout.log`.

    It keeps the lines worth showing, as printable text.
    """

    def __init__(self) -> None:
        self.evaluation_s: float | None = None  # duration of the last evaluation
        self.is_start_up = False  # the run, or its resumption, has begun and no step has ended
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)  # the last lines, without progress

    def add(self, line: bytes) -> None:
        """Take a line, without its line end."""
        text = one_line(line.decode("utf-8", errors="replace"))
        said = text[len("00:00:00 ") :] if _TIME.match(text) else text
        if _PROGRESS.match(said):
            self.is_start_up = False
            return
        self.is_start_up |= _START_UP.fullmatch(said) is not None
        if match := _EVALUATION.fullmatch(said):
            self.evaluation_s = float(match[1])
        self.lines.append(text)


class Averaged:
    """A curve of bounded size: each point is the mean of enough consecutive values."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []
        self._new: list[tuple[float, float]] = []  # values of the next point
        self._stride = 1  # values per point

    def add(self, x: float, y: float) -> None:
        """Append a point of finite numbers."""
        self._new.append((x, y))
        if len(self._new) < self._stride:
            return
        self._points.append(_mean(self._new))
        self._new = []
        if len(self._points) == MOST_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [_mean(pair) for pair in pairs]
            self._stride *= 2

    @property
    def points(self) -> list[tuple[float, float]]:
        """All points, including the unfinished one."""
        return [*self._points, *([_mean(self._new)] if self._new else [])]


def _mean(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return fmean(x for x, _ in points), fmean(y for _, y in points)


class History:
    """The history of a run, from the records of `metrics.jsonl` in order."""

    def __init__(self) -> None:
        self.loss, self.accuracy, self.samples_per_s = Averaged(), Averaged(), Averaged()
        self.evaluations: deque[Evaluation] = deque(maxlen=KEPT_EVALUATIONS)
        self.recent: deque[Record] = deque(maxlen=RECENT)
        self.best_accuracy: float | None = None
        self.last: Record | None = None
        self.skipped_steps = 0
        self.trained_s = 0.0  # without evaluations
        self.steps_between = 0  # the last two records
        self.added: list[Record] = []  # at the last look

    def add(self, record: Record) -> None:
        """Take a record of a later step, checked by `run_files`."""
        step, samples, accuracy = record["step"], record["samples"], record["mlm_accuracy"]
        self.steps_between = step - (self.last["step"] if self.last else 0)
        # Bounded, so that the sum stays finite whatever the file says.
        step_ms = min(max(0.0, record.get("step_ms") or 0.0), _LONGEST_MS)
        self.trained_s += self.steps_between * step_ms / 1e3
        self.skipped_steps += record["skipped_steps"]
        if record["loss"] is not None:
            self.loss.add(samples, record["loss"])
        if record.get("samples_per_s") is not None:
            self.samples_per_s.add(samples, record["samples_per_s"])
        if accuracy is not None:
            self.accuracy.add(samples, accuracy)
            self.evaluations.append(Evaluation(samples, accuracy))
            self.best_accuracy = max(accuracy, self.best_accuracy or 0.0)
        self.recent.append(record)
        self.added.append(record)
        self.last = record

    def newest(self, key: str, most: int = RECENT) -> list[float]:
        """A key's numbers in the newest records that have it."""
        records = list(self.recent)[-most:]
        return [record[key] for record in records if record.get(key) is not None]

    def usual(self, key: str) -> float | None:
        """The median of a key's newest numbers; None if there are none."""
        values = self.newest(key)
        return median(values) if values else None


class WatchedRun:
    """All watched files of one run, as of the last look."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config: WholeFile[RunConfig] = WholeFile(directory / "config.toml", load_config)
        self.outcome: WholeFile[RunOutcome] = WholeFile(directory / "outcome.json", read_outcome)
        self.history, self.remarks = History(), Remarks()
        self._metrics = Tail(directory / "metrics.jsonl", max_line_bytes=MAX_LINE_BYTES)
        self._log = Tail(
            directory / "stdout.log",
            max_line_bytes=_MAX_SAID_BYTES,
            first_bytes=_FIRST_SAID_BYTES,
        )
        self._problems: dict[str, str] = {}
        self._lines = self._bad_lines = 0  # of the metrics
        self._news_s: float | None = None  # monotonic time of the last new lines
        self._log_modified_s = 0.0
        self._has_caught_up = False  # counting lines from the first look

    def look(self) -> bool:
        """Read new contents; True if another look finds more at once."""
        self.config.look()
        self.outcome.look()  # before the metrics, which are complete when it exists
        self.history.added = []
        has_more = any([self._look_at_metrics(), self._look_at_log()])
        self._has_caught_up |= not has_more
        return has_more

    @property
    def silent_s(self) -> float | None:
        """Seconds since the last metrics or remarks; None before the first, and during start-up.

        Contents of the first look count by the file system's clock. A resumed run writes its config
        anew, then its log, and metrics after its first steps.
        """
        is_resumed = 0 < self._log_modified_s < self.config.modified_s
        if self._news_s is None or is_resumed or self.remarks.is_start_up:
            return None
        return max(0.0, time.monotonic() - self._news_s)

    @property
    def problems(self) -> list[str]:
        """Problems of unreadable files, one line per file."""
        found = [self.config.problem, self.outcome.problem, *self._problems.values()]
        return [problem for problem in found if problem]

    def _look_at_metrics(self) -> bool:
        added = self._look_at(self._metrics)
        if added.is_anew:
            self.history, self._lines, self._bad_lines = History(), 0, 0
            self._problems.pop(_A_LINE, None)
        for line in added.lines:
            if self._bad_lines > _MOST_BAD_LINES:
                problem = f"has more than {_MOST_BAD_LINES:,} lines that are no records"
                path = str(self._metrics.path)
                self._problems[_A_LINE] = str(DataError(path, problem, "the rest is ignored"))
                break
            self._lines += 1
            self._add_record(line)
        return added.has_more

    def _look_at(self, tail: Tail) -> Added:
        """New lines; none if the file cannot be read now, because it may come back."""
        self._problems.pop(tail.path.name, None)
        try:
            added = tail.look()
        except DataError as error:
            self._problems[tail.path.name] = str(error)
            return Added()
        if added.lines:  # now, or at the first look the time of the file's last change
            age_s = 0.0 if self._has_caught_up else max(0.0, time.time() - added.modified_s)
            self._news_s = max(self._news_s or -math.inf, time.monotonic() - age_s)
        return added

    def _add_record(self, line: bytes) -> None:
        """Take a line; a line that is no record is reported and skipped."""
        last_step = self.history.last["step"] if self.history.last else None
        try:
            where = f"{self._metrics.path}, line {self._lines}"
            self.history.add(read_metrics_record(line, where, last_step))
        except DataError as error:
            self._problems[_A_LINE] = str(error)
            self._bad_lines += 1

    def _look_at_log(self) -> bool:
        added = self._look_at(self._log)
        if added.is_anew:
            self.remarks = Remarks()
        for line in added.lines:
            self.remarks.add(line)
        self._log_modified_s = added.modified_s
        return added.has_more
