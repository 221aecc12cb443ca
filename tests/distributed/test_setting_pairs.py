"""Every pair of the config's settings meets in a run, and losses stay what they must be.

A row a day is trained by ./run_tests.sh, all of them by `make test-slow`; what they came to
stands in logs/2026-11-28-setting-pairs.
"""

import math
from dataclasses import dataclass
from datetime import date
from itertools import combinations, product
from typing import Literal

import pytest

from setting_pairs import NUMBERS, choices, pair, pairs_of
from setting_rows import (
    TOLERANCE,
    is_allowed,
    make_array,
    make_sets,
    open_indexes,
    run_pairs,
    run_rows,
)

# What no CPU has; a new setting that nothing allows is missing here.
OF_GPUS = {
    *(("model.attention", name) for name in ("flash", "triton")),
    ("optim.implementation", "apex"),
}


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    return make_sets(tmp_path_factory.mktemp("sets"))


@pytest.fixture(scope="module")
def array(sets):
    return make_array(sets)


@dataclass
class _Section:
    how: Literal["plainly", "by magic"] = "plainly"
    number: int = 3


@dataclass
class _Config:
    new: _Section


def test_a_new_option_is_a_factor_without_being_named():
    assert choices(_Config) == {"new.how": ("plainly", "by magic"), **NUMBERS}


def test_every_pair_that_is_allowed_is_in_a_row(array, sets, snapshot):
    assert set(array.alone) == OF_GPUS
    factors = {
        name: [value for value in values if (name, value) not in OF_GPUS]
        for name, values in choices().items()
    }
    every = {
        pair((one, first), (other, second))
        for one, other in combinations(factors, 2)
        for first, second in product(factors[one], factors[other])
    }
    met = set().union(*map(pairs_of, array.rows))
    assert met | array.refused == every and not met & array.refused
    # By the config, a sampler or for the interpreter.
    refused = (sorted(f"{name} {value}" for name, value in each) for each in array.refused)
    assert "\n".join(sorted(" with ".join(each) for each in refused)) == snapshot
    indexes = open_indexes(sets)
    for row in array.rows:
        is_allowed(indexes, row)


def check_rows(rows, sets, directory):
    """Train them, and compare each with its plainest."""
    for found in run_rows(rows, sets, directory):
        assert not found["problems"], (found["row"], found["problems"])
        told = {key: found[key] for key in ("row", "differs_in", "losses", "plain_losses")}
        assert found["difference"] <= TOLERANCE, told
        assert found["accuracy_difference"] <= found["one_prediction"], told


def sharded_row(how, changes):
    """FP8 products read weights by themselves; in buckets of one parameter biases come alone."""
    plain = {name: values[0] for name, values in choices().items()}
    fp8 = {"model.precision": "fp8", "parallel.bucket_cap_mb": 0.0001}
    return plain | fp8 | changes | {"parallel.data_parallel": how}


MODERN = {"model.architecture": "modern", "model.objective": "mlm", "optim.name": "muon"}


@pytest.mark.parametrize(
    ("how", "changes"),
    [("zero1_node", MODERN), pytest.param("zero1", {}, marks=pytest.mark.longest)],
)
def test_weights_are_waited_for_before_they_are_read(sets, tmp_path, how, changes):
    check_rows([sharded_row(how, changes)], sets, tmp_path)


def test_weights_that_are_not_waited_for_would_be_found(sets, tmp_path):
    row = sharded_row("zero1_node", MODERN)
    (found,) = run_pairs([(row, row)], sets, tmp_path, waits=False)
    assert not found["problems"]
    assert found["difference"] == math.inf


def test_a_row_a_day(array, sets, tmp_path):
    """Without those that the interpreter would take long for."""
    rows = [row for row in array.rows if row["model.kernels"] != "fused"]
    check_rows([rows[date.today().toordinal() % len(rows)]], sets, tmp_path)


@pytest.mark.longest
@pytest.mark.timeout(3000)
def test_all_rows(array, sets, tmp_path):
    check_rows([*array.rows, *make_array(sets, exact=True).rows], sets, tmp_path)
