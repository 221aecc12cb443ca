"""What a person should know at once of a watched run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from bert_tools.report.run import Run, is_reference_config
from bert_tools.report.slowness import DROP, SLOW_RANK, WAITING_SHARE
from bert_tools.report.verdict import judge
from bert_tools.watch.history import History
from bert_tools.watch.remarks import Remarks
from bert_tools.watch.words import duration
from mlperf_bert.common.errors import one_line
from mlperf_bert.config.run_config import RunConfig

SILENT_TIMES = 5.0  # the usual time between two records
LEAST_SILENT_S = 30.0  # what network file systems may hold back
NEWEST, LEAST_BEFORE = 6, 12  # records: those of now, and those that they are compared with

Kind = Literal["silent", "health", "slow", "slow_rank", "waits", "late", "file"]


@dataclass(frozen=True, slots=True)
class Alert:
    """What is wrong, in one printable line; `grave` where the run may be lost."""

    kind: Kind
    weight: Literal["grave", "mild"]
    text: str


def find_alerts(
    config: RunConfig | None,
    history: History,
    remarks: Remarks,
    silent_s: float | None,
    problems: Sequence[str],
) -> Iterator[Alert]:
    """The gravest first."""
    yield from _silence(config, history, remarks, silent_s)
    yield from (Alert("health", "grave", alarm.line) for alarm in history.alarms)
    yield from _late(config, history)
    yield from _slower(history)
    yield from _slow_ranks(config, history, remarks)
    shares = history.shares_waited()
    if shares and median(shares) > WAITING_SHARE:
        text = f"steps wait for data: {median(shares):.0%} of rank 0's time"
        yield Alert("waits", "mild", f"{text}; mlperf_bert doctor --only disk")
    yield from (Alert("file", "mild", problem) for problem in problems)


def usual_gap_s(history: History, remarks: Remarks) -> float:
    """Seconds that usually pass from one record to the next, an evaluation among them."""
    step_ms = history.usual("step_ms") or 0.0
    return history.steps_between * max(0.0, step_ms) / 1e3 + (remarks.evaluation_s or 0.0)


def _silence(
    config: RunConfig | None, history: History, remarks: Remarks, silent_s: float | None
) -> Iterator[Alert]:
    usual_s = usual_gap_s(history, remarks)
    if silent_s is None or silent_s <= max(LEAST_SILENT_S, SILENT_TIMES * usual_s):
        return
    text = f"no new metrics for {duration(silent_s)}, usual is {duration(usual_s)}: "
    text += "hung, stopped or killed?"
    if config is not None and silent_s < config.run.hang_timeout_s:
        text += f" A hung run ends itself after {duration(config.run.hang_timeout_s)}"
    yield Alert("silent", "grave", text)


def _late(config: RunConfig | None, history: History) -> Iterator[Alert]:
    """Beside published runs, where there are some."""
    if config is None or not history.evaluations or not is_reference_config(config):
        return
    run = Run(
        name="",
        config=config,
        records=(),
        evaluations=tuple(history.evaluations),
        throughputs=(),
        global_batch_size=config.parallel.global_batch_size,
        optimizer=config.optim.name,
        target_accuracy=config.eval.target_accuracy,
        is_reference=True,
        initial_weights=None,
        ended=None,
    )
    verdict = judge(run)
    if verdict.kind in ("behind", "off"):
        text = f"{verdict.kind}: {verdict.why}; mlperf_bert report --doctor says more"
        yield Alert("late", "mild" if verdict.kind == "behind" else "grave", text)


def _slower(history: History) -> Iterator[Alert]:
    """The newest records beside all before them."""
    newest = history.recent("samples_per_s", NEWEST)
    before = [rate for _, rate in history.samples_per_s.points][:-NEWEST]
    if len(before) < LEAST_BEFORE or not newest:
        return
    now, usual = median(newest), median(before)
    if usual > 0 and now < DROP * usual:
        text = f"slower than before: {now:,.1f} samples/s, {usual:,.1f} until now"
        yield Alert("slow", "mild", text)


def _slow_ranks(config: RunConfig | None, history: History, remarks: Remarks) -> Iterator[Alert]:
    """Those that the run has named, or how slow the slowest is."""
    if remarks.slow_ranks:
        yield from (Alert("slow_rank", "mild", one_line(text)) for text in remarks.slow_ranks)
        return
    ratio = history.last.get("slowest_over_median") if history.last else None
    factor = config.run.straggler_factor if config else SLOW_RANK
    if ratio is not None and ratio > factor:
        text = f"the slowest rank needs {ratio:.2f} times the median for its own work"
        yield Alert("slow_rank", "mild", text)
