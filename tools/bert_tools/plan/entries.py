"""MLPerf results as the scale-out law sees them: tables of published ones, and `--filter`."""

import csv
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.common.untrusted import in_brief, read_regular_file

PUBLISHED = "published"  # the word for the shipped table
COLUMNS = (
    *("round", "submitter", "system", "division", "accelerator", "accelerators", "time_min"),
    *("failed_runs", "global_batch", "samples_million", "logged_seq_per_s", "seq_per_s"),
    *("seq_per_s_per_accelerator", "init_s"),
)
_SHIPPED = "published_results.csv"
_MAX_BYTES = 2**20  # 348 entries take 36 kB
_LONGEST_CELL = 200
_REMEDY = f"give a CSV file with the columns of {_SHIPPED} (docs/how/scaling.md)"
_PLAIN_NUMBER = re.compile(r"\d{1,12}(\.\d{1,12})?", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One system's result; None or empty text where its source does not give a value.

    `time_min` is the olympic mean of its runs in minutes, `samples` the mean number of sequences
    a run trained on, `seq_per_s` the mean of samples over time of a run, evaluation included.
    """

    system: str
    accelerators: int | None
    time_min: float | None
    samples: float | None
    seq_per_s: float | None
    round: str = ""
    submitter: str = ""
    division: str = ""
    accelerator: str = ""
    global_batch_size: int | None = None
    failed_runs: int = 0
    runs: int | None = None

    @property
    def name(self) -> str:
        """The entry's name in tables and messages."""
        return " ".join(filter(None, (self.round, self.submitter, self.system)))


@dataclass(frozen=True, slots=True)
class Skipped:
    """A source that could not be used, and why."""

    name: str
    problem: str


TEXT_KEYS = ("round", "submitter", "division", "accelerator", "system")
NUMBER_KEYS = ("accelerators", "global_batch_size", "time_min", "samples", "failed_runs")
_CONDITION = re.compile(r"\s*([a-z_]+)\s*(>=|<=|!=|=|~|>|<)\s*(.*?)\s*", re.DOTALL)
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
FILTER_HELP = (
    "keep entries that meet it, such as round=2.1, submitter=NVIDIA, accelerator~A100 or "
    "accelerators>=64; may be repeated, all must hold. KEY: "
    f"{', '.join((*TEXT_KEYS, *NUMBER_KEYS))}; = and != compare (case is ignored), "
    "~ looks for the text, >= <= > < compare numbers, rounds too"
)


def chosen(entries: Sequence[Entry], conditions: Sequence[str]) -> list[Entry]:
    """The entries that meet all conditions. Raises ConfigError for one that cannot be read."""
    tests = [_test(condition) for condition in conditions]
    return [entry for entry in entries if all(test(entry) for test in tests)]


def _test(condition: str) -> Callable[[Entry], bool]:
    match = _CONDITION.fullmatch(condition)
    if match is None:
        remedy = "write it as round=2.1, accelerator~A100 or accelerators>=64"
        raise ConfigError("--filter", f"cannot read {condition!r}", remedy)
    key, sign, wanted = match.groups()
    if key not in (*TEXT_KEYS, *NUMBER_KEYS):
        known = ", ".join((*TEXT_KEYS, *NUMBER_KEYS))
        raise ConfigError("--filter", f"{key!r} is no key", f"use one of {known}")
    by_number = key in NUMBER_KEYS or (key == "round" and sign in (">=", "<=", ">", "<"))
    if by_number:
        return _number_test(condition, key, sign, wanted)
    return _text_test(condition, key, sign, wanted)


def _number_test(condition: str, key: str, sign: str, wanted: str) -> Callable[[Entry], bool]:
    limit, compare = _number(wanted), _COMPARE.get(sign)
    if limit is None or compare is None:
        remedy = f"give a number after =, !=, >=, <=, > or <, as {key}>=64"
        raise ConfigError("--filter", f"cannot read {condition!r}", remedy)

    def meets(entry: Entry) -> bool:
        value = getattr(entry, key)
        number = _number(value) if isinstance(value, str) else value
        return number is not None and compare(number, limit)

    return meets


def _text_test(condition: str, key: str, sign: str, wanted: str) -> Callable[[Entry], bool]:
    text = wanted.casefold()
    if sign == "~":
        return lambda entry: text in getattr(entry, key).casefold()
    if sign in ("=", "!="):
        return lambda entry: (getattr(entry, key).casefold() == text) == (sign == "=")
    problem = f"{condition!r} compares {key}, which is no number"
    raise ConfigError("--filter", problem, "use =, != or ~ with it")


def _number(text: str) -> float | None:
    """A plain number of at most 15 digits, else None."""
    return float(text) if re.fullmatch(r"\d{1,15}(\.\d{1,15})?", text, re.ASCII) else None


def published_entries() -> list[Entry]:
    """The shipped table: MLPerf Training BERT, v0.7 to v5.0, 348 entries."""
    text = resources.files(__package__).joinpath(_SHIPPED).read_text("utf-8")
    return _parse_table(text, _SHIPPED)


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
    number = float(text) if _PLAIN_NUMBER.fullmatch(text) else math.nan
    if text and not number > 0:
        raise _wrong(row, column, where, "a number above zero")
    return number if text else None


def _count(row: Mapping[str, str], column: str, where: str) -> int | None:
    text = row[column]
    if text and not (_PLAIN_NUMBER.fullmatch(text) and text.isdecimal()):
        raise _wrong(row, column, where, "a whole number")
    return int(text) if text else None


def _wrong(row: Mapping[str, str], column: str, where: str, wanted: str) -> DataError:
    problem = f"{column} is {in_brief(row[column])}, not {wanted}"
    return DataError(where, problem, "mend it, or leave the cell empty")
