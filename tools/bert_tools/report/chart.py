"""What a chart of a report is, whoever draws it."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from bert_tools.report.series import Point

Style: TypeAlias = Literal["solid", "second", "published"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One curve: values at so many samples; `run` is the number of its run, -1 of none."""

    run: int
    label: str
    style: Style
    points: tuple[Point, ...]

    @property
    def values(self) -> list[float]:
        """Without the gaps."""
        return [value for _, value in self.points if value is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Curves on one scale, over samples, or over what else `across` says.

    `floor` is where the scale begins at the latest; `levels` are horizontal lines (value, what it
    is), `marks` vertical ones (samples, what happened there, number of the run, -1 of none);
    `has_dots` shows each value.
    """

    key: str
    title: str
    unit: str
    about: str
    series: tuple[Series, ...]
    floor: float | None = None
    levels: tuple[tuple[float, str], ...] = ()
    marks: tuple[tuple[float, str, int], ...] = ()
    has_dots: bool = False
    across: str = "samples"
