"""Known ways for a run to go wrong, each told by what it leaves in the run's own files.

Most were met in public: docs/report.md names the threads.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bert_tools.report.run import Run
from bert_tools.report.verdict import expected_of
from mlperf_bert.common.health import MASKED_TOKENS_IF_UNKNOWN, Health
from mlperf_bert.data.index import Baseline

LEAST_EVALUATIONS = 3  # that make a plateau
FLAT = 0.03  # between the lowest and the highest of them
INITIAL = (0.30, 0.40)  # where the reference stands with MLPerf's initial checkpoint
INITIAL_SHARE = 0.55  # of the expected samples, by which published runs have left it
REPEATED = (0.60, 0.66)  # where runs stuck whose shards held one sample over and over
UNLOADED_ACCURACY, UNLOADED_LOSS_SHARE = 0.2, 0.8  # of ln(vocabulary), the loss of a guess
MISMATCH = 0.5  # of exp(-loss), the accuracy that a training loss speaks for
GUESS_ERRORS = 5.0  # standard errors of an accuracy
_VERIFY = "mlperf_bert verify --full DATA/train, and DATA/eval"


@dataclass(frozen=True, slots=True)
class Cause:
    """What may have happened, what in this run speaks for it, and what to do.

    One that is `decisive` makes a run off, whatever its curve.
    """

    name: str
    cause: str
    evidence: str
    remedy: str
    decisive: bool


def find_causes(run: Run, baseline: Baseline | None) -> list[Cause]:
    """The likeliest first; `baseline` is the held-out set's guess without context, if known."""
    found = [
        *_alarms(run, baseline),
        _false_success(run),
        _no_learning_rate(run),
        _not_initial(run),
        _other_vocabulary(run),
        _other_held_out_set(run),
        _stays_at_initial(run),
        _repeated_samples(run),
        _stays_at_guess(run, baseline),
    ]
    return [cause for cause in found if cause is not None]


def unlike_published(run: Run) -> Cause:
    """What is left where a run is late and none of the others speaks up."""
    batch = "not known" if run.global_batch_size is None else f"{run.global_batch_size:,}"
    seen = f"global batch {batch}, optimizer {run.optimizer or 'not known'}"
    if run.config is not None:
        rate, warmup = run.config.optim.learning_rate, run.config.schedule.warmup_steps
        seen += f", learning rate {rate:g}, {warmup} warm-up steps"
    return Cause(
        "hyper_parameters",
        "the hyper-parameters do not fit the batch",
        f"no other cause is seen; {seen}",
        "compare them with the set published for this batch: docs/hyperparameters.md",
        decisive=False,
    )


def _alarms(run: Run, baseline: Baseline | None) -> list[Cause]:
    """What `health` would have said during the run; decisive where it has not recovered."""
    health = Health(baseline.masked_tokens if baseline else None)
    alarms = [alarm for record in _records(run) for alarm in health.alarms(record)]
    lasting = health.state()
    last = {alarm.kind: alarm for alarm in alarms}
    causes = [
        Cause(
            kind,
            _ALARM_CAUSES[kind],
            alarm.seen + ("" if lasting[kind] else "; it has recovered since"),
            alarm.remedy,
            decisive=bool(lasting[kind]),
        )
        for kind, alarm in last.items()
    ]
    return sorted(causes, key=lambda cause: (not cause.decisive, _ORDER.index(cause.name)))


_ALARM_CAUSES = {
    "not_finite": "the numbers overflowed: a loss scale or learning rate too high",
    "skipped": "gradients overflow: a loss scale or learning rate too high",
    "collapsed": "learning rate too high, warm-up too short, or epsilon too small",
    "diverged": "learning rate too high, warm-up too short, or epsilon too small",
}
_ORDER = tuple(_ALARM_CAUSES)


def _records(run: Run) -> Sequence[Mapping[str, Any]]:
    """The run's own; of a log, which knows neither loss nor skipped steps, its evaluations."""
    if run.records:
        return run.records
    return [
        {"step": number, "loss": 1.0, "mlm_accuracy": each.accuracy, "skipped_steps": 0}
        for number, each in enumerate(run.evaluations, 1)
    ]


def _false_success(run: Run) -> Cause | None:
    target = run.target_accuracy
    if run.ended != "success" or target is None or run.best_accuracy >= target:
        return None
    return Cause(
        "false_success",
        "the target was compared wrongly",
        f"ended as success; the best accuracy is {run.best_accuracy:.4f}, the target {target:g}",
        "do not use this result; mend the program that wrote it",
        decisive=True,
    )


def _no_learning_rate(run: Run) -> Cause | None:
    rates = [record.get("learning_rate") for record in run.records]
    if not rates or any(rates):
        return None
    return Cause(
        "no_learning_rate",
        "the learning rate is zero",
        f"learning_rate is 0 in all {len(rates)} records",
        "look at optim.learning_rate and schedule: mlperf_bert config FILE",
        decisive=True,
    )


