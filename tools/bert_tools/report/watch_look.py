"""A look at a watched run: its facts at one moment, alerts, and remaining time.

A run like published ones is expected to need as many samples as they did. For any other run, its
last evaluations are extrapolated in two ways, one sooner and one later than most curves;
docs/tools/watch.md says how often the truth lay between them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

from bert_tools.report.doctor import DROP, SLOW_RANK, WAITING_SHARE, shares_waited
from bert_tools.report.published import judge, published_samples
from bert_tools.report.run import Evaluation, Task, task_of
from bert_tools.report.run_files import newest_run
from bert_tools.report.tensorboard import LiveScalars
from bert_tools.report.watch_files import History, Remarks, WatchedRun
from mlperf_bert.common.console import as_clock
from mlperf_bert.common.errors import DataError, one_line
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.run.outcome import RunOutcome

SCHEMA_VERSION = 1
SILENT_TIMES = 5.0  # times the usual time between two records
LEAST_SILENT_S = 30.0  # network file systems may delay writes by as much
NEWEST, LEAST_BEFORE = 6, 12  # numbers of newest records, and of earlier ones to compare with

PACE = 12  # newest records for the remaining time
_SLOWEST_S = 1e9  # per sample; a slower rate counts as none
FITTED = 4  # evaluations
STANDARD_ERRORS = 2.0
WIDEST = 20.0  # longest over shortest time; a wider forecast is useless
PUBLISHED_SPREAD = 0.15  # single runs at a batch of 448 and 768 lie within this of the mean
_SECONDS_OF_DAY, _MOST_DAYS = 86_400, 9_999

# `no run`: no directory yet; `start-up`: no metrics yet.
Phase = Literal["no run", "start-up", "running", "ended"]
Kind = Literal["silent", "slow", "slow_rank", "waits", "late", "file"]
Basis = Literal["published runs", "its curve"]


@dataclass(frozen=True, slots=True)
class Alert:
    """A problem in one printable line; `grave` if the run may be lost."""

    kind: Kind
    weight: Literal["grave", "mild"]
    text: str


@dataclass(frozen=True, slots=True)
class Forecast:
    """Samples still to train until the target: least, most, and the basis of the forecast."""

    low_samples: float
    high_samples: float
    basis: Basis


@dataclass(frozen=True, slots=True)
class Remaining:
    """Remaining seconds; None if not known, for the reason in `why_not`."""

    to_last_step_s: float | None = None
    to_target_s: tuple[float, float] | None = None
    basis: Basis | None = None
    why_not: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """The facts of a run at one moment. All texts are printable, whatever the files hold.

    `silent_s`: seconds without new metrics; None before the first.
    """

    name: str
    phase: Phase
    config: RunConfig | None
    outcome: RunOutcome | None
    history: History
    remarks: Remarks
    silent_s: float | None
    remaining: Remaining
    alerts: tuple[Alert, ...]

    @property
    def target(self) -> float | None:
        """The accuracy to be reached, if the config is known and has one."""
        return self.config.eval.target if self.config else None

    @property
    def state(self) -> str:
        """The state of the run in a few words."""
        if self.outcome is None:
            silent = any(alert.kind == "silent" for alert in self.alerts)
            return "silent" if silent else self.phase
        has_target = self.config is None or self.target is not None
        if self.outcome.status == "success":
            return "ended: target reached" if has_target else "finished, no target"
        if self.outcome.stopped_by:
            return f"stopped by {one_line(self.outcome.stopped_by):.20}"
        return "ended: target NOT reached" if has_target else "ended before its last step"

    def as_json(self) -> dict[str, Any]:
        """The look for programs; keys are only added. Times are in seconds."""
        history, remaining = self.history, self.remaining
        low, high = remaining.to_target_s or (None, None)
        return {
            "schema_version": SCHEMA_VERSION,
            "run": self.name,
            "phase": self.phase,
            "state": self.state,
            "max_steps": self.config.max_steps if self.config else None,
            "target_accuracy": self.target,
            "last_record": None if history.last is None else dict(history.last),
            "last_accuracy": history.evaluations[-1].accuracy if history.evaluations else None,
            "best_accuracy": history.best_accuracy,
            "skipped_steps": history.skipped_steps,
            "trained_s": history.trained_s,
            "silent_s": self.silent_s,
            "to_last_step_s": remaining.to_last_step_s,
            "to_target_s": {"low": low, "high": high, "basis": remaining.basis},
            "outcome": None if self.outcome is None else asdict(self.outcome),
            "alerts": [asdict(alert) for alert in self.alerts],
        }


class Watcher:
    """Looks at a run directory's newest run, or at a named one."""

    def __init__(self, path: Path, scalars: LiveScalars | None = None) -> None:
        self._path, self._scalars = path, scalars
        self._run: WatchedRun | None = None

    def look(self) -> tuple[Look, bool]:
        """A look, and True if there is more to read at once.

        Raises DataError if the path is no directory at the first look; later it may come back.
        """
        try:
            directory = newest_run(self._path)
        except DataError:
            if self._run is None:
                raise
            directory = self._run.directory  # while a file server does not answer
        if directory is None:
            self._run = None
            return _look(self._path, None), False
        if self._run is None or self._run.directory != directory:
            self._run = WatchedRun(directory)
        has_more = self._run.look()
        if self._scalars is not None:
            self._scalars.write(directory.name, self._run.history.added)
        return _look(Path(*directory.parts[-2:]), self._run), has_more

    def whole_look(self) -> Look:
        """A look after everything present has been read."""
        look, has_more = self.look()
        while has_more:
            look, has_more = self.look()
        return look


