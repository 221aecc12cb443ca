"""Finds MLPerf logs below a directory, and makes an entry of each system's."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from bert_tools.plan.entries import Entry, Skipped
from bert_tools.plan.logged_system import BENCHMARK, system_entry
from mlperf_bert.common.errors import DataError

# A clone of a round has some ten thousand files; depth six is MLPerf's layout in such a clone.
MOST_FILES, MOST_DEPTH = 500_000, 16
_LOG = re.compile(r"result_\d{1,5}\.txt", re.ASCII)


@dataclass(frozen=True, slots=True)
class LogTree:
    """The entries below a directory, in the order of their paths, and what was left out of it."""

    entries: tuple[Entry, ...]
    skipped: tuple[Skipped, ...]


def read_tree(root: Path) -> LogTree:
    """Every directory with `result_<n>.txt` in it is a system's; links are not followed.

    In MLPerf's layout, results/<system>/<benchmark>/, only the benchmark bert is read. A log that
    says another, and what cannot be read, is left out and named. Raises DataError where there are
    no logs, or too many files to look through.
    """
    entries: list[Entry] = []
    skipped: list[Skipped] = []
    found = False
    for directory, logs in _directories(root, skipped):
        found = True
        entry, problems = system_entry(directory, logs)
        skipped += problems
        if entry is not None:
            entries.append(entry)
    if not found:
        remedy = "give a directory with results/<system>/bert/result_<n>.txt below it"
        raise DataError(str(root), "holds no MLPerf log of bert", remedy)
    return LogTree(tuple(entries), tuple(skipped))


def _directories(root: Path, skipped: list[Skipped]) -> Iterator[tuple[Path, list[Path]]]:
    """Directories with logs, by path, each with its logs by number; `skipped` gets the rest."""
    waiting = [(root, 0)]
    seen = 0
    while waiting:
        directory, depth = waiting.pop()
        below, logs = [], []
        try:
            with os.scandir(directory) as listed:
                found = list(islice(listed, MOST_FILES + 1))
        except OSError as error:
            skipped.append(Skipped(str(directory), error.strerror or "cannot be read"))
            continue
        for each in found:
            seen += 1
            if seen > MOST_FILES:
                problem = f"holds more than {MOST_FILES:,} files"
                raise DataError(str(root), problem, "give a directory nearer to the logs")
            if _LOG.fullmatch(each.name):
                logs.append(Path(each.path))
            elif each.is_dir(follow_symlinks=False):
                below.append(Path(each.path))
        if logs and not _is_of_another(directory):
            yield directory, sorted(logs, key=lambda path: (len(path.name), path.name))
        if depth < MOST_DEPTH:
            waiting += [(path, depth + 1) for path in sorted(below, reverse=True)]
        elif below:
            problem = f"has directories {MOST_DEPTH + 1} below {root}, which are not looked into"
            skipped.append(Skipped(str(directory), problem))


def _is_of_another(directory: Path) -> bool:
    parts = directory.parts
    return len(parts) >= 3 and parts[-3] == "results" and parts[-1] != BENCHMARK
