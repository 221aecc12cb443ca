"""State of a study: every arm's trials and best, and its fresh seeds beside the default.

A run on a fresh seed that missed the target counts as the whole budget, less than it would have
needed; its subject is marked `at_least`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import mean, stdev
from typing import Any

from bert_tools.tune.objective import Ended, Objective, budget_of
from bert_tools.tune.settings import Arm, StudySettings
from bert_tools.tune.space import Value
from bert_tools.tune.store import REPEATS, Store, TrialRecord

DEFAULT = "default"
Repeat = tuple[str, Arm, dict[str, Value], int]

SUMMARY_SCHEMA_VERSION = 1
ENDINGS: tuple[Ended, ...] = ("reached", "missed", "pruned", "refused", "failed")


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmSummary:
    """The trials of one arm by outcome; `best` is None if none reached the target."""

    name: str
    counts: dict[str, int]
    interrupted: int
    best: TrialRecord | None
    trials: tuple[TrialRecord, ...]

    @property
    def samples_trained(self) -> int:
        """Samples of all ended trials: the cost of the search."""
        return sum(each.samples or 0 for each in self.trials)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """One subject on fresh seeds: samples (or seconds) to the target, in the order of `seeds`.

    `gains` are the excess of the default over this on each seed, in per cent of its mean; empty for
    the default itself, and while seeds are missing. `between` are samples at which the line between
    two evaluations crosses the target, a finer estimate than the evaluations; empty if a run
    missed.
    """

    subject: str
    seeds: tuple[int, ...]
    needed: tuple[float, ...]
    reached: int
    between: tuple[float, ...] = ()
    gains: tuple[float, ...] = ()

    @property
    def at_least(self) -> bool:
        """True if a run missed the target, so that the true mean is larger."""
        return self.reached < len(self.needed)

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return mean(self.needed)

    @property
    def deviation(self) -> float:
        """Standard deviation over the seeds; 0 for one seed."""
        return deviation_of(self.needed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The present state of a whole study."""

    settings: StudySettings
    arms: tuple[ArmSummary, ...]
    spreads: tuple[Spread, ...]
    best_arm: str | None
    importance: dict[str, dict[str, float]]

    def as_json(self) -> dict[str, Any]:
        """The summary for `--json` and result.json; keys are only added."""
        settings = self.settings
        return {
            "schema_version": SUMMARY_SCHEMA_VERSION,
            "objective": settings.objective,
            "unit": unit_of(settings.objective),
            "target_accuracy": settings.target,
            "most_samples": settings.most_samples,
            "eval_interval_samples": settings.config.eval_interval_samples,
            "trial_seed": settings.seed,
            "arms": [_arm_as_json(each, self.importance.get(each.name)) for each in self.arms],
            "fresh_seeds": [_spread_as_json(each) for each in self.spreads],
            "best_arm": self.best_arm,
        }


def deviation_of(values: Sequence[float]) -> float:
    """Standard deviation of the values; 0 for one value."""
    return stdev(values) if len(values) > 1 else 0.0


def best_trial(trials: Sequence[TrialRecord]) -> TrialRecord | None:
    """The trial that reached the target with the least value; the first of equal ones."""
    reached = [each for each in trials if each.ended == "reached" and each.value is not None]
    return min(reached, key=lambda each: (each.value or 0.0, each.number), default=None)


def in_words(trial: TrialRecord, objective: Objective) -> str:
    """Samples or seconds, in words, of a trial that reached the target."""
    if objective == "time":
        return f"{trial.seconds or 0.0:,.1f} s"
    return f"{trial.samples or 0:,} samples"


def missing_repeats(settings: StudySettings, store: Store, count: int) -> list[Repeat]:
    """Fresh seeds of every subject that are neither finished nor running."""
    there = [each for each in store.trials(REPEATS) if each.status != "interrupted"]
    return [
        (name, arm, values, seed)
        for seed in _fresh_seeds(settings, count)
        for name, arm, values in _subjects(settings, store)
        if not any(_is_repeat_of(each, name, values) and each.seed == seed for each in there)
    ]


