"""What is known of a watched run at one moment, who finds it out, and which run that is.

A run is named, or the newest of several in a directory is watched.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from bert_tools.report.run import is_reference_config
from bert_tools.watch.alerts import Alert, find_alerts
from bert_tools.watch.history import History
from bert_tools.watch.remaining import Forecast, Remaining, by_curve, by_published
from bert_tools.watch.remarks import Remarks
from bert_tools.watch.run_files import RunFiles
from mlperf_bert.common.errors import DataError, one_line
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.run.outcome import RunOutcome

PACE = 12  # newest records that the remaining time goes by
_SLOWEST_S = 1e9  # a sample, above which it is none

# `no run`: no directory yet; `start-up`: no metrics yet.
Phase = Literal["no run", "start-up", "running", "ended"]

_RUN = re.compile(r"run_(\d{1,6})")
_OF_A_RUN = ("metrics.jsonl", "config.toml", "outcome.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """One moment of a run. All texts are printable, whatever the files hold.

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


class Watcher:
    """Looks at a run directory's newest run, or at one that was named."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: RunFiles | None = None

    def look(self) -> tuple[Look, bool]:
        """The moment, and whether there is more to read at once.

        Raises DataError where the path is no directory at the first look; later it may come back.
        """
        directory = self._find()
        if directory is None:
            self._files = None
            return _nothing_yet(self._path), False
        if self._files is None or self._files.directory != directory:
            self._files = RunFiles(directory)
        has_more = self._files.look()
        return _look(self._files), has_more

    def _find(self) -> Path | None:
        """The run's directory; that of the last look while a file server does not answer."""
        try:
            return find_run(self._path)
        except DataError:
            if self._files is None:
                raise
            return self._files.directory


def _nothing_yet(path: Path) -> Look:
    return Look(
        name=one_line(str(path)),
        phase="no run",
        config=None,
        outcome=None,
        history=History(),
        remarks=Remarks(),
        silent_s=None,
        remaining=Remaining(None, None, None, ""),
        alerts=(),
    )


def _look(files: RunFiles) -> Look:
    history, config, outcome = files.history, files.config.value, files.outcome.value
    phase = _phase(history, outcome)
    silent_s = files.silent_s if phase == "running" else None
    parts = files.directory.parts[-2:]
    return Look(
        name=one_line(str(Path(*parts))),
        phase=phase,
        config=config,
        outcome=outcome,
        history=history,
        remarks=files.remarks,
        silent_s=silent_s,
        remaining=remaining(config, history, files.remarks, outcome),
        alerts=tuple(find_alerts(config, history, files.remarks, silent_s, files.problems)),
    )


def _phase(history: History, outcome: RunOutcome | None) -> Phase:
    if outcome is not None:
        return "ended"
    return "running" if history.last is not None else "start-up"


def remaining(
    config: RunConfig | None, history: History, remarks: Remarks, outcome: RunOutcome | None
) -> Remaining:
    """What the run may still take: its median rate of now, and what evaluations take."""
    if outcome is not None or config is None or history.last is None:
        return Remaining(None, None, None, "")
    sample_s = _seconds_a_sample(config, history, remarks)
    if sample_s is None:
        return Remaining(None, None, None, "no rate is known")
    steps = max(0, config.max_steps - history.last["step"])
    to_last_step_s = steps * config.parallel.global_batch_size * sample_s
    forecast = _forecast(config, history)
    if isinstance(forecast, str):
        return Remaining(to_last_step_s, None, None, forecast)
    to_target_s = (forecast.low_samples * sample_s, forecast.high_samples * sample_s)
    return Remaining(to_last_step_s, to_target_s, forecast.basis, "")


def _seconds_a_sample(config: RunConfig, history: History, remarks: Remarks) -> float | None:
    rates = history.recent("samples_per_s", PACE)
    rate = median(rates) if rates else 0.0
    if rate <= 0:
        return None
    beside = config.eval.overlap == "side_stream"
    evaluation_s = 0.0 if beside else remarks.evaluation_s or 0.0
    seconds = 1 / rate + evaluation_s / max(1, config.eval_interval_samples)
    return seconds if seconds < _SLOWEST_S else None


def _forecast(config: RunConfig, history: History) -> Forecast | str:
    target = config.eval.target_accuracy
    if history.best_accuracy is not None and history.best_accuracy >= target:
        return "reached"
    assert history.last is not None
    if is_reference_config(config):
        batch = config.parallel.global_batch_size
        return by_published(history.last["samples"], batch, config.optim.name, target)
    since = history.last["samples"] - history.evaluations[-1].samples if history.evaluations else 0
    forecast = by_curve(list(history.evaluations), target)
    if isinstance(forecast, str):
        return forecast
    low, high = (max(0.0, each - since) for each in (forecast.low_samples, forecast.high_samples))
    return Forecast(low, high, forecast.basis)


def find_run(path: Path) -> Path | None:
    """The directory `run_<i>` that `path` is, or has, the highest i of several; None: not yet.

    Raises DataError where `path` is no directory or cannot be read.
    """
    newest: tuple[int, str] | None = None
    is_run = _RUN.fullmatch(path.name) is not None
    try:
        with os.scandir(path) as entries:  # one at a time: anything may lie beside the runs
            for entry in entries:
                is_run |= entry.name in _OF_A_RUN
                if (match := _RUN.fullmatch(entry.name)) and entry.is_dir():
                    newest = max(newest or (-1, ""), (int(match[1]), entry.name))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or "is no name of a directory"
        remedy = "give a run directory, which train makes below runs/"
        raise DataError(str(path), problem, remedy) from None
    if newest:
        return path / newest[1]
    return path if is_run else None
