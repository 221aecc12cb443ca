"""The diagnosis of a run: a verdict, the likeliest causes, and what made it slow.

Known causes of failure (causes.toml) are recognised by their traces in the run's files. Most were
reported in public: docs/tools/report.md names the threads.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import resources
from statistics import median
from typing import Any

from bert_tools.report.published import Kind, Verdict, judge, published_samples
from bert_tools.report.run import Run
from mlperf_bert.common.errors import one_line
from mlperf_bert.data.index import Baseline

SCHEMA_VERSION = 1
EXIT_STATUSES: dict[Kind, int] = {"on track": 0, "behind": 1, "off": 1, "cannot be judged": 3}

LEAST_EVALUATIONS = 3  # evaluations for a plateau
FLAT = 0.03  # most difference between them
RISE = 0.01  # least rise from the first to the last of them
INITIAL = (0.30, 0.40)  # accuracy of the reference around MLPerf's initial checkpoint
INITIAL_SHARE = 0.55  # share of the expected samples after which published runs are above that
REPEATED = (0.60, 0.66)  # accuracy of stuck runs on shards of one repeated sample
UNLOADED_ACCURACY, UNLOADED_LOSS_SHARE = 0.2, 0.8  # of ln(vocabulary), the loss of a guess
MISMATCH = 0.5  # of exp(-loss), the accuracy that a training loss implies
GUESS_ERRORS = 5.0  # standard errors of an accuracy
LEAST_RATES = 6  # records needed to compare thirds
DROP = 0.9  # of the first third's median rate
SLOW_RANK = 1.5  # if the run's config is missing
WAITING_SHARE = 0.05  # of a step's time


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """A possible cause, its evidence in this run, and the remedy: see causes.toml."""

    name: str
    cause: str
    evidence: str
    remedy: str
    decisive: bool = False


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The diagnosis of one run."""

    name: str
    verdict: Verdict
    causes: tuple[Cause, ...]
    slowness: tuple[Cause, ...]

    @property
    def exit_status(self) -> int:
        """0 on track, 1 behind or off, 3 cannot be judged."""
        return EXIT_STATUSES[self.verdict.kind]

    def lines(self) -> list[str]:
        """The diagnosis in lines of text."""
        lines = [f"{self.name}: {self.verdict.kind}", f"  {self.verdict.why}"]
        for title, causes in (
            ("likeliest causes", self.causes),
            ("what made it slow", self.slowness),
        ):
            lines += [f"{title}:"] if causes else []
            for number, cause in enumerate(causes, 1):
                lines += [f"  {number}. {cause.cause}", f"     seen: {cause.evidence}"]
                lines.append(f"     do: {cause.remedy}")
        return [one_line(line) for line in lines]

    def as_json(self) -> dict[str, Any]:
        """The diagnosis for programs; keys are only added."""
        return {
            "schema_version": SCHEMA_VERSION,
            "run": self.name,
            "verdict": self.verdict.kind,
            "why": self.verdict.why,
            "causes": [asdict(cause) for cause in self.causes],
            "slowness": [asdict(cause) for cause in self.slowness],
        }


def diagnose(run: Run, baseline: Baseline | None = None) -> Diagnosis:
    """Diagnose a run; `baseline` is the accuracy of a guess without context on its held-out set."""
    guess = baseline.context_free_accuracy if baseline else run.guess
    verdict = judge(run.task, run.evaluations, guess)
    causes = _found(
        false_success=_false_success(run),
        no_learning_rate=_no_learning_rate(run),
        not_initial=_not_initial(run),
        other_vocabulary=_other_vocabulary(run),
        other_held_out_set=_other_held_out_set(run),
        stays_at_initial=_stays_at_initial(run),
        repeated_samples=_repeated_samples(run),
        stays_at_guess=_stays_at_guess(run, baseline),
    )
    if any(cause.decisive for cause in causes):
        verdict = replace(verdict, kind="off")
    if not any(cause.decisive for cause in causes):
        verdict = replace(verdict, why=verdict.why + _what_next(run, guess))
    if not causes and run.task.is_reference and verdict.kind in ("behind", "off"):
        causes = _found(hyper_parameters=_hyper_parameters(run))
    slowness = _found(
        throughput_drop=_throughput_drop(run),
        slow_rank=_slow_rank(run),
        waits_for_data=_waits_for_data(run),
    )
    return Diagnosis(run.name, verdict, tuple(causes), tuple(slowness))


