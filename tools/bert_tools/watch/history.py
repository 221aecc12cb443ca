"""What the records of `metrics.jsonl` have said so far, in bounded memory.

A curve has a bounded size: where it has too many points, neighbours are averaged.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bert_tools.report.run import Evaluation
from mlperf_bert.common.health import Alarm, AlarmKind, Health

MOST_POINTS = 1024  # more than a terminal has dots

RECENT = 32  # records that count as now
KEPT_EVALUATIONS = 16
_LONGEST_MS = 1e12  # of a step: thirty years
Record = Mapping[str, Any]


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


class History:
    """Takes one record after the other, as `report.metrics_reader` has checked them."""

    def __init__(self) -> None:
        self.loss, self.accuracy, self.samples_per_s = Series(), Series(), Series()
        self.evaluations: deque[Evaluation] = deque(maxlen=KEPT_EVALUATIONS)
        self.best_accuracy: float | None = None
        self.last: Record | None = None
        self.skipped_steps = 0
        self.trained_s = 0.0  # without evaluations
        self.steps_between = 0  # the last two records
        self._recent: deque[Record] = deque(maxlen=RECENT)
        self._health = Health(None)
        self._alarms: dict[AlarmKind, Alarm] = {}

    def add(self, record: Record) -> None:
        """Take a record of a later step."""
        step, samples = record["step"], record["samples"]
        self.steps_between = step - (self.last["step"] if self.last else 0)
        self.trained_s += self.steps_between * _possible_ms(record.get("step_ms")) / 1e3
        self.skipped_steps += record["skipped_steps"]
        if record["loss"] is not None:
            self.loss.add(samples, record["loss"])
        if record.get("samples_per_s") is not None:
            self.samples_per_s.add(samples, record["samples_per_s"])
        accuracy = record["mlm_accuracy"]
        if accuracy is not None:
            self.accuracy.add(samples, accuracy)
            self.evaluations.append(Evaluation(samples, accuracy))
            self.best_accuracy = max(accuracy, self.best_accuracy or 0.0)
        self._alarms |= {alarm.kind: alarm for alarm in self._health.alarms(record)}
        self._recent.append(record)
        self.last = record

    @property
    def alarms(self) -> list[Alarm]:
        """Those of `train` that have not recovered."""
        lasting = self._health.state()
        return [alarm for kind, alarm in self._alarms.items() if lasting[kind]]

    def recent(self, key: str, most: int = RECENT) -> list[float]:
        """A key's numbers in the newest records, as far as they have it."""
        records = list(self._recent)[-most:]
        return [record[key] for record in records if record.get(key) is not None]

    def usual(self, key: str) -> float | None:
        """The median of the recent ones; None where there is none."""
        values = self.recent(key)
        return median(values) if values else None

    def shares_waited(self) -> Sequence[float]:
        """Of the recent steps' time, how much went by waiting for data."""
        return [
            record["wait_ms"] / record["step_ms"]
            for record in self._recent
            if record.get("wait_ms") is not None and (record.get("step_ms") or 0) > 0
        ]


def _possible_ms(value: float | None) -> float:
    """A time that sums up to something, whatever a file says."""
    return min(max(0.0, value or 0.0), _LONGEST_MS)
