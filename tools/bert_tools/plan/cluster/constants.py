"""What no data sheet says: fitted and assumed constants of the simulator, with their sources."""

import csv
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """Values of `constants.csv`, which gives each one's unit, bounds and source."""

    matrix_efficiency: float
    kernel_overhead_us: float
    host_launch_us: float
    network_efficiency: float
    jitter_fraction: float
    memory_efficiency: float
    attention_efficiency: float
    link_efficiency: float
    link_latency_us: float
    network_latency_us: float
    collective_start_us: float
    overlap_slowdown: float
    sync_us: float

    def with_value(self, name: str, value: float) -> "Constants":
        """The same with one constant changed, by name."""
        return replace(self, **{name: value})


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstantRow:
    """One constant: its value, the bounds it may take, and where it comes from."""

    name: str
    value: float
    low: float
    high: float
    kind: Literal["fitted", "assumed"]
    unit: str
    source: str


@cache
def constant_rows() -> tuple[ConstantRow, ...]:
    """All rows of `constants.csv`, in its order."""
    text = resources.files(__package__).joinpath("constants.csv").read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return tuple(
        ConstantRow(
            name=row["name"],
            value=float(row["value"]),
            low=float(row["low"]),
            high=float(row["high"]),
            kind="fitted" if row["kind"] == "fitted" else "assumed",
            unit=row["unit"],
            source=row["source"],
        )
        for row in csv.DictReader(lines)
    )


def default_constants() -> Constants:
    """The values of `constants.csv`."""
    values = {row.name: row.value for row in constant_rows()}
    assert set(values) == {field.name for field in fields(Constants)}
    return Constants(**values)
