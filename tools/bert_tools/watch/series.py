"""A curve of bounded size: where it has too many points, neighbours are averaged."""

from dataclasses import dataclass, field

MOST_POINTS = 1024  # more than a terminal has dots


@dataclass(slots=True)
class Series:
    """Points (x, y) in the order they came, each the mean of so many as needed."""

    _points: list[tuple[float, float]] = field(default_factory=list)
    _stride: int = 1  # how many make a point
    _count: int = 0  # of the point in the making
    _mean: tuple[float, float] = (0.0, 0.0)

    def add(self, x: float, y: float) -> None:
        """Append a point of finite numbers."""
        self._count += 1
        self._mean = (
            _towards(self._mean[0], x, self._count),
            _towards(self._mean[1], y, self._count),
        )
        if self._count < self._stride:
            return
        self._points.append(self._mean)
        self._count, self._mean = 0, (0.0, 0.0)
        if len(self._points) == MOST_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [(_towards(a[0], b[0], 2), _towards(a[1], b[1], 2)) for a, b in pairs]
            self._stride *= 2

    @property
    def points(self) -> list[tuple[float, float]]:
        """All, the one in the making too."""
        return [*self._points, self._mean] if self._count else list(self._points)


def _towards(mean: float, value: float, count: int) -> float:
    """The mean of `count` values, of which `mean` is that of all but the last."""
    return mean + (value - mean) / count
