"""A study in numbers: every arm's trials and best, and fresh seeds of the best beside the default.

A run on a fresh seed that missed the target counts as the whole budget, which is less than it
would have needed; its subject is marked `at_least`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import mean, stdev
from typing import Any

from bert_tools.tune.objective import Ended, Objective, budget_seconds
from bert_tools.tune.settings import StudySettings
from bert_tools.tune.standing import DEFAULT, best_trial, fresh_seeds, is_repeat_of, subjects
from bert_tools.tune.store import REPEATS, Store, TrialRecord

SUMMARY_SCHEMA_VERSION = 1
ENDINGS: tuple[Ended, ...] = ("reached", "missed", "pruned", "refused", "failed")


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmSummary:
    """The trials of one arm by how they ended; `best` is None where none reached the target."""

    name: str
    counts: dict[str, int]
    interrupted: int
    best: TrialRecord | None
    trials: tuple[TrialRecord, ...]

    @property
    def samples_trained(self) -> int:
        """Of all trials that ended: what the search has cost."""
        return sum(each.samples or 0 for each in self.trials)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """One subject on fresh seeds: samples (or seconds) to the target, in the order of `seeds`.

    `gain` is the mean over the seeds of what the default needed more than this, `gain_spread` its
    standard deviation, both in per cent of the default's mean; None for the default itself, and
    where seeds are still missing. `between` are samples at which the line between two evaluations
    crosses the target, an estimate finer than evaluations are; empty where a run missed.
    """

    subject: str
    seeds: tuple[int, ...]
    needed: tuple[float, ...]
    reached: int
    between: tuple[float, ...] = ()
    gain: float | None = None
    gain_spread: float | None = None
    gain_least: float | None = None
    gain_most: float | None = None

    @property
    def at_least(self) -> bool:
        """Whether a run missed the target, so that the true mean is larger."""
        return self.reached < len(self.needed)

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return mean(self.needed)

    @property
    def deviation(self) -> float:
        """Standard deviation over the seeds; 0 of one."""
        return stdev(self.needed) if len(self.needed) > 1 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A whole study as it stands."""

    settings: StudySettings
    arms: tuple[ArmSummary, ...]
    spreads: tuple[Spread, ...]
    best_arm: str | None
    importance: dict[str, dict[str, float]]

    def as_json(self) -> dict[str, Any]:
        """For `--json` and result.json; keys are only added."""
        settings = self.settings
        return {
            "schema_version": SUMMARY_SCHEMA_VERSION,
            "objective": settings.objective,
            "unit": unit_of(settings.objective),
            "target_accuracy": settings.config.eval.target_accuracy,
            "most_samples": settings.most_samples,
            "eval_interval_samples": settings.config.eval_interval_samples,
            "trial_seed": settings.seed,
            "arms": [_arm_as_json(each, self.importance.get(each.name)) for each in self.arms],
            "fresh_seeds": [_spread_as_json(each) for each in self.spreads],
            "best_arm": self.best_arm,
        }


def summarise(
    settings: StudySettings, store: Store, repeats: int, importance: dict[str, dict[str, float]]
) -> Summary:
    """The study as its journal has it now."""
    arms = tuple(_arm(name.name, store.trials(name.name)) for name in settings.arms)
    spreads = _spreads(settings, store, repeats)
    return Summary(
        settings=settings,
        arms=arms,
        spreads=spreads,
        best_arm=_best_arm(arms, spreads),
        importance=importance,
    )


def unit_of(objective: Objective) -> str:
    """What the numbers to compare are counted in."""
    return "samples" if objective == "samples" else "s"


def with_gain(spread: Spread, default: Spread) -> Spread:
    """The same, beside the default on the same seeds."""
    if spread.seeds != default.seeds or not spread.needed or spread.subject == DEFAULT:
        return spread
    pairs = zip(default.needed, spread.needed, strict=True)
    gains = [100 * (theirs - own) / default.mean for theirs, own in pairs]
    return Spread(
        subject=spread.subject,
        seeds=spread.seeds,
        needed=spread.needed,
        reached=spread.reached,
        between=spread.between,
        gain=mean(gains),
        gain_spread=stdev(gains) if len(gains) > 1 else 0.0,
        gain_least=min(gains),
        gain_most=max(gains),
    )


