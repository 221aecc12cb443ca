"""Tables shipped beside the code, and interpolation between their points."""

import csv
import math
from importlib import resources
from typing import TypeVar, get_type_hints

Row = TypeVar("Row")


def shipped_rows(file: str, kind: type[Row], **chosen: str) -> tuple[Row, ...]:
    """Rows of a CSV file below `plan` as dataclasses: fields are columns of int, float or str.

    `chosen` keeps the rows with the given value in the given column.
    """
    text = resources.files("bert_tools.plan").joinpath(file).read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    types = {
        key: each if each in (int, float) else str for key, each in get_type_hints(kind).items()
    }
    return tuple(
        kind(**{key: of(row[key]) for key, of in types.items()})
        for row in csv.DictReader(lines)
        if all(row[column] == value for column, value in chosen.items())
    )


def share_between(value: float, low: float, high: float) -> float:
    """Share of the way from `low` to `high` of a value, by logarithms: 0 .. 1 between them."""
    return math.log(value / low) / math.log(high / low)


def geometric(low: float, high: float, share: float) -> float:
    """The value at that share of the straight line in logarithms."""
    return low * math.exp(share * math.log(high / low))


def rounded(value: float, digits: int) -> float:
    """The value rounded to so many significant digits."""
    return float(f"{value:.{digits}g}")
