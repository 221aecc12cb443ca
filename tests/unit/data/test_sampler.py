"""Samplers: each sample once an epoch, whatever the sizes; by name; and the order they draw in."""

from itertools import pairwise, product
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chi_square import chi_square, critical_value
from mlperf_bert.__main__ import main
from mlperf_bert.common.errors import TARGET_MISSED, ConfigError
from mlperf_bert.config.sections import SamplerName
from mlperf_bert.data.length_histogram import wikipedia_lengths
from mlperf_bert.data.sampler import (
    MOST_QUANTILES,
    PUBLISHED_COUNTS,
    Int64Array,
    PublishedStrataSampler,
    QuantileSampler,
    Sampler,
    StrataSampler,
    UniformSampler,
    default_quantiles,
    epochs_of,
    make_sampler,
    permute,
    permute_many,
)
from plan_cases import planner_of

NUM_SAMPLES = st.integers(1, 200)
BATCHES = st.integers(1, 50)
SEEDS = st.integers(0, 2**63 - 1)
EPOCHS = 3
WORD = 2**64


def shuffled(num_samples: int) -> Int64Array:
    """An order by length in which numbers and places differ."""
    return np.random.default_rng(num_samples).permutation(num_samples)


def assert_each_once_an_epoch(
    sampler: Sampler, num_samples: int, global_batch_size: int
) -> list[Int64Array]:
    """Batches laid end to end and cut every `num_samples`: each piece holds every sample once."""
    num_steps = -(-EPOCHS * num_samples // global_batch_size)
    batches = [sampler.global_batch(step) for step in range(1, num_steps + 1)]
    assert {batch.shape for batch in batches} == {(global_batch_size,)}
    epochs = np.concatenate(batches)[: EPOCHS * num_samples].reshape(EPOCHS, num_samples)
    for epoch in epochs:
        assert np.array_equal(np.sort(epoch), np.arange(num_samples))
    return list(epochs)


@given(num_samples=NUM_SAMPLES, batch=BATCHES, seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_uniform_draws_each_sample_once_an_epoch(num_samples: int, batch: int, seed: int) -> None:
    assert_each_once_an_epoch(UniformSampler(num_samples, batch, seed), num_samples, batch)


@given(num_samples=NUM_SAMPLES, quantiles=st.integers(1, 40), rows=st.integers(1, 4), seed=SEEDS)
@settings(max_examples=100, deadline=None)
def test_quantile_draws_each_sample_once_an_epoch(
    num_samples: int, quantiles: int, rows: int, seed: int
) -> None:
    batch = quantiles * rows
    sampler = QuantileSampler(shuffled(num_samples), batch, quantiles, seed)
    assert_each_once_an_epoch(sampler, num_samples, batch)


def test_epochs_differ() -> None:
    for sampler in (UniformSampler(100, 8, 3), QuantileSampler(shuffled(100), 8, 4, 3)):
        epochs = assert_each_once_an_epoch(sampler, 100, 8)
        assert not any(np.array_equal(one, other) for one, other in pairwise(epochs))


@given(
    samples_a_quantile=st.integers(1, 30),
    quantiles=st.integers(1, 20),
    rows=st.integers(1, 4),
    step=st.integers(1, 99),
)
@settings(max_examples=60, deadline=None)
def test_a_batch_has_equally_many_of_each_quantile(
    samples_a_quantile: int, quantiles: int, rows: int, step: int
) -> None:
    num_samples = samples_a_quantile * quantiles
    order = np.arange(num_samples)  # so that a sample's number tells its quantile
    batch = QuantileSampler(order, rows * quantiles, quantiles, seed=2).global_batch(step)
    counts = np.bincount(batch // samples_a_quantile, minlength=quantiles)
    assert counts.tolist() == [rows] * quantiles


def test_quantiles_that_do_not_divide_share_the_last_row() -> None:
    # 4 quantiles of 11 samples begin at 0, 11/4, 22/4, 33/4 rounded down: they hold 2, 3, 3, 3.
    # So rows 0 and 1 have one of each, and the last row one of each quantile but the first.
    sampler = QuantileSampler(np.arange(11), 4, 4, seed=5)
    epoch = np.concatenate([sampler.global_batch(step) for step in (1, 2, 3)])[:11]
    quantile = np.searchsorted([2, 5, 8], epoch, side="right")
    assert [sorted(quantile[start : start + 4]) for start in (0, 4, 8)] == [
        [0, 1, 2, 3],
        [0, 1, 2, 3],
        [1, 2, 3],
    ]


def test_neighbours_in_a_batch_come_from_quantiles_far_apart() -> None:
    batch = QuantileSampler(np.arange(1600), 64, 16, seed=1).global_batch(1)
    quarter = batch // 400
    # What a rank with a batch of 4 gets before balancing has one of each quarter of the lengths.
    assert np.array_equal(np.sort(quarter.reshape(-1, 4)), np.tile(np.arange(4), (16, 1)))


@given(batch=st.integers(1, 100_000))
@settings(deadline=None)
def test_default_quantiles_are_the_largest_allowed_divisor(batch: int) -> None:
    divisors = [q for q in range(1, MOST_QUANTILES + 1) if batch % q == 0]
    assert default_quantiles(batch) == max(divisors)


@pytest.mark.parametrize("quantiles", [-1, 0, 5, 49])
def test_quantiles_that_do_not_divide_the_batch_are_refused(quantiles: int) -> None:
    with pytest.raises(ConfigError, match=r"data\.quantiles: .*global batch of 48; use a divisor"):
        QuantileSampler(np.arange(100), 48, quantiles, seed=1)


@given(step=st.integers(1, 50), batch=BATCHES, num_samples=NUM_SAMPLES)
@settings(deadline=None)
def test_epochs_of_numbers_every_draw(step: int, batch: int, num_samples: int) -> None:
    parts = epochs_of(step, batch, num_samples)
    draws = np.concatenate([epoch * num_samples + offset for epoch, offset in parts])
    assert np.array_equal(draws, np.arange((step - 1) * batch, step * batch))
    assert all(((offset >= 0) & (offset < num_samples)).all() for _, offset in parts)
    assert len({epoch for epoch, _ in parts}) == len(parts)


@pytest.mark.parametrize("name", get_args(SamplerName))
def test_any_step_is_computed_directly(name: SamplerName) -> None:
    def sampler(seed: int) -> Sampler:
        lengths = np.random.default_rng(1).integers(1, 33, 1000)
        return planner_of(lengths, 48, name, seed=seed).sampler

    one = sampler(5)
    in_order = [one.global_batch(step) for step in range(1, 40)]
    for step in (37, 1, 21, 22):  # an epoch ends within step 21
        assert np.array_equal(sampler(5).global_batch(step), in_order[step - 1])
        assert np.array_equal(one.global_batch(step), in_order[step - 1])
        assert not np.array_equal(sampler(6).global_batch(step), in_order[step - 1])


def test_draws_are_uniform_over_places() -> None:
    counts = np.zeros((10, 10), dtype=np.int64)
    for seed in range(2000):
        batch = UniformSampler(10, 10, seed).global_batch(1)
        counts[np.arange(10), batch] += 1
    # 9 * 9 degrees of freedom, as each place and each sample is drawn 2,000 times; a table of
    # permutations has 10 / 9 times the statistic of a multinomial one.
    limit = critical_value(9 * 9 + 1) * 10 / 9
    assert chi_square(counts.ravel(), np.full(100, 200.0)) < limit


@pytest.mark.parametrize("quantiles", [16, 7])
def test_quantile_draws_have_the_lengths_of_the_data(quantiles: int) -> None:
    histogram = wikipedia_lengths()
    ends = np.cumsum(histogram.counts)
    order = np.arange(histogram.num_sequences, dtype=np.uint32)
    batch, steps = 1024 * quantiles, range(1, 13)
    sampler = QuantileSampler(order, batch, quantiles, seed=11)
    drawn = np.concatenate([sampler.global_batch(step) for step in steps])
    counts = np.bincount(np.searchsorted(ends, drawn, side="right"), minlength=len(ends))
    # Neighbouring lengths together, so that every class is expected at least five times.
    starts = np.arange(0, len(ends), 4)
    counts = np.add.reduceat(counts, starts)
    expected = np.add.reduceat(histogram.counts, starts) * len(drawn) / histogram.num_sequences
    assert expected.min() > 5
    assert chi_square(counts, expected) < critical_value(len(starts))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("uniform", UniformSampler),
        ("quantile", QuantileSampler),
        ("strata", StrataSampler),
        ("strata_6_3_2_5", PublishedStrataSampler),
        ("strata_4_2_2_4", PublishedStrataSampler),
    ],
)
def test_samplers_by_name(name: SamplerName, kind: type[Sampler]) -> None:
    sampler = make_sampler(
        name,
        order_by_length=np.arange(20 * 32),
        length_histogram=[0, *[20] * 32],
        global_batch_size=48,
        seed=3,
    )
    assert type(sampler) is kind
    assert len(np.unique(sampler.global_batch(1))) == 48


def test_a_run_reports_what_its_counts_do_to_the_data(
    tiny_config: Path,
    synthetic_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(PUBLISHED_COUNTS, "strata_6_3_2_5", (6, 3, 7))  # no sample is in 1-8
    places = ["--config", str(tiny_config), "--data", str(synthetic_data)]
    for sampler, is_biased in (("strata_6_3_2_5", True), ("quantile", False)):
        sets = ["--set", f"data.sampler={sampler}", "--set", "run.max_steps=1"]
        run_dir = ["--run-dir", str(tmp_path / sampler)]
        assert main(["train", *places, *sets, *run_dir]) == TARGET_MISSED
        assert ("mean length drawn" in capsys.readouterr().out) == is_biased


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.sampler=strata_4_2_2_4"], "multiple of 12 samples; the global batch is 16"),
        (["data.sampler=quantile", "data.quantiles=5"], "data.quantiles: 5 does not divide"),
        (["data.sampler=strata", "parallel.local_batch_size=1"], "use 'quantile'"),
    ],
)
def test_what_a_sampler_cannot_do_is_one_line_and_leaves_nothing(
    overrides: list[str],
    words: str,
    tiny_config: Path,
    synthetic_data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = ["--data", str(synthetic_data), "--run-dir", str(tmp_path / "run")]
    sets = [word for setting in overrides for word in ("--set", setting)]
    assert main(["train", "--config", str(tiny_config), *places, *sets]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


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
