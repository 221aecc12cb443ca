"""Reads labelled texts and rated pairs from JSON lines, CSV and Parquet, and checks them.

The files come from other people, so every error is one line that names the file, the line and the
remedy.
"""

import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlperf_bert.errors import DataError
from mlperf_bert.extras import require_packages
from mlperf_bert.files import in_brief, open_regular_file, parse_json_object, read_regular_file

JSON_LINES, CSV, PARQUET = (".jsonl", ".ndjson", ".json"), ".csv", ".parquet"
TEXT, PAIR, LABEL, NUMBER = "text", "text_pair", "label", "score"  # names of fields
MIN_PER_CLASS = 4  # three to train on, and one to test on
MIN_PAIRS = 10
MAX_BYTES = 2**31
_OTHER_FORM = f"write it as JSON lines ({JSON_LINES[0]}), {CSV} or {PARQUET}"

Row = tuple[str, Mapping[str, Any]]  # its place, such as `set.jsonl: line 3`, and its fields


@dataclass(frozen=True, slots=True)
class Texts:
    """The examples of a file, in its order.

    `seconds` contains the second text of each example, or is None if there are only single texts.
    A value is a label, or a number as text.
    """

    path: Path
    firsts: list[str]
    seconds: list[str] | None
    values: list[str]

    def __len__(self) -> int:
        return len(self.firsts)


def read_labelled(path: Path) -> Texts:
    """Read texts, or pairs of texts, with labels. Raises DataError or ConfigError."""
    found = _read(path, LABEL, needs_pair=False)
    counts = Counter(found.values)
    if len(counts) < 2:
        problem = f"has only the class {in_brief(found.values[0])}"
        raise DataError(str(path), problem, "add examples of another class")
    name, count = min(counts.items(), key=lambda item: (item[1], item[0]))
    if count < MIN_PER_CLASS:
        problem = f"the class {in_brief(name)} has {count} of the {MIN_PER_CLASS} examples needed"
        remedy = f"add examples of this class, or remove it ({len(counts):,} classes in all)"
        raise DataError(str(path), problem, remedy)
    return found


def read_pairs(path: Path) -> tuple[Texts, list[float]]:
    """Read pairs of texts with numbers, of which at least two must differ."""
    found = _read(path, NUMBER, needs_pair=True)
    numbers = [float(value) for value in found.values]
    if len(numbers) < MIN_PAIRS or len(set(numbers)) < 2:
        problem = f"has {len(numbers)} pairs with {len(set(numbers))} different numbers"
        remedy = f"pass at least {MIN_PAIRS} pairs and two different numbers"
        raise DataError(str(path), problem, remedy)
    return found, numbers


def _read(path: Path, value_field: str, *, needs_pair: bool) -> Texts:
    """Read a file whose field `value_field` contains labels (LABEL) or numbers (NUMBER)."""
    firsts: list[str] = []
    seconds: list[str] = []
    values: list[str] = []
    for where, row in _rows(path):
        is_pair = needs_pair or not _is_empty(row.get(PAIR))
        if firsts and is_pair != bool(seconds):
            problem = f"has {'a' if is_pair else 'no'} second text, unlike the examples before it"
            raise DataError(where, problem, f"fill in {in_brief(PAIR)} in all examples or in none")
        firsts.append(_text(where, row, TEXT))
        if is_pair:
            seconds.append(_text(where, row, PAIR))
        value = _value(where, row, value_field)
        if value_field == NUMBER and not _is_finite(value):
            problem = f"the field {in_brief(value_field)} is {in_brief(value)}"
            raise DataError(where, problem, "write a finite number")
        values.append(value)
    if not firsts:
        raise DataError(str(path), "has no examples", "pass a file with one example per line")
    return Texts(path, firsts, seconds or None, values)


def _field(where: str, row: Mapping[str, Any], name: str) -> Any:
    if name not in row:
        there = ", ".join(in_brief(each) for each in list(row)[:8] if each is not None)
        problem = f"has no field {in_brief(name)}, only {there or 'an empty object'}"
        raise DataError(where, problem, f"rename the field to {in_brief(name)}")
    return row[name]


def _text(where: str, row: Mapping[str, Any], name: str) -> str:
    value = _field(where, row, name)
    if _is_empty(value):
        problem, remedy = "is empty", "remove this example"
    elif not isinstance(value, str):
        problem, remedy = f"is {in_brief(value)}, not a text", "write a text there"
    elif re.search("[\ud800-\udfff]", value):
        problem, remedy = "contains half of a character, such as \\ud800", "write both halves"
    else:
        return value
    raise DataError(where, f"the field {in_brief(name)} {problem}", remedy)


def _is_empty(value: Any) -> bool:
    is_blank = isinstance(value, str) and not value.strip()
    return is_blank or value is None or value != value  # NaN of pandas


def _value(where: str, row: Mapping[str, Any], name: str) -> str:
    value = _field(where, row, name)
    if isinstance(value, str | int | float) and not _is_empty(value):
        return str(value).strip()
    problem = f"the field {in_brief(name)} is {in_brief(value)}"
    raise DataError(where, problem, "write a word or a number there, or remove this example")


def _is_finite(value: str) -> bool:
    try:
        return math.isfinite(float(value))
    except ValueError:
        return False


def _rows(path: Path) -> Iterator[Row]:
    """Yield the place and the fields of each example. The ending of the name tells the format."""
    suffix = path.suffix.lower()
    if suffix not in (*JSON_LINES, CSV, PARQUET):
        raise DataError(str(path), f"has the unknown ending {in_brief(path.suffix)}", _OTHER_FORM)
    try:
        if suffix == PARQUET:
            yield from _parquet_rows(path)
            return
        contents = read_regular_file(path, MAX_BYTES)
    except OSError as error:
        problem = error.strerror or "cannot be read"
        raise DataError(str(path), problem, "check the file's name and its permissions") from None
    try:
        text = contents.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = contents.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}: line {line}", "is not UTF-8", "save the file as UTF-8") from None
    yield from (_csv_rows if suffix == CSV else _json_rows)(path, text)


def _json_rows(path: Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}: line {number}"
        try:
            row = parse_json_object(line)
        except json.JSONDecodeError as error:
            problem = f"is not JSON ({error.msg})"
            raise DataError(where, problem, "write one JSON object per line") from None
        except ValueError as error:
            raise DataError(where, str(error), "write one JSON object per line") from None
        yield where, row


def _csv_rows(path: Path, text: str) -> Iterator[Row]:
    csv.field_size_limit(MAX_BYTES)
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        for row in reader:
            where = f"{path}: line {reader.line_num}"
            if None in row or None in row.values():
                problem = f"does not have the {len(reader.fieldnames or ())} fields of the header"
                raise DataError(where, problem, "quote fields that contain commas")
            yield where, row
    except csv.Error as error:
        remedy = "write the file with a CSV library, such as Python's csv"
        raise DataError(f"{path}: line {reader.line_num}", f"{error}", remedy) from None


def _parquet_rows(path: Path) -> Iterator[Row]:
    purpose, otherwise = "to read .parquet files", f"write the examples as {CSV}"
    where = str(path)
    require_packages(where, "parquet", "pyarrow", purpose=purpose, otherwise=otherwise)
    import pyarrow
    from pyarrow.parquet import ParquetFile

    with open_regular_file(path) as file:
        try:
            rows = ParquetFile(file).read(use_threads=False).to_pylist()
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            problem = f"is not a whole Parquet file ({in_brief(str(error))})"
            raise DataError(where, problem, "write or copy the file again") from None
    for number, row in enumerate(rows, 1):
        yield f"{path}: row {number}", row
