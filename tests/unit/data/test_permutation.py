"""Keyed permutations: bijections of any size, as defined number by number, and even."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chi_square import chi_square, critical_value
from mlperf_bert.data.sampler import permute, permute_many

SEEDS = st.integers(0, 2**63 - 1)
WORD = 2**64


def mixed(value: int) -> int:
    """SplitMix64's finaliser on one number."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % WORD
    return value ^ (value >> 31)


def round_keys(key: tuple[int, ...]) -> list[int]:
    return [int(word) for word in np.random.SeedSequence(key).generate_state(6, np.uint64)]


def plain_permute(index: int, size: int, key: tuple[int, ...]) -> int:
    """One image of `permute`, in Python's integers."""
    half_bits = 1
    while 4**half_bits < size:
        half_bits += 1
    half = 2**half_bits
    left, right = divmod(index, half)
    for round_key in round_keys(key):
        left, right = right, left ^ (mixed(right ^ round_key) % half)
    image = left * half + right
    return image if image < size else plain_permute(image, size, key)


def plain_permute_many(index: int, size: int, number: int, key: tuple[int, ...]) -> int:
    """One image of `permute_many`, in Python's integers."""
    high = 1
    while high**2 < size:
        high += 1
    low = -(-size // high)
    left, right = divmod(index, low)
    keys, tweak = round_keys(key), mixed(number)
    for key_of_left, key_of_right in zip(keys[::2], keys[1::2], strict=True):
        left = (left + (mixed(right ^ tweak ^ key_of_left) // 2**32 * high >> 32)) % high
        right = (right + (mixed(left ^ tweak ^ key_of_right) // 2**32 * low >> 32)) % low
    image = left * low + right
    return image if image < size else plain_permute_many(image, size, number, key)


@given(size=st.integers(1, 5000), seed=SEEDS, epoch=st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_permute_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    image = permute(np.arange(size), size, (seed, epoch))
    assert np.array_equal(np.sort(image), np.arange(size))


@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=8), seed=SEEDS)
@settings(max_examples=50, deadline=None)
def test_permute_many_is_a_permutation_of_each_group(sizes: list[int], seed: int) -> None:
    number = np.repeat(np.arange(len(sizes)), sizes)
    index = np.concatenate([np.arange(size) for size in sizes])
    image = permute_many(index, np.array(sizes)[number], number, (seed,))
    for group, size in enumerate(sizes):
        assert np.array_equal(np.sort(image[number == group]), np.arange(size))


@given(data=st.data(), size=st.integers(1, 2**40), seed=SEEDS, epoch=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_permute_is_its_definition(data: st.DataObject, size: int, seed: int, epoch: int) -> None:
    index = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=5))
    image = permute(np.array(index), size, (seed, epoch))
    assert image.tolist() == [plain_permute(one, size, (seed, epoch)) for one in index]


@given(data=st.data(), seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_permute_many_is_its_definition(data: st.DataObject, seed: int) -> None:
    groups = data.draw(
        st.lists(st.tuples(st.integers(1, 2**20), st.integers(0, 2**40)), min_size=1, max_size=5)
    )
    index = [data.draw(st.integers(0, size - 1)) for size, _ in groups]
    sizes, numbers = np.array(groups).T
    image = permute_many(np.array(index), sizes, numbers, (seed,))
    assert image.tolist() == [
        plain_permute_many(one, size, number, (seed,))
        for one, (size, number) in zip(index, groups, strict=True)
    ]


def test_permute_many_reaches_large_groups_without_memory() -> None:
    sizes = np.repeat([156_726_829, 2**24 + 1], 50_000)
    numbers = np.repeat([0, 1], 50_000)
    image = permute_many(np.tile(np.arange(50_000), 2), sizes, numbers, (1, 0))
    assert (image >= 0).all() and (image < sizes).all()
    for part, size in zip(np.split(image, 2), (156_726_829, 2**24 + 1), strict=True):
        assert len(np.unique(part)) == 50_000
        assert part.mean() == pytest.approx(size / 2, rel=0.01)


def test_permute_reaches_large_sets_without_memory() -> None:
    size = 156_726_829
    image = permute(np.arange(100_000), size, (1, 0))
    assert image.min() >= 0 and image.max() < size
    assert len(np.unique(image)) == 100_000
    assert image.mean() == pytest.approx(size / 2, rel=0.01)


@pytest.mark.parametrize("size", [11, 64, 100])
def test_every_place_gets_every_image_equally_often(size: int) -> None:
    draws = 20 * size
    counts = np.zeros((2, size, size), dtype=np.int64)
    everyone, sizes = np.arange(size), np.full(size, size)
    for number in range(draws):
        counts[0, everyone, permute(everyone, size, (7, number))] += 1
        numbers = np.full(size, number)
        counts[1, everyone, permute_many(everyone, sizes, numbers, (7,))] += 1
    # A table of places and images has (size - 1)**2 degrees of freedom, as its margins are fixed,
    # and the statistic of permutations is size / (size - 1) times that of a multinomial table.
    limit = critical_value((size - 1) ** 2 + 1) * size / (size - 1)
    for table in counts:
        assert chi_square(table.ravel(), np.full(size**2, draws / size)) < limit


def test_permutations_of_other_numbers_and_keys_agree_by_chance_only() -> None:
    size = 1000
    everyone, sizes = np.arange(size), np.full(size, size)
    images = [
        permute_many(everyone, sizes, np.full(size, number), (key,))
        for number, key in product(range(3), repeat=2)
    ]
    for first, one in enumerate(images):
        for other in images[:first]:
            assert (one == other).sum() < 10  # one place on average, as of a Poisson variable
