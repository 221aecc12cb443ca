"""Where a study stands: its best trials, and which fresh seeds are still to be run."""

from collections.abc import Sequence

from bert_tools.tune.objective import Objective
from bert_tools.tune.settings import Arm, StudySettings
from bert_tools.tune.space import Value
from bert_tools.tune.store import REPEATS, Store, TrialRecord

DEFAULT = "default"

Repeat = tuple[str, Arm, dict[str, Value], int]


def best_trial(trials: Sequence[TrialRecord]) -> TrialRecord | None:
    """Of those that reached the target the one with the least value, the first of equals."""
    reached = [each for each in trials if each.ended == "reached" and each.value is not None]
    return min(reached, key=lambda each: (each.value or 0.0, each.number), default=None)


def in_words(trial: TrialRecord, objective: Objective) -> str:
    """What a trial that reached the target needed."""
    if objective == "time":
        return f"{trial.seconds or 0.0:,.1f} s"
    return f"{trial.samples or 0:,} samples"


def fresh_seeds(settings: StudySettings, count: int) -> range:
    """Seeds that no trial was trained with."""
    return range(settings.seed + 1, settings.seed + 1 + count)


def subjects(settings: StudySettings, store: Store) -> list[tuple[str, Arm, dict[str, Value]]]:
    """Who is run on fresh seeds: the config as it was given, and the best trial of every arm."""
    default_arm = Arm(name=DEFAULT, config=settings.config, space=())
    found: list[tuple[str, Arm, dict[str, Value]]] = [(DEFAULT, default_arm, {})]
    for arm in settings.arms:
        best = best_trial(store.trials(arm.name))
        if best is not None:
            found.append((f"best {arm.name}", arm, best.settings))
    return found


def missing_repeats(settings: StudySettings, store: Store, count: int) -> list[Repeat]:
    """Fresh seeds of every subject that have neither been run nor are being run."""
    there = [each for each in store.trials(REPEATS) if each.status != "interrupted"]
    return [
        (name, arm, values, seed)
        for seed in fresh_seeds(settings, count)
        for name, arm, values in subjects(settings, store)
        if not any(is_repeat_of(each, name, values) and each.seed == seed for each in there)
    ]


def is_repeat_of(trial: TrialRecord, subject: str, settings: dict[str, Value]) -> bool:
    """Whether a training is one of this subject, with the settings that are its best now."""
    return trial.subject == subject and trial.settings == settings