def _look(name: Path, run: WatchedRun | None) -> Look:
    history, remarks = (run.history, run.remarks) if run else (History(), Remarks())
    config, outcome = (run.config.value, run.outcome.value) if run else (None, None)
    phase: Phase = "no run" if run is None else "start-up"
    if outcome is not None:
        phase = "ended"
    elif history.last is not None:
        phase = "running"
    silent_s = run.silent_s if run and phase == "running" else None
    problems = run.problems if run else []
    return Look(
        name=one_line(str(name)),
        phase=phase,
        config=config,
        outcome=outcome,
        history=history,
        remarks=remarks,
        silent_s=silent_s,
        remaining=remaining(config, history, remarks) if outcome is None else Remaining(),
        alerts=tuple(find_alerts(config, history, remarks, silent_s, problems)),
    )


def duration(seconds: float) -> str:
    """A duration as `0:12:31`, or as `3 d 4 h` from one day on."""
    if not seconds < _MOST_DAYS * _SECONDS_OF_DAY:
        return f"over {_MOST_DAYS:,} d"
    whole = int(max(0.0, seconds))
    days, hours = divmod(whole // 3600, 24)
    return f"{days:,} d {hours} h" if days else as_clock(whole)


def find_alerts(
    config: RunConfig | None,
    history: History,
    remarks: Remarks,
    silent_s: float | None,
    problems: Sequence[str],
) -> Iterator[Alert]:
    """Yield all alerts, the gravest first."""
    yield from _silence(config, history, remarks, silent_s)
    verdict = judge(task_of(config) if config else Task(), history.evaluations)
    if verdict.kind in ("behind", "off"):
        text = f"{verdict.kind}: {verdict.why}; mlperf_bert report doctor says more"
        yield Alert("late", "mild" if verdict.kind == "behind" else "grave", text)
    yield from _slower(history)
    yield from _slow_rank(history)
    shares = shares_waited(history.recent)
    if shares and median(shares) > WAITING_SHARE:
        text = f"steps wait for data: {median(shares):.0%} of rank 0's time"
        yield Alert("waits", "mild", text)
    yield from (Alert("file", "mild", problem) for problem in problems)


def _silence(
    config: RunConfig | None, history: History, remarks: Remarks, silent_s: float | None
) -> Iterator[Alert]:
    """Alert if the silence is longer than usual between records, an evaluation included."""
    step_ms = max(0.0, history.usual("step_ms") or 0.0)
    usual_s = history.steps_between * step_ms / 1e3 + (remarks.evaluation_s or 0.0)
    if silent_s is None or silent_s <= max(LEAST_SILENT_S, SILENT_TIMES * usual_s):
        return
    text = f"no new metrics for {duration(silent_s)}, usual is {duration(usual_s)}: "
    text += "hung, stopped or killed?"
    if config is not None and silent_s < config.run.hang_timeout_s:
        text += f" A hung run ends itself after {duration(config.run.hang_timeout_s)}"
    yield Alert("silent", "grave", text)


def _slower(history: History) -> Iterator[Alert]:
    """Alert if the newest records are slower than those before."""
    newest = history.newest("samples_per_s", NEWEST)
    before = [rate for _, rate in history.samples_per_s.points][:-NEWEST]
    if len(before) < LEAST_BEFORE or not newest:
        return
    now, usual = median(newest), median(before)
    if usual > 0 and now < DROP * usual:
        text = f"slower than before: {now:,.1f} samples/s, {usual:,.1f} until now"
        yield Alert("slow", "mild", text)


def _slow_rank(history: History) -> Iterator[Alert]:
    """Alert for the slowest rank if it is much slower than the median."""
    ratio = history.last.get("slowest_over_median") if history.last else None
    if ratio is not None and ratio > SLOW_RANK:
        rank = history.last.get("slowest_rank") if history.last else None
        who = "the slowest rank" if rank is None else f"rank {rank}"
        text = f"{who} needs {ratio:.2f} times the median for its own work"
        yield Alert("slow_rank", "mild", text)


def remaining(config: RunConfig | None, history: History, remarks: Remarks) -> Remaining:
    """The remaining time of the run, from its present median rate and the time of evaluations."""
    if config is None or history.last is None:
        return Remaining()
    sample_s = _seconds_a_sample(config, history, remarks)
    if sample_s is None:
        return Remaining(why_not="no rate is known")
    steps = max(0, config.max_steps - history.last["step"])
    to_last_step_s = steps * config.parallel.global_batch_size * sample_s
    forecast = _forecast(config, history)
    if isinstance(forecast, str):
        return Remaining(to_last_step_s, why_not=forecast)
    to_target_s = (forecast.low_samples * sample_s, forecast.high_samples * sample_s)
    return Remaining(to_last_step_s, to_target_s, forecast.basis)


def _seconds_a_sample(config: RunConfig, history: History, remarks: Remarks) -> float | None:
    rates = history.newest("samples_per_s", PACE)
    rate = median(rates) if rates else 0.0
    if rate <= 0:
        return None
    beside = config.eval.overlap == "side_stream"
    evaluation_s = 0.0 if beside else remarks.evaluation_s or 0.0
    seconds = 1 / rate + evaluation_s / max(1, config.eval_interval_samples)
    return seconds if seconds < _SLOWEST_S else None


def _forecast(config: RunConfig, history: History) -> Forecast | str:
    assert history.last is not None
    task, samples, target = task_of(config), history.last["samples"], config.eval.target
    if target is None:
        return "no target"
    if history.best_accuracy is not None and history.best_accuracy >= target:
        return "reached"
    if task.is_reference:
        return by_published(samples, task)
    forecast = by_curve(list(history.evaluations), target)
    if isinstance(forecast, str):
        return forecast
    since = samples - history.evaluations[-1].samples
    low, high = (max(0.0, each - since) for each in (forecast.low_samples, forecast.high_samples))
    return Forecast(low, high, forecast.basis)


def by_published(samples: int, task: Task) -> Forecast | str:
    """A forecast for BERT-large on MLPerf's target, or a text that says why there is none."""
    expected = published_samples(task)
    if not expected:
        return "nothing is published for this batch"
    low = min(expected) * (1 - PUBLISHED_SPREAD) - samples
    high = max(expected) * (1 + PUBLISHED_SPREAD) - samples
    if high <= 0:
        return "later than the published runs of this batch"
    return Forecast(max(0.0, low), high, "published runs")


def by_curve(evaluations: Sequence[Evaluation], target: float) -> Forecast | str:
    """A forecast from the last FITTED evaluations, or a text that says why there is none.

    The sooner end follows a straight line with the fitted slope plus twice its standard error, or
    the steepest part's slope. The later end follows a logarithm of the samples with the fitted
    slope less twice its standard error, or the last part's slope.
    """
    last = evaluations[-FITTED:]
    if len(last) < FITTED:
        return f"after {FITTED} evaluations"
    now = last[-1].samples
    gap = max(0.0, target - last[-1].accuracy)
    if last[0].samples <= 0 or any(b.samples <= a.samples for a, b in pairwise(last)):
        return "the samples of the evaluations do not ascend"
    shares = [each.samples / now for each in last]
    logs = [math.log(share) for share in shares]
    accuracies = [each.accuracy for each in last]
    slope, error = _slope(shares, accuracies)
    steepest = max(_slopes(shares, accuracies))
    log_slope, log_error = _slope(logs, accuracies)
    flattest = min(log_slope - STANDARD_ERRORS * log_error, _slopes(logs, accuracies)[-1])
    if flattest <= 0:
        return "the curve does not rise steadily"
    low = gap / max(slope + STANDARD_ERRORS * error, steepest)
    high = math.expm1(min(gap / flattest, math.log(1e6)))
    interval = (last[-1].samples - last[-2].samples) / now  # only an evaluation can see it
    high += interval
    if high > WIDEST * max(low, interval):
        return "the curve is too flat or uneven"
    return Forecast(low * now, high * now, "its curve")


def _slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """The slope of the least-squares line through points, and its standard error."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((each - mean_x) ** 2 for each in x)
    if spread == 0:
        return 0.0, math.inf
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    off = sum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    return slope, math.sqrt(off / (len(x) - 2) / spread)


def _slopes(x: Sequence[float], y: Sequence[float]) -> list[float]:
    """The slopes from each point to the next."""
    points = zip(x, y, strict=True)
    return [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(points)]
