"""The compiled random stream draws what CPython's `random.Random` draws."""

import random
from itertools import pairwise

import numpy as np
import pytest

from mlperf_bert.prepare.examples import between, new_stream, shuffle, uniform

SEEDS = [0, 1, 12345, 2**32, 2**63 - 1]
# The largest is the widest range that one 32-bit word can decide.
LIMITS = sorted({2**k + d for k in range(1, 33) for d in (-1, 0, 1) if 1 <= 2**k + d < 2**32})


@pytest.mark.parametrize("seed", SEEDS)
def test_random(seed: int) -> None:
    stream, rng = new_stream(seed), random.Random(seed)
    # 624 words make 312 numbers: the state is renewed several times.
    assert [uniform(stream) for _ in range(2000)] == [rng.random() for _ in range(2000)]


@pytest.mark.parametrize("seed", SEEDS)
def test_randint(seed: int) -> None:
    stream, rng = new_stream(seed), random.Random(seed)
    for low, high in [*((0, limit - 1) for limit in LIMITS), *pairwise(LIMITS)]:
        for _ in range(20):
            assert between(stream, low, high) == rng.randint(low, high)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("count", [*range(0, 18), 127, 128, 129, 509, 512, 1025, 100_000])
def test_shuffle(seed: int, count: int) -> None:
    stream, rng = new_stream(seed), random.Random(seed)
    ours, theirs = np.arange(count), list(range(count))
    shuffle(stream, ours)
    rng.shuffle(theirs)
    assert ours.tolist() == theirs
    assert uniform(stream) == rng.random()  # as many words drawn


def test_mixed_draws() -> None:
    stream, rng, choice = new_stream(7), random.Random(7), random.Random(8)
    for _ in range(3000):
        size = choice.randrange(1, 700)
        kind = choice.randrange(3)
        if kind == 0:
            assert uniform(stream) == rng.random()
        elif kind == 1:
            assert between(stream, 1, size) == rng.randint(1, size)
        else:
            ours, theirs = np.arange(size), list(range(size))
            shuffle(stream, ours)
            rng.shuffle(theirs)
            assert ours.tolist() == theirs
