"""The settings of a study, which must not change when it is continued (study.json), and pruning.

Pruning compares a training's evaluations with those of others, by their number, which also works
across batch sizes. A run that reached its target counts as at the target from then on.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from bert_tools.tune.objective import Objective
from bert_tools.tune.space import SECTIONS, Space, Value, space_as_json, space_for
from mlperf_bert.common.atomic import write_file
from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.common.records import read_record, write_json
from mlperf_bert.common.untrusted import file_sha256, in_brief
from mlperf_bert.config.files import checked_setting, config_from_tables, config_to_tables
from mlperf_bert.config.run_config import RunConfig

PruningRule = Literal["median", "halving", "none"]

LEAST_CURVES = 4  # trainings of others, before anything is stopped
HALVING_FACTOR = 3  # a third continues at every rung: evaluations 1, 3, 9, ... times the first

STUDY_SCHEMA_VERSION = 1
ONLY_ARM = "trial"
_PRUNE_FROM = 4  # nothing is stopped before a quarter of the budget's evaluations, rounded down
_MANIFEST = "index/dataset.json"
_REMEDY = "give a new --out directory, or the options that it was begun with"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruner:
    """The pruning rule of a study.

    "median": stop if the best accuracy so far is below the median of the others at that point.
    "halving": successive halving without waiting (ASHA, arXiv 1810.05934): at rungs, only the best
    third continues. Nothing is stopped before evaluation `first`.
    """

    rule: PruningRule
    first: int
    target: float

    def is_hopeless(self, own: Sequence[float], others: Sequence[Sequence[float]]) -> bool:
        """True to stop after the last of the accuracies `own`; `others` as far as they came."""
        number = len(own)
        if self.rule == "none" or number < self.first or max(own) >= self.target:
            return False
        if self.rule == "halving" and not self._is_rung(number):
            return False
        theirs = [best for each in others if (best := self._best_at(number, each)) is not None]
        if len(theirs) < LEAST_CURVES:
            return False
        if self.rule == "median":
            return max(own) < median(theirs)
        better = sum(each > max(own) for each in theirs)
        return better >= (len(theirs) + 1) / HALVING_FACTOR

    def _best_at(self, number: int, accuracies: Sequence[float]) -> float | None:
        """Best of the first `number`; None for a run that reached neither these nor the target."""
        until = accuracies[:number]
        best = max(until, default=0.0)
        if len(until) < number and best < self.target:
            return None
        return min(best, self.target)

    def _is_rung(self, number: int) -> bool:
        rung = self.first
        while rung < number:
            rung *= HALVING_FACTOR
        return rung == number


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """A contender: a config to start from and the space around it."""

    name: str
    config: RunConfig
    space: Space


@dataclass(frozen=True, kw_only=True, slots=True)
class StudySettings:
    """A study. `most_samples` is per training; `seed` is for all trials' training and draws."""

    config: RunConfig
    config_path: Path
    space_name: str
    data: Path
    arms: tuple[Arm, ...]
    objective: Objective
    most_samples: int
    seed: int
    prune: PruningRule
    trainer: tuple[str, ...] | None

    @property
    def target(self) -> float:
        """The accuracy that trainings should reach; a search without one was refused before."""
        assert self.config.eval.target is not None
        return self.config.eval.target

    @property
    def pruner(self) -> Pruner:
        """The rule by which hopeless trainings are stopped."""
        evaluations = self.most_samples // self.config.eval_interval_samples
        return Pruner(
            rule=self.prune,
            first=max(2, evaluations // _PRUNE_FROM),
            target=self.target,
        )

    def trial_config(self, arm: Arm, drawn: dict[str, Value], seed: int) -> RunConfig:
        """The config of one training. Raises ConfigError if its values contradict."""
        tables = with_values(arm.config, drawn)
        trial = config_from_tables(tables, "trial")
        tables["run"]["seed"] = seed
        tables["run"]["max_steps"] = max(1, self.most_samples // trial.parallel.global_batch_size)
        tables["checkpoint"]["save"] = "never"
        return config_from_tables(tables, "trial")

    def as_json(self) -> dict[str, Any]:
        """The contents of study.json."""
        return {
            "schema_version": STUDY_SCHEMA_VERSION,
            "config": config_to_tables(self.config),
            "data_sha256": [_digest(self.data / part / _MANIFEST) for part in ("train", "eval")],
            "arms": {each.name: space_as_json(each.space) for each in self.arms},
            "objective": self.objective,
            "most_samples": self.most_samples,
            "seed": self.seed,
            "prune": self.prune,
        }


def with_values(config: RunConfig, values: dict[str, Value]) -> dict[str, dict[str, Any]]:
    """The config's tables with some settings changed. Raises ConfigError for wrong values."""
    tables = config_to_tables(config)
    for dotted, value in values.items():
        section, _, field = dotted.partition(".")
        tables[section][field] = checked_setting(dotted, value, "trial")
    return tables


def make_arms(config: RunConfig, space: Space, compare: str | None) -> tuple[Arm, ...]:
    """One arm, or one per value of `--compare section.key=a,b`, all with the same budget.

    Raises ConfigError for a setting or a value that does not exist.
    """
    if compare is None:
        return (Arm(name=ONLY_ARM, config=config, space=space_for(space, config, None)),)
    key, equals, words = compare.partition("=")
    values = [word.strip() for word in words.split(",")]
    if not equals or len(values) < 2 or len(set(values)) != len(values):
        problem = f"is {compare!r}"
        raise ConfigError("--compare", problem, "write section.key=one,other")
    if key.partition(".")[0] not in SECTIONS:
        remedy = f"compare values of a setting of {', '.join(SECTIONS)}"
        raise ConfigError("--compare", f"{in_brief(key)} is no setting to be searched", remedy)
    arms = []
    for word in values:
        value = _value_of(key, word)
        arm_config = config_from_tables(with_values(config, {key: value}), "--compare")
        arm_space = space_for(_possible(space, key, value), arm_config, key)
        arms.append(Arm(name=_file_name(word), config=arm_config, space=arm_space))
    if len({arm.name for arm in arms}) != len(arms):
        raise ConfigError("--compare", f"{words!r} look alike", "compare values whose names differ")
    return tuple(arms)


def hold_to_study(directory: Path, settings: StudySettings) -> None:
    """Write study.json, or compare with the one that is there.

    Raises DataError if the study was begun with other settings.
    """
    path = directory / "study.json"
    now = settings.as_json()
    if not path.exists():
        write_file(path, write_json(now))
        return
    before = read_record(path, missing="is missing", remedy=_REMEDY)
    before.check_version(STUDY_SCHEMA_VERSION, key="schema_version")
    differing = [key for key in now if before.values.get(key) != now[key]]
    if differing:
        problem = f"was begun with other {', '.join(differing)}"
        raise DataError(str(path), problem, _REMEDY)


def _possible(space: Space, key: str, value: Value) -> Space:
    """Parameters whose condition on the compared setting, if any, holds in this arm."""
    return tuple(each for each in space if dict(each.when).get(key, value) == value)


def _value_of(key: str, word: str) -> Value:
    numbers: Sequence[type] = (int, float)
    for kind in numbers:
        try:
            checked: Value = checked_setting(key, kind(word), "--compare")
        except (ValueError, ConfigError):
            continue
        return checked
    checked = checked_setting(key, word, "--compare")
    return checked


def _file_name(word: str) -> str:
    return re.sub(r"[^\w.-]", "-", word)[:40].strip(".-") or "value"


def _digest(path: Path) -> str:
    try:
        return file_sha256(path)
    except OSError as error:
        problem = error.strerror or "cannot be read"
        remedy = "prepare the data first: mlperf_bert prepare"
        raise DataError(str(path), problem, remedy) from None