def _subjects(settings: StudySettings, store: Store) -> list[tuple[str, Arm, dict[str, Value]]]:
    """Subjects to run on fresh seeds: the given config, and the best trial of every arm."""
    default = Arm(name=DEFAULT, config=settings.config, space=())
    best = [(arm, best_trial(store.trials(arm.name))) for arm in settings.arms]
    found = [(f"best {arm.name}", arm, trial.settings) for arm, trial in best if trial]
    return [(DEFAULT, default, {}), *found]


def _is_repeat_of(trial: TrialRecord, subject: str, settings: dict[str, Value]) -> bool:
    """True if a training belongs to this subject, with its present best settings."""
    return trial.subject == subject and trial.settings == settings


def _fresh_seeds(settings: StudySettings, count: int) -> range:
    """Seeds that no trial has used."""
    return range(settings.seed + 1, settings.seed + 1 + count)


def summarise(settings: StudySettings, store: Store, repeats: int) -> Summary:
    """Summary of the study from its present journal."""
    arms = tuple(_arm(each.name, store.trials(each.name)) for each in settings.arms)
    spreads = _spreads(settings, store, repeats)
    return Summary(
        settings=settings,
        arms=arms,
        spreads=spreads,
        best_arm=_best_arm(arms, spreads),
        importance={arm.name: store.importance(arm.name) for arm in settings.arms},
    )


def unit_of(objective: Objective) -> str:
    """Unit of the numbers to compare."""
    return "samples" if objective == "samples" else "s"


def gains_of(default: Sequence[float], own: Sequence[float]) -> tuple[float, ...]:
    """Excess of each of the default's runs over this one's, per cent of the default's mean."""
    return tuple(100 * (a - b) / mean(default) for a, b in zip(default, own, strict=True))


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
    for subject, _, values in _subjects(settings, store):
        own = {each.seed: each for each in runs if _is_repeat_of(each, subject, values)}
        seeds = tuple(seed for seed in _fresh_seeds(settings, repeats) if seed in own)
        if seeds:
            spread = Spread(
                subject=subject,
                seeds=seeds,
                needed=tuple(_needed(settings, own[seed]) for seed in seeds),
                reached=sum(own[seed].ended == "reached" for seed in seeds),
                between=_between(settings.target, [own[seed] for seed in seeds]),
            )
            found.append(spread)
    default = next((each for each in found if each.subject == DEFAULT), None)
    return tuple(
        replace(each, gains=gains_of(default.needed, each.needed))
        if default and each is not default and each.seeds == default.seeds
        else each
        for each in found
    )


def _between(target: float, runs: Sequence[TrialRecord]) -> tuple[float, ...]:
    """Samples at which each curve first crosses the target; it begins at accuracy 0."""
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
    """Samples or seconds that a run needed; the budget if it missed."""
    samples, seconds = run.samples or 0, run.seconds or 0.0
    if run.ended == "reached":
        return seconds if settings.objective == "time" else float(samples)
    return budget_of(settings.objective, samples, seconds, settings.most_samples)


def _best_arm(arms: Sequence[ArmSummary], spreads: Sequence[Spread]) -> str | None:
    """The best arm by the mean over fresh seeds if all arms have the same; else by the search."""
    able = {each.name: each.best.value or 0.0 for each in arms if each.best is not None}
    known = {each.subject.removeprefix("best "): each for each in spreads}
    means = {name: known[name].mean for name in able if name in known}
    if len(means) == len(able) and len({known[name].seeds for name in means}) == 1:
        return min(means, key=lambda name: means[name])
    return min(able, key=lambda name: able[name], default=None)


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
    gains = facts.pop("gains")
    return {
        **facts,
        "gain_percent": mean(gains) if gains else None,
        "gain_spread_percent": deviation_of(gains) if gains else None,
        "gain_least_percent": min(gains, default=None),
        "gain_most_percent": max(gains, default=None),
        "mean": spread.mean,
        "standard_deviation": spread.deviation,
        "at_least": spread.at_least,
    }
