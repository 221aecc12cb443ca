"""Long curves with fewer points: what is lowest and highest in each part is kept."""

from collections.abc import Sequence
from typing import TypeAlias

Point: TypeAlias = tuple[float, float | None]  # where, and the value; None is a gap


def thinned(points: Sequence[Point], most: int) -> tuple[Point, ...]:
    """At most about `most` points, at least 8: the first and the last, and of each of equally many
    points in a row the lowest, the highest and a gap, where there is one.
    """
    if len(points) <= max(most, 8):
        return tuple(points)
    parts = max(1, (most - 2) // 2)
    inner = points[1:-1]
    kept: list[Point] = [points[0]]
    for part in range(parts):
        start, stop = part * len(inner) // parts, (part + 1) * len(inner) // parts
        numbers = [n for n in range(start, stop) if inner[n][1] is not None]
        gaps = [n for n in range(start, stop) if inner[n][1] is None][:1]
        chosen = set(gaps)
        if numbers:
            chosen |= {min(numbers, key=lambda n: _value(inner[n]))}
            chosen |= {max(numbers, key=lambda n: _value(inner[n]))}
        kept += [inner[n] for n in sorted(chosen)]
    kept.append(points[-1])
    return tuple(kept)


def _value(point: Point) -> float:
    value = point[1]
    assert value is not None
    return value
