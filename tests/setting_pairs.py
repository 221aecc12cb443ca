"""A covering array of the config's settings: few runs in which every pair of values meets.

The choices come from the config itself: every setting that is a `Literal` is a factor with all its
values, so a new option joins by being written there. Numbers that switch a mechanism on join by
hand (`NUMBERS`). The config's own checks say which values do not go together.

A *row* is one run: a value for each factor. Greedy construction with a fixed seed, as in Cohen et
al., "The AETG System" (IEEE TSE 23, 1997).
"""

import random
import re
import typing
from dataclasses import MISSING, fields
from functools import cache
from itertools import combinations, product
from typing import Literal

from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.errors import ConfigError

Value = str | int | float
Pair = frozenset[tuple[str, Value]]

# Settings that say where a run takes place or what it is called, not what it computes.
LEFT_OUT = {
    "run.device": "a CPU, wherever the tests run",
    "run.init_state": "a start, which needs a checkpoint: unit/checkpoint/test_phases.py",
    "data.corpus": "the data are given",
    "parallel.share_gpu": "of GPUs",
    "mlperf.division": "a word in the log, and rules that are switched off",
    "mlperf.submission_status": "a word in the log",
}
# Numbers that switch something on: values that differ in what runs. The first is the plain one.
NUMBERS = {
    "run.warm_up_steps": (1, 0),
    "model.hidden_dropout": (0.0, 0.2),
    "model.attention_dropout": (0.0, 0.2),
    "data.skip_samples": (0, 5),
    "parallel.grad_accum_steps": (1, 2),
    "parallel.local_batch_size": (4, 6, 8),
    "parallel.bucket_cap_mb": (0.02, 0.0001),  # some parameters in a bucket; one in each
    "checkpoint.interval_steps": (0, 2, "never"),
}
_MOST_REPAIRS = 3  # settings that may change beside a pair so that the config takes it


def choices(kind=RunConfig):
    """All factors with their values, the default (or the first) in front."""
    found = {}
    for section, of_section in typing.get_type_hints(kind).items():
        hints = typing.get_type_hints(of_section)
        for field in fields(of_section):
            name, hint = f"{section}.{field.name}", hints[field.name]
            if typing.get_origin(hint) is Literal and name not in LEFT_OUT:
                values = typing.get_args(hint)
                first = values[0] if field.default is MISSING else field.default
                found[name] = (first, *(each for each in values if each != first))
    return found | NUMBERS


def pair(one, other):
    """Two values that meet in a row."""
    return frozenset((one, other))


def pairs_of(row):
    """All pairs that meet in a row."""
    return {pair(*each) for each in combinations(row.items(), 2)}


class Array:
    """The rows, and what cannot be in any.

    Attributes:
        rows: one run each; together they hold every pair that the config allows.
        alone: values that the config refuses in any company, like those that need a GPU.
        refused: pairs of other values that it refuses in any company.
        covered: number of pairs that meet.
    """

    def __init__(self, factors, is_allowed, *, seed=1):
        self._is_allowed = is_allowed
        self._refusal = cache(self._ask)
        self._random = random.Random(seed)
        self._plain = {name: values[0] for name, values in factors.items()}
        self._factors = dict(factors)
        self.alone = [
            (name, value)
            for name, values in factors.items()
            for value in values
            if self._completed({name: value}) is None
        ]
        self._factors = {
            name: tuple(each for each in values if (name, each) not in self.alone)
            for name, values in factors.items()
        }
        self.rows = []
        self.refused = set()
        wanted = {
            pair((one, first), (other, second))
            for one, other in combinations(self._factors, 2)
            for first, second in product(self._factors[one], self._factors[other])
        }
        self.covered = len(wanted)
        for first in sorted(wanted, key=sorted_key):
            if first not in wanted:
                continue
            row = self._completed(dict(first))
            if row is None:
                self.refused.add(first)
                wanted.discard(first)
                continue
            self._fill(row, {name for name, _ in first}, wanted)
            self.rows.append(row)
            wanted -= pairs_of(row)
        self.covered -= len(self.refused)

    def _fill(self, row, fixed, wanted):
        """Give every other factor the value that adds most wanted pairs and is allowed."""
        names = [name for name in row if name not in fixed]
        self._random.shuffle(names)
        for name in names:
            met = [(each, row[each]) for each in fixed]
            gains = {
                value: sum(pair((name, value), each) in wanted for each in met)
                for value in self._factors[name]
            }
            # The usual value stays where no other adds more.
            order = sorted(gains, key=lambda value: (-gains[value], value != row[name]))
            for value in order:
                changed = {**row, name: value}
                if value == row[name] or self._refused(changed) is None:
                    row[name] = value
                    break
            fixed.add(name)

    def _completed(self, given):
        """A whole row that the config takes, as plain as it can be; None if there is none."""
        row = {**self._plain, **given}
        for repairs in range(_MOST_REPAIRS + 1):
            found = self._repaired(row, frozenset(given), repairs)
            if found is not None:
                return found
        return None

    def _repaired(self, row, fixed, repairs):
        """The row with at most so many settings changed: those that refusals name, at last any."""
        refusal = self._refused(row)
        if refusal is None or not repairs:
            return row if refusal is None else None
        free = [name for name in self._factors if name not in fixed]
        named = [name for name in free if _is_named(name, refusal)]
        for name in named + (free if repairs == 1 else []):
            for value in self._factors[name]:
                if value != row[name]:
                    changed = {**row, name: value}
                    found = self._repaired(changed, fixed | {name}, repairs - 1)
                    if found is not None:
                        return found
        return None

    def _refused(self, row):
        return self._refusal(tuple(row.items()))

    def _ask(self, items):
        try:
            self._is_allowed(dict(items))
        except ConfigError as error:
            return str(error)
        return None


def _is_named(name, refusal):
    field = name.partition(".")[2]
    return re.search(rf"\b{re.escape(field)}\b", refusal) is not None


def sorted_key(pair):
    """The order in which pairs are taken: the same in every process."""
    return sorted((name, str(value)) for name, value in pair)
