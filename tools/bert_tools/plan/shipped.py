"""Tables that are shipped beside the code, and the lines between their points."""

import csv
import math
from importlib import resources
from typing import TypeVar, get_type_hints

Row = TypeVar("Row")


def shipped_rows(file: str, kind: type[Row], **chosen: str) -> tuple[Row, ...]:
    """Rows of a CSV file below `plan`, as the dataclass: its fields are columns, int, float or str.

    `chosen` keeps the rows with that value in that column.
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
    """How far from `low` to `high` a value lies by its logarithm: 0 .. 1 between them."""
    return math.log(value / low) / math.log(high / low)


def geometric(low: float, high: float, share: float) -> float:
    """The value that lies so far on the straight line of logarithms."""
    return low * math.exp(share * math.log(high / low))


def rounded(value: float, digits: int) -> float:
    """To so many digits that count."""
    return float(f"{value:.{digits}g}")
