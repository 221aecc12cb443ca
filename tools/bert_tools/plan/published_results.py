"""Reads tables of published MLPerf results: the one that is shipped, or one of the same columns."""

import csv
import math
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from bert_tools.plan.entries import Entry
from mlperf_bert.common.errors import DataError
from mlperf_bert.common.untrusted import in_brief, read_regular_file

COLUMNS = (
    "round",
    "submitter",
    "system",
    "division",
    "accelerator",
    "accelerators",
    "time_min",
    "failed_runs",
    "global_batch",
    "samples_million",
    "logged_seq_per_s",
    "seq_per_s",
    "seq_per_s_per_accelerator",
    "init_s",
)
SHIPPED = "published_results.csv"
_MAX_BYTES = 2**20  # 348 entries have 36 kB
_LONGEST_CELL = 200
_REMEDY = f"give a CSV file with the columns of {SHIPPED} (docs/scaling.md)"
_PLAIN_NUMBER = re.compile(r"\d{1,12}(\.\d{1,12})?", re.ASCII)


def published_entries() -> list[Entry]:
    """The shipped table: MLPerf Training BERT, v0.7 to v5.0, 348 entries."""
    text = resources.files(__package__).joinpath(SHIPPED).read_text("utf-8")
    return _parse_table(text, SHIPPED)


def read_table(path: Path) -> list[Entry]:
    """The entries of a CSV file of the same columns; lines that begin with `#` are comments.

    Raises DataError, naming the line, for anything else.
    """
    try:
        text = read_regular_file(path, _MAX_BYTES).decode("utf-8-sig")  # spreadsheets mark UTF-8
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise DataError(str(path), reason or "cannot be read", _REMEDY) from None
    return _parse_table(text, str(path))


def _parse_table(text: str, source: str) -> list[Entry]:
    entries = []
    header_seen = False
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        where = f"{source}, line {number}"
        cells = _cells(line, where)
        if not header_seen:
            if tuple(cells) != COLUMNS:
                raise DataError(where, f"is {in_brief(line)}, not the column names", _REMEDY)
            header_seen = True
        elif len(cells) != len(COLUMNS):
            raise DataError(where, f"has {len(cells)} cells, not {len(COLUMNS)}", _REMEDY)
        else:
            entries.append(_entry(dict(zip(COLUMNS, cells, strict=True)), where))
    if not entries:
        raise DataError(source, "holds no entry", _REMEDY)
    return entries


def _cells(line: str, where: str) -> list[str]:
    try:
        rows = list(csv.reader([line], strict=True))
    except csv.Error as error:
        raise DataError(where, f"is no line of a CSV file ({error})", _REMEDY) from None
    cells = [cell.strip() for row in rows for cell in row]
    long = [cell for cell in cells if len(cell) > _LONGEST_CELL]
    if long:
        raise DataError(where, f"has a cell of {len(long[0]):,} characters", _REMEDY)
    return cells


def _entry(row: Mapping[str, str], where: str) -> Entry:
    if not row["system"]:
        raise DataError(where, "names no system", _REMEDY)
    millions = _positive(row, "samples_million", where)
    return Entry(
        system=row["system"],
        accelerators=_count(row, "accelerators", where) or None,
        time_min=_positive(row, "time_min", where),
        samples=None if millions is None else millions * 1e6,
        seq_per_s=_positive(row, "seq_per_s", where),
        round=row["round"],
        submitter=row["submitter"],
        division=row["division"],
        accelerator=row["accelerator"],
        global_batch_size=_count(row, "global_batch", where),
        failed_runs=_count(row, "failed_runs", where) or 0,
    )


def _positive(row: Mapping[str, str], column: str, where: str) -> float | None:
    text = row[column]
    if not text:
        return None
    number = float(text) if _PLAIN_NUMBER.fullmatch(text) else math.nan
    if not number > 0:
        problem = f"{column} is {in_brief(text)}, not a number above zero"
        raise DataError(where, problem, "mend it, or leave the cell empty")
    return number


def _count(row: Mapping[str, str], column: str, where: str) -> int | None:
    text = row[column]
    if not text:
        return None
    if not (_PLAIN_NUMBER.fullmatch(text) and text.isdecimal()):
        problem = f"{column} is {in_brief(text)}, not a whole number"
        raise DataError(where, problem, "mend it, or leave the cell empty")
    return int(text)