def _what_next(run: Run, guess: float | None) -> str:
    """What an ended run that no published curve fits needs, by its last evaluations."""
    best, target, outcome = run.best_accuracy, run.task.target_accuracy, run.outcome
    last = [each.accuracy for each in run.evaluations[-LEAST_EVALUATIONS:]]
    is_over = outcome is not None and outcome.stopped_by is None and best < (target or 1)
    if run.config is None or run.task.is_reference or not is_over or not last:
        return ""
    if len(last) == 1 or best == last[-1] > last[0] + RISE:
        seen = "It still rises" if len(last) > 1 else "One evaluation does not show if it rises"
        steps = 2 * run.config.max_steps
        more = f"--set run.max_steps={steps} --set schedule.decay_steps={steps}"
        return f". {seen}: train longer, by {more}"
    if guess and best <= guess:
        return ". It does not rise: look at optim.learning_rate, and at the data (verify --full)"
    return ". It rises no more: a larger model, more text or another learning rate may reach more"


_MASKED_TOKENS_IF_UNKNOWN = 1_000


@cache
def _known() -> dict[str, dict[str, Any]]:
    text = resources.files(__package__).joinpath("causes.toml").read_text("utf-8")
    return tomllib.loads(text)


def _found(**evidence: str | None) -> list[Cause]:
    """The causes that have evidence."""
    return [
        Cause(name=name, evidence=seen, **_known()[name])
        for name, seen in evidence.items()
        if seen is not None
    ]


def _hyper_parameters(run: Run) -> str:
    """The fallback cause of a late run without other evidence."""
    batch = run.task.global_batch_size
    seen = f"no other cause is seen; global batch {'not known' if batch is None else f'{batch:,}'}"
    seen += f", optimizer {run.task.optimizer or 'not known'}"
    if run.config is not None:
        rate, warmup = run.config.optim.learning_rate, run.config.schedule.warmup_steps
        seen += f", learning rate {rate:g}, {warmup} warm-up steps"
    return seen


def _false_success(run: Run) -> str | None:
    best, target = run.best_accuracy, run.task.target_accuracy
    if run.ended != "success" or target is None or best >= target:
        return None
    return f"ended as success; the best accuracy is {best:.4f}, the target {target:g}"


def _no_learning_rate(run: Run) -> str | None:
    if not run.records or any(record.get("learning_rate") for record in run.records):
        return None
    return f"learning_rate is 0 in all {len(run.records)} records"


def _not_initial(run: Run) -> str | None:
    evidence = _below_initial(run)
    if evidence is None or run.initial_weights == "checkpoint":
        return None
    return evidence + ("; the log says random weights" if run.initial_weights == "random" else "")


def _other_vocabulary(run: Run) -> str | None:
    evidence = _below_initial(run)
    if evidence is None or run.initial_weights != "checkpoint":
        return None
    return f"{evidence}; the log says that a checkpoint was loaded"


def _below_initial(run: Run) -> str | None:
    """Evidence that the run did not start from MLPerf's initial checkpoint, if any."""
    if not run.task.is_reference or not run.evaluations:
        return None
    if (accuracy := run.evaluations[0].accuracy) >= UNLOADED_ACCURACY:
        return None
    evidence = f"accuracy {accuracy:.4f} at the first evaluation; that checkpoint has 0.341"
    if run.records and run.config and (loss := run.records[0]["loss"]) is not None:
        guess = math.log(run.config.model.vocab_size)
        if loss > UNLOADED_LOSS_SHARE * guess:
            evidence += f"; the first loss is {loss:.2f}, that of a guess {guess:.2f}"
    return evidence