def _not_initial(run: Run) -> Cause | None:
    evidence = _below_initial(run)
    if evidence is None or run.initial_weights == "checkpoint":
        return None
    return Cause(
        "not_initial",
        "MLPerf's initial checkpoint was not loaded",
        evidence + ("; the log says random weights" if run.initial_weights == "random" else ""),
        "give it: train --init-checkpoint DIR",
        decisive=True,
    )


def _other_vocabulary(run: Run) -> Cause | None:
    evidence = _below_initial(run)
    if evidence is None or run.initial_weights != "checkpoint":
        return None
    return Cause(
        "other_vocabulary",
        "the data's words are not numbered as the checkpoint's",
        f"{evidence}; the log says that a checkpoint was loaded",
        "prepare the data with the vocabulary that belongs to the checkpoint",
        decisive=True,
    )


def _below_initial(run: Run) -> str | None:
    """What speaks against MLPerf's initial checkpoint as the start, if anything does."""
    if not run.is_reference or not run.evaluations:
        return None
    first = run.evaluations[0]
    if first.accuracy >= UNLOADED_ACCURACY:
        return None
    evidence = f"accuracy {first.accuracy:.4f} at the first evaluation; that checkpoint has 0.341"
    if run.records and run.config and run.records[0]["loss"] is not None:
        guess = math.log(run.config.model.vocab_size)
        if run.records[0]["loss"] > UNLOADED_LOSS_SHARE * guess:
            loss = run.records[0]["loss"]
            evidence += f"; the first loss is {loss:.2f}, that of a guess {guess:.2f}"
    return evidence


def _other_held_out_set(run: Run) -> Cause | None:
    """An accuracy far below what the training loss speaks for.

    A model whose mean cross-entropy is L gives the right word exp(-L) or more on average (Jensen),
    and is right about as often. The loss has the next-sentence task's in it, so this is cautious.
    """
    records = [each for each in run.records if each["mlm_accuracy"] is not None]
    if not records or not records[-1]["loss"] or records[-1]["loss"] < 0:
        return None
    accuracy, loss = records[-1]["mlm_accuracy"], records[-1]["loss"]
    if accuracy >= MISMATCH * math.exp(-loss):
        return None
    return Cause(
        "other_held_out_set",
        "the held-out set is of another vocabulary or preparation than the training set, or the "
        "training set was learned by heart",
        f"accuracy {accuracy:.4f}, where a training loss of {loss:.3f} speaks for "
        f"{math.exp(-loss):.3f} or more",
        f"prepare both in one go; check them: {_VERIFY}",
        decisive=True,
    )


def _last_plateau(run: Run) -> tuple[float, float] | None:
    """Lowest and highest of the last evaluations, where they are flat."""
    last = [each.accuracy for each in run.evaluations[-LEAST_EVALUATIONS:]]
    if len(last) < LEAST_EVALUATIONS or max(last) - min(last) > FLAT:
        return None
    return min(last), max(last)


def _stays_at_initial(run: Run) -> Cause | None:
    plateau, expected = _last_plateau(run), expected_of(run)
    if plateau is None or expected is None:
        return None
    samples = run.evaluations[-1].samples
    is_there = INITIAL[0] <= plateau[0] and run.best_accuracy <= INITIAL[1]
    if not is_there or samples < INITIAL_SHARE * expected:
        return None
    return Cause(
        "stays_at_initial",
        "the weights do not learn: learning rate too small, or updates that do not arrive",
        f"accuracy never above {run.best_accuracy:.4f} in {samples:,} samples; the initial "
        "checkpoint has 0.341",
        "look at learning_rate and grad_norm in metrics.jsonl, and at the schedule",
        decisive=True,
    )


def _repeated_samples(run: Run) -> Cause | None:
    plateau = _last_plateau(run)
    if not run.is_reference or plateau is None:
        return None
    if not REPEATED[0] <= plateau[0] <= plateau[1] <= REPEATED[1]:
        return None
    return Cause(
        "repeated_samples",
        "the training set holds few different samples, over and over",
        f"the last {LEAST_EVALUATIONS} evaluations are within {plateau[0]:.4f} .. "
        f"{plateau[1]:.4f}; runs on shards of one repeated sample stuck at 0.62 to 0.63",
        f"look for duplicates: {_VERIFY}",
        decisive=True,
    )


def _stays_at_guess(run: Run, baseline: Baseline | None) -> Cause | None:
    plateau = _last_plateau(run)
    if plateau is None or baseline is None:
        return None
    guess = baseline.context_free_accuracy
    tokens = baseline.masked_tokens or MASKED_TOKENS_IF_UNKNOWN
    error = GUESS_ERRORS * math.sqrt(guess * (1 - guess) / tokens)
    if run.best_accuracy > guess + error:
        return None
    return Cause(
        "stays_at_guess",
        "the model has learned how frequent words are and nothing else",
        f"accuracy at most {run.best_accuracy:.4f}; the best guess without context has "
        f"{guess:.4f} on this set",
        "train longer, or with a learning rate that fits the model",
        decisive=False,
    )