def _arm(name: str, trials: Sequence[TrialRecord]) -> ArmSummary:
    counts = Counter(each.ended for each in trials if each.status == "ended")
    return ArmSummary(
        name=name,
        counts={ending: counts[ending] for ending in ENDINGS},
        interrupted=sum(each.status == "interrupted" for each in trials),
        best=best_trial(trials),
        trials=tuple(trials),
    )


def _spreads(settings: StudySettings, store: Store, repeats: int) -> tuple[Spread, ...]:
    runs = [each for each in store.trials(REPEATS) if each.ended in ("reached", "missed")]
    found = []
    for subject, _, values in subjects(settings, store):
        own = {each.seed: each for each in runs if is_repeat_of(each, subject, values)}
        seeds = tuple(seed for seed in fresh_seeds(settings, repeats) if seed in own)
        if seeds:
            found.append(_spread(settings, subject, [own[seed] for seed in seeds], seeds))
    default = next((each for each in found if each.subject == DEFAULT), None)
    return tuple(with_gain(each, default) if default else each for each in found)


def _spread(
    settings: StudySettings, subject: str, runs: Sequence[TrialRecord], seeds: tuple[int, ...]
) -> Spread:
    return Spread(
        subject=subject,
        seeds=seeds,
        needed=tuple(_needed(settings, each) for each in runs),
        reached=sum(each.ended == "reached" for each in runs),
        between=_between(settings.config.eval.target_accuracy, runs),
    )


def _between(target: float, runs: Sequence[TrialRecord]) -> tuple[float, ...]:
    """Samples at which each curve first crosses the target; from no accuracy before training."""
    found = []
    for run in runs:
        points = [(0, 0.0), *zip(run.evaluated_at, run.accuracies, strict=False)]
        crossing = next((pair for pair in pairwise(points) if pair[1][1] >= target), None)
        if run.ended != "reached" or crossing is None:
            return ()
        (before, low), (after, high) = crossing  # low < target <= high
        found.append(before + (target - low) / (high - low) * (after - before))
    return tuple(found)


def _needed(settings: StudySettings, run: TrialRecord) -> float:
    """Samples or seconds; the budget of one that missed."""
    samples, seconds = run.samples or 0, run.seconds or 0.0
    if run.ended == "reached":
        return seconds if settings.objective == "time" else float(samples)
    if settings.objective == "time":
        return budget_seconds(seconds, samples, settings.most_samples)
    return float(settings.most_samples)


def _best_arm(arms: Sequence[ArmSummary], spreads: Sequence[Spread]) -> str | None:
    """By the mean over fresh seeds, where all arms have the same of them; else by the search."""
    able = [each for each in arms if each.best is not None]
    means = {
        each.name: spread
        for each in able
        for spread in spreads
        if spread.subject == f"best {each.name}"
    }
    if len(means) == len(able) and len({each.seeds for each in means.values()}) == 1:
        return min(means, key=lambda name: means[name].mean)
    best = min(able, key=lambda each: (each.best and each.best.value) or 0.0, default=None)
    return best.name if best else None


def _arm_as_json(arm: ArmSummary, importance: dict[str, float] | None) -> dict[str, Any]:
    best = None
    if arm.best is not None:
        best = {
            "trial": arm.best.number,
            "settings": arm.best.settings,
            "samples": arm.best.samples,
            "seconds": arm.best.seconds,
        }
    return {
        "name": arm.name,
        "trials": arm.counts,
        "interrupted": arm.interrupted,
        "samples_trained": arm.samples_trained,
        "best": best,
        "importance": importance,
    }


def _spread_as_json(spread: Spread) -> dict[str, Any]:
    facts = asdict(spread)
    for key in ("gain", "gain_spread", "gain_least", "gain_most"):
        facts[f"{key}_percent"] = facts.pop(key)
    return {
        **facts,
        "mean": spread.mean,
        "standard_deviation": spread.deviation,
        "at_least": spread.at_least,
    }