def _other_held_out_set(run: Run) -> str | None:
    """Evidence of an accuracy far below the one that the training loss implies.

    A model with mean cross-entropy L gives the right word a probability of exp(-L) or more on
    average (Jensen), and is right about as often. The loss includes the next-sentence task's, so
    this is cautious.
    """
    records = [each for each in run.records if each["mlm_accuracy"] is not None]
    if not records or not records[-1]["loss"] or records[-1]["loss"] < 0:
        return None
    accuracy, loss = records[-1]["mlm_accuracy"], records[-1]["loss"]
    if accuracy >= MISMATCH * math.exp(-loss):
        return None
    least = f"{math.exp(-loss):.3f}"
    return (
        f"accuracy {accuracy:.4f}, where a training loss of {loss:.3f} speaks for {least} or more"
    )


def _last_plateau(run: Run) -> tuple[float, float] | None:
    """Lowest and highest of the last evaluations if they are flat."""
    last = [each.accuracy for each in run.evaluations[-LEAST_EVALUATIONS:]]
    if len(last) < LEAST_EVALUATIONS or max(last) - min(last) > FLAT:
        return None
    return min(last), max(last)


def _stays_at_initial(run: Run) -> str | None:
    plateau, expected, best = _last_plateau(run), published_samples(run.task), run.best_accuracy
    if plateau is None or not expected:
        return None
    samples = run.evaluations[-1].samples
    is_there = INITIAL[0] <= plateau[0] and best <= INITIAL[1]
    if not is_there or samples < INITIAL_SHARE * max(expected):
        return None
    return (
        f"accuracy never above {best:.4f} in {samples:,} samples; the initial checkpoint has 0.341"
    )


def _repeated_samples(run: Run) -> str | None:
    plateau = _last_plateau(run)
    if not run.task.is_reference or plateau is None:
        return None
    low, high = plateau
    if not REPEATED[0] <= low <= high <= REPEATED[1]:
        return None
    seen = f"the last {LEAST_EVALUATIONS} evaluations are within {low:.4f} .. {high:.4f}"
    return f"{seen}; runs on shards of one repeated sample stuck at 0.62 to 0.63"


def _stays_at_guess(run: Run, baseline: Baseline | None) -> str | None:
    if baseline is None or _last_plateau(run) is None:
        return None
    guess, best = baseline.context_free_accuracy, run.best_accuracy
    tokens = baseline.masked_tokens or _MASKED_TOKENS_IF_UNKNOWN
    if best > guess + GUESS_ERRORS * math.sqrt(guess * (1 - guess) / tokens):
        return None
    known = f"the best guess without context has {guess:.4f} on this set"
    return f"accuracy at most {best:.4f}; {known}"


def _throughput_drop(run: Run) -> str | None:
    rates, third = run.throughputs, len(run.throughputs) // 3
    if len(rates) < LEAST_RATES:
        return None
    before, after = median(rates[:third]), median(rates[-third:])
    if after >= DROP * before:
        return None
    return f"median {before:,.1f} samples/s in the first third, {after:,.1f} in the last"


def _slow_rank(run: Run) -> str | None:
    known = run.known("slowest_over_median")
    if not known or median(known) <= SLOW_RANK:
        return None
    seen = f"the slowest rank needs {median(known):.2f} times the median for its own work"
    return f"{seen} (median of {len(known)} records)"


def shares_waited(records: Sequence[Mapping[str, Any]]) -> list[float]:
    """The share of each record's step time that was spent waiting for data."""
    return [
        record["wait_ms"] / record["step_ms"]
        for record in records
        if record.get("wait_ms") is not None and (record.get("step_ms") or 0) > 0
    ]


def _waits_for_data(run: Run) -> str | None:
    shares = shares_waited(run.records)
    if not shares or median(shares) <= WAITING_SHARE:
        return None
    return f"{median(shares):.0%} of the time of rank 0's steps (median of {len(shares)} records)"
