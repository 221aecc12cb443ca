"""The sub-command `watch`: how runs are doing, in a few lines each on the terminal.

It only reads files, again at each look. A signal waits until nothing is half drawn. No text of a
file reaches the terminal before `one_line`.
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
    Record,
    ended_in_words,
    metrics_in,
    newest_run,
    points_in,
    read_if_there,
)
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.distributed.signal_watch import SignalPipe
from mlperf_bert.errors import DataError, UserError, one_line
from mlperf_bert.run.outcome import RunOutcome, read_outcome

LEAST_STALLED_S = 60.0  # network file systems may delay writes by as much as half
STALLED_TIMES = 5.0  # times the usual time between two records
PACE = 12  # newest records for rate and remaining time
INTERVAL_S = 2.0  # between looks
_WIDTH = 80  # columns, where stdout is no terminal
_BAR, _LABEL = 24, 10  # columns of the bar, and of a number's name


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A run at one moment.

    `age_s` is the time in seconds since its files were last written, None before the first record.
    `problems` are those of its files, as printable text.
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
        """True if the run has recorded its end."""
        return self.outcome is not None

    @property
    def is_stalled(self) -> bool:
        """True if nothing was written for much longer than is usual between two records."""
        if self.has_ended or self.age_s is None:
            return False
        return self.age_s > max(LEAST_STALLED_S, STALLED_TIMES * self._usual_s)

    @property
    def state(self) -> str:
        """The state of the run in a few words."""
        if not self.is_there:
            return "no run has begun here yet"
        if self.outcome is not None:
            return one_line(f"ended: {ended_in_words(self.outcome, self.config)}")
        if not self.records:
            return "starting: no metrics yet"
        if self.is_stalled and self.age_s is not None:
            return f"stalled: nothing written for {seconds(self.age_s)}"
        return "running"

    @property
    def rate(self) -> float | None:
        """Samples per second, the median of the newest records; None if not known."""
        found = [
            each["samples_per_s"] for each in self.records[-PACE:] if each.get("samples_per_s")
        ]
        return median(found) if found else None

    @property
    def left_s(self) -> float | None:
        """Seconds to the last step at the present rate, evaluations left out; None if not known."""
        if self.config is None or not self.records or not self.rate or self.rate < 0:
            return None
        steps = max(0, self.config.max_steps - self.records[-1]["step"])
        return float(steps * self.config.parallel.global_batch_size) / self.rate

    @property
    def _usual_s(self) -> float:
        """The usual time between two records, without evaluations."""
        found = [
            (new["step"] - old["step"]) * new["step_ms"] / 1e3
            for old, new in pairwise(self.records[-PACE - 1 :])
            if new.get("step_ms")
        ]
        return median(found) if found else 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `watch`."""
    text = "run directory (its newest run), or its run_<i>"
    parser.add_argument("run_paths", type=Path, nargs="+", metavar="RUN", help=text)
    text = "print the state and end (default if stdout is no terminal)"
    parser.add_argument("--once", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Show the runs until all have ended, a signal comes or the terminal is closed; 0 in all cases.

    Raises DataError if a RUN is no directory, or is missing with --once.
    """
    # NO_COLOR turns colours off, and so does a terminal without colours.
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    is_once = args.once or not console.is_terminal or console.is_dumb_terminal
    if is_once:
        for path in args.run_paths:
            if not path.exists():
                raise DataError(str(path), "does not exist", "give a run directory")
        looks = [look_at(path) for path in args.run_paths]
        width = shutil.get_terminal_size((_WIDTH, 24)).columns
        with console.capture() as page:
            console.print(screen_of(looks), width=max(1, width))
        print(page.get(), end="")
        return 0
    live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
    try:
        with SignalPipe() as signals, live:
            while console.is_terminal:  # one that was closed is none, and rich writes nothing to it
                looks = [look_at(path) for path in args.run_paths]
                live.update(screen_of(looks), refresh=True)
                if all(look.has_ended for look in looks) or signals.wait(INTERVAL_S):
                    break
    except OSError as error:
        if error.errno != errno.EIO:  # the terminal was closed
            raise
    return 0


def look_at(path: Path) -> Snapshot:
    """The newest run of a run directory, or a named one, at this moment.

    Raises DataError if the path is no directory. A file that is wrong becomes a problem of the run.
    """
    directory = newest_run(path)
    if directory is None:
        return Snapshot(name=one_line(str(path)), is_there=False)
    problems: list[str] = []

    def read(name: str, reader: Any) -> Any:
        """The reader's result; None for a file that is missing or wrong."""
        try:
            return read_if_there(directory / name, reader)
        except UserError as error:
            problems.append(str(error))
            return None

    outcome = read("outcome.json", read_outcome)  # before the metrics, complete when it exists
    found = read("metrics.jsonl", metrics_in)
    records, problem = found or ((), "")
    if problem:
        problems.append(f"metrics.jsonl: {problem}")
    # Of the console's copy only the time counts. A resumed run writes its config anew.
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


def screen_of(looks: Sequence[Snapshot]) -> RenderableType:
    """What the terminal shows: for each run its name, its state, and lines of its numbers."""
    lines = []
    for look in looks:
        is_well = look.outcome is None or look.outcome.status == "success"
        style = "bold green" if is_well and not look.is_stalled else "bold red"
        lines.append(Text.assemble((look.name, "bold"), "  ", (look.state, style)))
        for name, value in rows_of(look):
            style = "yellow" if name == "problem" else ""
            lines.append(Text.assemble((f"  {name:<{_LABEL}}", "dim"), (value, style)))
    return Group(*lines)


def rows_of(look: Snapshot) -> list[tuple[str, str]]:
    """The lines of a run: each a name and a value, as printable text."""
    rows: list[tuple[str, str]] = []
    if look.records:
        rows += _numbers(look, look.records[-1])
    if look.outcome is not None:
        done = look.outcome
        words = f"{done.steps:,} steps, {done.samples:,} samples"
        rows.append(("ended", f"{words}, {seconds(done.seconds)} of training"))
    rows += [("problem", problem) for problem in look.problems]
    return [(name, one_line(value)) for name, value in rows]


def _numbers(look: Snapshot, last: Record) -> list[tuple[str, str]]:
    step, loss = f"{last['step']:,}", last["loss"]
    if look.config is not None:
        share = min(1.0, last["step"] / look.config.max_steps)
        bar = f"{'#' * int(share * _BAR):-<{_BAR}}"
        step += f" of {look.config.max_steps:,}  {bar} {share:.0%}"
    skipped = sum(record["skipped_steps"] for record in look.records)
    rows = [
        ("step", step),
        ("samples", f"{last['samples']:,}"),
        ("loss", "no number" if loss is None else f"{loss:.4f}"),
        ("accuracy", _accuracy(look)),
        ("rate", "not known" if look.rate is None else f"{look.rate:,.1f} samples/s"),
    ]
    if skipped:
        rows.append(("skipped", f"{skipped:,} steps without an update"))
    if not look.has_ended:
        left = "not known" if look.left_s is None else f"at most {seconds(look.left_s)}"
        rows.append(("left", f"{left} to the last step"))
    return rows


def _accuracy(look: Snapshot) -> str:
    target = look.config.eval.target if look.config else None
    accuracies = [accuracy for _, accuracy in points_in(look.records, "mlm_accuracy")]
    words = f"{accuracies[-1]:.4f}" if accuracies else "no evaluation yet"
    if accuracies and max(accuracies) > accuracies[-1]:
        words += f", best {max(accuracies):.4f}"
    return words if target is None else f"{words}, target {target:g}"
