"""The files of one run, read as they grow: its config, metrics, remarks and outcome."""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from bert_tools.report.metrics_reader import MAX_LINE_BYTES, read_metrics_record
from bert_tools.watch import remarks
from bert_tools.watch.history import History
from bert_tools.watch.remarks import Remarks
from bert_tools.watch.tail import Added, Tail
from mlperf_bert.common.errors import DataError, UserError
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.run.outcome import RunOutcome, read_outcome

Parsed = TypeVar("Parsed")

METRICS, STDOUT_LOG = "metrics.jsonl", "stdout.log"
_A_LINE = "a line of the metrics"
_MOST_BAD_LINES = 1000  # after which the rest of the file is not looked at


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
        seen = _signature(self._path)
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


class RunFiles:
    """Everything of one run that is watched, as of the last look."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config: WholeFile[RunConfig] = WholeFile(directory / "config.toml", load_config)
        self.outcome: WholeFile[RunOutcome] = WholeFile(directory / "outcome.json", read_outcome)
        self.history, self.remarks = History(), Remarks()
        self._metrics = Tail(directory / METRICS, max_line_bytes=MAX_LINE_BYTES)
        self._log = Tail(
            directory / STDOUT_LOG,
            max_line_bytes=remarks.MAX_LINE_BYTES,
            first_bytes=remarks.FIRST_BYTES,
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
                path = str(self.directory / METRICS)
                self._problems[_A_LINE] = str(DataError(path, problem, "the rest is not looked at"))
                break
            self._lines += 1
            self._add_record(line)
        self._note_news(added)
        return added.has_more

    def _look_at(self, tail: Tail) -> Added:
        """Nothing where the file cannot be read now: it may come back."""
        self._problems.pop(tail.path.name, None)
        try:
            return tail.look()
        except DataError as error:
            self._problems[tail.path.name] = str(error)
            return Added()

    def _add_record(self, line: bytes) -> None:
        """Take a line in; one that is no record is named and passed over."""
        where = f"{self.directory / METRICS}, line {self._lines}"
        try:
            record = read_metrics_record(line, where)
            last = self.history.last
            if last is not None and record["step"] <= last["step"]:
                problem = f"goes back to step {record['step']}"
                raise DataError(where, problem, "use the file as the run wrote it")
        except DataError as error:
            self._problems[_A_LINE] = str(error)
            self._bad_lines += 1
            return
        self.history.add(record)

    def _look_at_log(self) -> bool:
        added = self._look_at(self._log)
        if added.is_anew:
            self.remarks = Remarks()
        for line in added.lines:
            self.remarks.add(line)
        self._log_modified_s = added.modified_s
        self._note_news(added)
        return added.has_more

    def _note_news(self, added: Added) -> None:
        """Lines came: now, or as the first look found them when their file was changed."""
        if added.lines:
            age_s = 0.0 if self._has_caught_up else max(0.0, time.time() - added.modified_s)
            self._news_s = max(self._news_s or -math.inf, time.monotonic() - age_s)


def _signature(path: Path) -> tuple[int, ...] | None:
    """What changes when a file is written or replaced; None where there is none."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError):
        return ()  # reading it will say what is wrong
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
