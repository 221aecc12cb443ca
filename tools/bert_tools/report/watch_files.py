"""The files of one run, read as they grow: its config, metrics, remarks and outcome.

The lines that were added to a file are read, whatever becomes of the file meanwhile. What they said
is kept in bounded memory.
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
from mlperf_bert.common.health import Alarm, AlarmKind, Health
from mlperf_bert.common.untrusted import open_regular_file
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.run.outcome import RunOutcome, read_outcome

CHUNK_BYTES = 2**20  # read at one look
FIRST_BYTES = 32 * 2**20  # from the end of a file that is larger when it is first seen
_MARK_BYTES = 64  # before the place that was read to: others there, and the file was rewritten
_A_LINE = "a line of the metrics"
_MOST_BAD_LINES = 1000  # after which the rest of the file is not looked at

MOST_POINTS = 1024  # of a curve: more than a terminal has dots
RECENT = 32  # records that count as now
KEPT_EVALUATIONS = 16
_LONGEST_MS = 1e12  # of a step: thirty years

_MAX_SAID_BYTES = 2 * 2**10  # of a line of stdout.log
_FIRST_SAID_BYTES = 256 * 2**10  # of a long log: its end is what counts
_KEPT_LINES = 8
_MOST_NAMED = 9  # a run names eight slow ranks and counts the others
_TIME = re.compile(r"\d\d:\d\d:\d\d ")
_EVALUATION = re.compile(r"evaluation at [\d,]{1,20} samples: .*\((\d{1,9}\.\d) s\)")
_SLOW_RANK = re.compile(r"rank \d{1,9} on .* is slow: |\d{1,9} more ranks are slow$")
_START_UP = re.compile(r"sampler \w{1,40}, balance \w{1,40}")  # among its first lines
_PROGRESS = re.compile(r"step \d{1,19}/\d{1,19}  ")

Parsed = TypeVar("Parsed")
Record = Mapping[str, Any]


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


class WholeFile(Generic[Parsed]):
    """A small file that is written at once: read again where it has changed."""

    def __init__(self, path: Path, read: Callable[[Path], Parsed]) -> None:
        self._path, self._read = path, read
        self._seen: tuple[int, ...] | None = None
        self.value: Parsed | None = None  # None where it is not there, or cannot be read
        self.problem = ""  # in words: an error would keep all that was read
        self.modified_s = 0.0  # since the epoch, by the clock of the file system

    def look(self) -> None:
        """Read it where it is new or has changed."""
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
        """What changes when the file is written or replaced; None where there is none."""
        try:
            found = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError):
            return ()  # reading it will say what is wrong
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class Remarks:
    """What a run has said in words: takes one line of its `stdout.log` after the other.

    Keeps what is worth showing, all of it printable.
    """

    def __init__(self) -> None:
        self.evaluation_s: float | None = None  # what the last evaluation took
        self.is_start_up = False  # whether the run, or its resumption, has begun and no step ended
        self.slow_ranks: list[str] = []  # of the last comparison
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)  # the last ones, without progress

    def add(self, line: bytes) -> None:
        """Take a line, without its end."""
        text = one_line(line.decode("utf-8", errors="replace"))
        said = text[len("00:00:00 ") :] if _TIME.match(text) else text
        if _PROGRESS.match(said):
            self.is_start_up = False
            return
        self.is_start_up |= _START_UP.fullmatch(said) is not None
        if match := _EVALUATION.fullmatch(said):
            self.evaluation_s = float(match[1])
            self.slow_ranks = []  # the ranks are compared right after
        elif _SLOW_RANK.match(said) and len(self.slow_ranks) < _MOST_NAMED:
            self.slow_ranks.append(said)
        self.lines.append(text)


class Averaged:
    """A curve of bounded size: points as they came, each the mean of as many as needed."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []
        self._new: list[tuple[float, float]] = []  # of the point in the making
        self._stride = 1  # how many make a point

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
        """All, the one in the making too."""
        return [*self._points, *([_mean(self._new)] if self._new else [])]


def _mean(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return fmean(x for x, _ in points), fmean(y for _, y in points)


class History:
    """What the records of `metrics.jsonl` have said, taken one after the other."""

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
        self._health = Health(None)
        self._alarms: dict[AlarmKind, Alarm] = {}

    def add(self, record: Record) -> None:
        """Take a record of a later step, as `run_files` has checked it."""
        step, samples, accuracy = record["step"], record["samples"], record["mlm_accuracy"]
        self.steps_between = step - (self.last["step"] if self.last else 0)
        # A time that sums up to something, whatever a file says.
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
        self._alarms |= {alarm.kind: alarm for alarm in self._health.alarms(record)}
        self.recent.append(record)
        self.added.append(record)
        self.last = record

    @property
    def alarms(self) -> list[Alarm]:
        """Those of `train` that have not recovered."""
        lasting = self._health.state()
        return [alarm for kind, alarm in self._alarms.items() if lasting[kind]]

    def newest(self, key: str, most: int = RECENT) -> list[float]:
        """A key's numbers in the newest records, as far as they have it."""
        records = list(self.recent)[-most:]
        return [record[key] for record in records if record.get(key) is not None]

    def usual(self, key: str) -> float | None:
        """The median of the newest ones; None where there is none."""
        values = self.newest(key)
        return median(values) if values else None


class WatchedRun:
    """Everything of one run that is watched, as of the last look."""

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
        self._news_s: float | None = None  # by the monotonic clock: when lines came last
        self._log_modified_s = 0.0
        self._has_caught_up = False  # with what was there at the first look

    def look(self) -> bool:
        """Read what is new; whether another look finds more at once."""
        self.config.look()
        self.outcome.look()  # before the metrics: they are complete when it is there
        self.history.added = []
        has_more = any([self._look_at_metrics(), self._look_at_log()])
        self._has_caught_up |= not has_more
        return has_more

    @property
    def silent_s(self) -> float | None:
        """Seconds since metrics or remarks came last; None before the first, and in a start-up.

        What was there at the first look counts by the clock of the file system. A resumed run
        writes its config anew, then to its log, and metrics after its first steps.
        """
        is_resumed = 0 < self._log_modified_s < self.config.modified_s
        if self._news_s is None or is_resumed or self.remarks.is_start_up:
            return None
        return max(0.0, time.monotonic() - self._news_s)

    @property
    def problems(self) -> list[str]:
        """What cannot be read, a line of each file."""
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
                self._problems[_A_LINE] = str(DataError(path, problem, "the rest is not looked at"))
                break
            self._lines += 1
            self._add_record(line)
        return added.has_more

    def _look_at(self, tail: Tail) -> Added:
        """Nothing where the file cannot be read now: it may come back."""
        self._problems.pop(tail.path.name, None)
        try:
            added = tail.look()
        except DataError as error:
            self._problems[tail.path.name] = str(error)
            return Added()
        if added.lines:  # came now, or as the first look found them when their file was changed
            age_s = 0.0 if self._has_caught_up else max(0.0, time.time() - added.modified_s)
            self._news_s = max(self._news_s or -math.inf, time.monotonic() - age_s)
        return added

    def _add_record(self, line: bytes) -> None:
        """Take a line in; one that is no record is named and passed over."""
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
