"""Defines the sub-command `watch`, which shows the progress of runs on the terminal.

The command only reads the runs' files, and it reads them again for each snapshot. A signal takes
effect after the screen has been drawn. All text from files passes through `one_line` before it is
printed.
"""

import argparse
import errno
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from bert_tools.report.chart import seconds
from bert_tools.report.run import (
    PHASES,
    Record,
    ended_in_words,
    metrics_in,
    newest_run,
    points_in,
    read_if_there,
)
from mlperf_bert.arguments import describe
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.distributed.signal_watch import SignalPipe
from mlperf_bert.errors import DataError, UserError, one_line
from mlperf_bert.files import read_json
from mlperf_bert.run.outcome import RunOutcome, read_outcome
from mlperf_bert.run.remaining import NEWEST, Remaining, estimate_remaining, samples_per_s

MIN_STALLED_S = 60.0  # network file systems may delay writes by up to half of this
STALLED_TIMES = 5.0  # a run counts as stalled after this many times its usual time between records
INTERVAL_S = 2.0  # seconds between two snapshots
_WIDTH = 80  # columns if stdout is not a terminal
_BAR, _LABEL = 24, 10  # columns of the progress bar and of a number's name


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The state of a run at one moment.

    `age_s` is the time in seconds since the run's files were last written. It is None before the
    first record.
    `problems` describes damaged files as printable text.
    """

    name: str
    config: RunConfig | None = None
    outcome: RunOutcome | None = None
    records: Sequence[Record] = ()
    age_s: float | None = None
    problems: tuple[str, ...] = ()
    is_there: bool = True

    @property
    def has_ended(self) -> bool:
        """Return whether the run has recorded its end."""
        return self.outcome is not None

    @property
    def is_stalled(self) -> bool:
        """Return whether a running run seems to have stalled.

        A run seems to have stalled if it has written nothing for much longer than its usual time
        between two records.
        """
        if self.has_ended or self.age_s is None:
            return False
        return self.age_s > max(MIN_STALLED_S, STALLED_TIMES * self._usual_s)

    @property
    def state(self) -> str:
        """Return the state of the run in a few words, for example `running`."""
        if not self.is_there:
            return "no run has started here yet"
        if self.outcome is not None:
            return one_line(f"ended: {ended_in_words(self.outcome, self.config)}")
        if not self.records:
            return "starting, no metrics yet"
        if self.is_stalled and self.age_s is not None:
            return f"stalled, nothing written for {seconds(self.age_s)}"
        return "running"

    @property
    def rate(self) -> float | None:
        """Return the median samples per second of the newest records, or None if not known."""
        return samples_per_s(self.records)

    @property
    def remaining(self) -> Remaining | None:
        """Estimate the remaining time at the current rate, or return None if it is not known."""
        if self.config is None or not self.records:
            return None
        evaluations = points_in(self.records, "mlm_accuracy")
        return estimate_remaining(self.config, self.records, evaluations)

    @property
    def _usual_s(self) -> float:
        """Return the median time between recent records in seconds, not including evaluations."""
        found = [
            (new["step"] - old["step"]) * new["step_ms"] / 1e3
            for old, new in pairwise(self.records[-NEWEST - 1 :])
            if new.get("step_ms")
        ]
        return median(found) if found else 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `watch` to its parser."""
    describe(
        parser,
        "Show progress, accuracy and remaining time of runs in the terminal, and update them "
        "until all have ended or Ctrl-C is pressed. The command only reads the runs' files, so it "
        "can watch runs on other machines over a shared file system.",
        "mlperf_bert watch runs/two --once",
    )
    text = "run directory, of which the newest run or all phases are shown, or a folder run_<i>"
    parser.add_argument("run_paths", type=Path, nargs="+", metavar="RUN", help=text)
    text = "print the state of the runs once and exit (default if stdout is not a terminal)"
    parser.add_argument("--once", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Show the runs and return 0.

    The command ends when all runs have ended, a signal arrives, or the terminal is closed. Raises
    DataError if a given RUN is not a directory. If the state is printed only once, a missing RUN is
    an error too.
    """
    # rich turns colours off if NO_COLOR is set or the terminal has none.
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    is_once = args.once or not console.is_terminal or console.is_dumb_terminal
    if is_once:
        for path in args.run_paths:
            if not path.exists():
                raise DataError(str(path), "no such directory", "pass a run directory")
        snapshots = [each for path in args.run_paths for each in snapshots_of(path)]
        width = shutil.get_terminal_size((_WIDTH, 24)).columns
        with console.capture() as page:
            console.print(screen_of(snapshots), width=max(1, width))
        print(page.get(), end="")
        return 0
    live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
    try:
        with SignalPipe() as signals, live:
            while console.is_terminal:  # false once the terminal is closed, and rich stops writing
                snapshots = [each for path in args.run_paths for each in snapshots_of(path)]
                live.update(screen_of(snapshots), refresh=True)
                if all(each.has_ended for each in snapshots) or signals.wait(INTERVAL_S):
                    break
    except OSError as error:
        if error.errno != errno.EIO:  # the terminal was closed
            raise
    return 0


def snapshots_of(path: Path) -> list[Snapshot]:
    """Read the current state of all phases in a run directory, or of one run as `snapshot_of` does.

    Phases that have not started are included only while the command `phases` is running.
    """
    try:
        phases = read_json(path / PHASES, missing="", remedy="")["phases"]
        statuses = [each["status"] for each in phases]
    except (UserError, KeyError, TypeError):  # there is no such file, or it is damaged
        return [snapshot_of(path)]
    folders = [path / f"run_{index}" for index in range(len(statuses))]
    shown = folders if "running" in statuses else [each for each in folders if each.exists()]
    return [snapshot_of(each) for each in shown or [path]]


def snapshot_of(path: Path) -> Snapshot:
    """Read the current state of a run, or of the newest run of a run directory.

    Raises DataError if the path is not a directory. A damaged file is described in `problems`.
    """
    directory = newest_run(path)
    if directory is None:
        return Snapshot(name=one_line(str(path)), is_there=False)
    problems: list[str] = []

    def read(name: str, reader: Any) -> Any:
        """Read a file of the run, or return None if the file is missing or damaged."""
        try:
            return read_if_there(directory / name, reader)
        except UserError as error:
            problems.append(str(error))
            return None

    # The outcome is read before the metrics, because these are complete if it exists.
    outcome = read("outcome.json", read_outcome)
    found = read("metrics.jsonl", metrics_in)
    records, problem = found or ((), "")
    if problem:
        problems.append(f"metrics.jsonl: {problem}")
    # Only the times of these files are used. config.toml counts because a resumed run rewrites it.
    names = ("metrics.jsonl", "stdout.log", "config.toml")
    paths = [directory / name for name in names]
    written = [path.stat().st_mtime for path in paths if path.exists()]
    return Snapshot(
        name=one_line("/".join(directory.absolute().parts[-2:])),
        config=read("config.toml", load_config),
        outcome=outcome,
        records=records,
        age_s=max(0.0, time.time() - max(written)) if records and written else None,
        problems=tuple(problems),
    )


def screen_of(snapshots: Sequence[Snapshot]) -> RenderableType:
    """Return the text for the terminal, with each run's name, its state, and lines with numbers."""
    lines = []
    for snapshot in snapshots:
        is_fine = snapshot.outcome is None or snapshot.outcome.status == "success"
        style = "bold green" if is_fine and not snapshot.is_stalled else "bold red"
        lines.append(Text.assemble((snapshot.name, "bold"), "  ", (snapshot.state, style)))
        for name, value in rows_of(snapshot):
            style = "yellow" if name == "problem" else ""
            lines.append(Text.assemble((f"  {name:<{_LABEL}}", "dim"), (value, style)))
    return Group(*lines)


def rows_of(snapshot: Snapshot) -> list[tuple[str, str]]:
    """Return the lines about a run, each as (name, value) in printable text."""
    rows: list[tuple[str, str]] = []
    if snapshot.records:
        rows += _numbers(snapshot, snapshot.records[-1])
    if snapshot.outcome is not None:
        done = snapshot.outcome
        words = f"{done.steps:,} steps, {done.samples:,} samples"
        rows.append(("ended", f"{words}, {seconds(done.seconds)} of training"))
    rows += [("problem", problem) for problem in snapshot.problems]
    return [(name, one_line(value)) for name, value in rows]


def _numbers(snapshot: Snapshot, last: Record) -> list[tuple[str, str]]:
    step, loss = f"{last['step']:,}", last["loss"]
    if snapshot.config is not None:
        done = min(1.0, last["step"] / snapshot.config.max_steps)
        bar = f"{'#' * int(done * _BAR):-<{_BAR}}"
        step += f" of {snapshot.config.max_steps:,}  {bar} {done:.0%}"
    skipped = sum(record["skipped_steps"] for record in snapshot.records)
    rows = [
        ("step", step),
        ("samples", f"{last['samples']:,}"),
        ("loss", "not a number" if loss is None else f"{loss:.4f}"),
        ("accuracy", _accuracy(snapshot)),
        ("rate", "not known" if snapshot.rate is None else f"{snapshot.rate:,.1f} samples/s"),
    ]
    if skipped:
        rows.append(("skipped", f"{skipped:,} steps without an update"))
    if not snapshot.has_ended:
        remaining = snapshot.remaining
        rows.append(("left", remaining.in_words(seconds) if remaining else "not known"))
    return rows


def _accuracy(snapshot: Snapshot) -> str:
    """Return a text with the last accuracy, the best accuracy if it was higher, and the target."""
    target = snapshot.config.eval.target if snapshot.config else None
    accuracies = [accuracy for _, accuracy in points_in(snapshot.records, "mlm_accuracy")]
    words = f"{accuracies[-1]:.4f}" if accuracies else "no evaluation yet"
    if accuracies and max(accuracies) > accuracies[-1]:
        words += f", best {max(accuracies):.4f}"
    return words if target is None else f"{words}, target {target:g}"
