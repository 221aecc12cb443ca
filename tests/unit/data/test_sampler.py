"""Samplers: each sample once an epoch, shares and counts as they say, orders by definition."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlperf_bert.__main__ import main
from mlperf_bert.data.sampler import (
    MOST_QUANTILES,
    PUBLISHED_COUNTS,
    PublishedStrataSampler,
    QuantileSampler,
    Strata,
    UniformSampler,
    make_sampler,
    num_quantiles,
    permute,
    permute_many,
)
from mlperf_bert.errors import TARGET_MISSED, ConfigError
from support import refusal

SEEDS = st.integers(0, 2**63 - 1)
EPOCHS = 3
WORD = 2**64
BY_NAME = {"uniform": UniformSampler, "quantile": QuantileSampler}


def strata_of(sizes):
    """Strata of these sizes whose samples are numbered in no order."""
    order = np.random.default_rng(sum(sizes)).permutation(sum(sizes))
    ends = np.cumsum(sizes)
    means, names = np.arange(1.0, len(sizes) + 1), tuple(f"{n}-{n}" for n in range(len(sizes)))
    return Strata(order, ends - sizes, np.array(sizes), means, names)


def stratum_of(ids, strata):
    """The stratum of each sample."""
    place = np.argsort(strata.order_by_length)[ids]
    return np.searchsorted(strata.starts, place, side="right") - 1


def draws(sampler, steps):
    """The batches of the first steps, end to end."""
    return np.concatenate([sampler.global_batch(step) for step in range(1, steps + 1)])


def epochs_of(sampler, num_samples, batch):
    """Batches laid end to end and cut every `num_samples`: each piece holds every sample once."""
    steps = -(-EPOCHS * num_samples // batch)
    drawn = draws(sampler, steps)
    assert len(drawn) == steps * batch
    epochs = drawn[: EPOCHS * num_samples].reshape(EPOCHS, num_samples)
    assert (np.sort(epochs, axis=1) == np.arange(num_samples)).all()
    return epochs


BATCHES = st.integers(1, 40) | st.integers(1, 700)


@given(num_samples=st.integers(1, 300), batch=BATCHES, seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_each_sample_comes_once_an_epoch_and_a_row_has_one_of_each_quantile(
    num_samples, batch, seed
):
    """Where quantiles do not divide the samples, those with one more share the last row."""
    epochs_of(UniformSampler(num_samples, batch, seed), num_samples, batch)
    quantiles = max(q for q in range(1, MOST_QUANTILES + 1) if batch % q == 0)
    assert num_quantiles(batch) == quantiles
    order = strata_of([num_samples]).order_by_length
    epoch = epochs_of(QuantileSampler(order, batch, seed), num_samples, batch)[0]
    ends = np.arange(1, quantiles) * num_samples // quantiles
    quantile = np.searchsorted(ends, np.argsort(order)[epoch], side="right").tolist()
    for begin in range(0, num_samples, quantiles):
        row = quantile[begin : begin + quantiles]
        assert len(set(row)) == len(row)


@given(
    num_samples=st.integers(64, 300),
    small=st.sampled_from([64, 128, 192]),  # all with 64 quantiles
    steps=st.integers(1, 10),
    large=st.sampled_from([64, 128, 320]),
    seed=SEEDS,
    name=st.sampled_from(sorted(BY_NAME)),
)
@settings(max_examples=40, deadline=None)
def test_phases_of_other_batches_see_what_one_order_holds(
    num_samples, small, steps, large, seed, name
):
    """The second phase begins where the first one stopped."""
    data = {"order_by_length": np.arange(num_samples), "length_histogram": (0, num_samples)}
    sampler = partial(make_sampler, name, **data, seed=seed)
    later = sampler(global_batch_size=large, skip_samples=small * steps)
    assert type(later) is BY_NAME[name]
    first, second = draws(sampler(global_batch_size=small), steps), draws(later, 6)
    chained = np.concatenate([first, second])
    one = draws(sampler(global_batch_size=64), len(chained) // 64)
    assert np.array_equal(chained, one)


def test_neighbours_in_a_batch_come_from_quantiles_far_apart():
    batch = QuantileSampler(np.arange(1600), 64, seed=1).global_batch(1)
    quarter = batch // 400
    # What a rank with a batch of 4 gets before balancing has one of each quarter of the lengths.
    assert np.array_equal(np.sort(quarter.reshape(-1, 4)), np.tile(np.arange(4), (16, 1)))


def test_sets_are_cut_at_quarters_of_the_longest_length():
    # Four ranges of 8 tokens: 2 + 1 samples in 1-8, none in 9-16, 3 in 17-24, 1 in 25-32.
    histogram = np.zeros(33, dtype=np.int64)
    histogram[[1, 8, 17, 32]] = [2, 1, 3, 1]
    order = np.array([3, 1, 0, 2, 6, 5, 4])
    strata = Strata.of(order, histogram.tolist())
    assert strata.names == ("1-8", "17-24", "25-32")
    assert strata.starts.tolist() == [0, 3, 6]
    assert strata.sizes.tolist() == [3, 3, 1]
    assert strata.mean_lengths.tolist() == [(1 + 1 + 8) / 3, 17, 32]
    assert strata.mean_length == (1 + 1 + 8 + 3 * 17 + 32) / 7
    second = strata.draw(np.full(3, 1), np.arange(3), np.zeros(3, dtype=np.int64), seed=1)
    assert sorted(second) == [2, 5, 6]  # places 3 to 5 of the order


@st.composite
def published(draw):
    """Strata, counts and a batch that some stratum can fill."""
    counts = draw(st.sampled_from(sorted(PUBLISHED_COUNTS.values())))
    groups = draw(st.integers(1, 3))
    sizes = [count * groups + draw(st.integers(0, 60)) for count in counts]
    return strata_of(sizes), counts, groups * sum(counts)


@given(case=published(), seed=SEEDS)
@settings(max_examples=30, deadline=None)
def test_published_counts_hold_and_left_overs_come_first(case, seed):
    strata, counts, batch = case
    sampler = PublishedStrataSampler(strata, counts, batch, seed)
    steps = sampler.steps_of_pass
    ids = draws(sampler, steps + 60)
    kinds = stratum_of(ids, strata)
    for group in kinds.reshape(-1, sum(counts)):
        assert tuple(np.bincount(group)) == counts
    one_more = kinds[: (steps + 1) * batch]
    assert (np.bincount(one_more) > strata.sizes).any()  # so no longer pass is possible
    in_pass, after = np.split(ids, [steps * batch])
    assert len(np.unique(in_pass)) == len(in_pass)
    for kind, (size, left) in enumerate(zip(strata.sizes, sampler.left_over, strict=True)):
        own = ids[kinds == kind]
        for first in range(0, len(own), size):  # none is drawn again before all others
            assert len(np.unique(own[first : first + size])) == len(own[first : first + size])
        members = strata.order_by_length[strata.starts[kind] :][:size]
        undrawn = set(members.tolist()) - set(in_pass.tolist())
        assert len(undrawn) == left
        assert set(after[kinds[steps * batch :] == kind][:left].tolist()) == undrawn


def test_left_overs_in_words():
    # A batch of 16 takes 6, 3, 2 and 5: the third stratum's 7 samples fill 3 steps.
    sampler = PublishedStrataSampler(strata_of([30, 20, 7, 18]), (6, 3, 2, 5), 16, seed=1)
    # Mean lengths are 1 to 4: (6 + 6 + 6 + 20) / 16, and of the data (30 + 40 + 21 + 72) / 75.
    assert sampler.in_words() == (
        "the sampler draws 2.38 tokens per sample on average, +9.3% compared with 2.17 in the "
        "data. A pass of 3 steps leaves samples that the next pass draws first "
        "(12 of 0-0, 11 of 1-1, 1 of 2-2, 3 of 3-3 tokens)"
    )


def test_epochs_and_rounds_differ():
    order = strata_of([100]).order_by_length
    for sampler in (UniformSampler(100, 8, 3), QuantileSampler(order, 8, 3)):
        epochs = epochs_of(sampler, 100, 8)
        assert not any(np.array_equal(one, other) for one, other in pairwise(epochs))
    strata = strata_of([60, 30, 20, 50])  # rounds of 10 steps
    first, second = draws(PublishedStrataSampler(strata, (6, 3, 2, 5), 16, 5), 20).reshape(2, 160)
    kinds = stratum_of(first, strata)
    assert np.array_equal(kinds, stratum_of(second, strata))
    for kind in range(4):
        assert not np.array_equal(first[kinds == kind], second[kinds == kind])


def test_a_run_reports_what_its_counts_do_to_the_data(
    tiny_config, synthetic_data, tmp_path, monkeypatch, capsys
):
    words = ["train", "--config", tiny_config, "--data", synthetic_data]
    words += ["--run-dir", tmp_path / "run", "--set", "run.max_steps=1", "--set"]
    error = refusal(capsys, *words, "data.sampler=stratified_4_2_2_4")
    assert "global batch that is a multiple of 12, not 16" in error
    assert not (tmp_path / "run").exists()
    monkeypatch.setitem(PUBLISHED_COUNTS, "stratified_6_3_2_5", (6, 3, 7))  # no sample is in 1-8
    assert main([*map(str, words), "data.sampler=stratified_6_3_2_5"]) == TARGET_MISSED
    assert "tokens per sample on average" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sizes", "counts", "batch", "words"),
    [
        ([99, 99, 99], (6, 3, 2, 5), 16, "only samples of 0-0, 1-1, 2-2 tokens; use 'quantile'"),
        ([99, 99, 3, 99], (6, 3, 2, 5), 32, r"32 needs more .*: 99, 99, 3, 99\); lower parallel"),
    ],
)
def test_strata_that_do_not_fit_the_batch_are_refused(sizes, counts, batch, words):
    with pytest.raises(ConfigError, match=words):
        PublishedStrataSampler(strata_of(sizes), counts, batch, seed=1)


def mixed(value):
    """SplitMix64's finaliser on one number."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % WORD
    return value ^ (value >> 31)


def round_keys(key):
    return [int(word) for word in np.random.SeedSequence(key).generate_state(6, np.uint64)]


def plain_permute(index, size, key):
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


def plain_permute_many(index, size, number, key):
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


@given(
    data=st.data(),
    groups=st.lists(
        st.tuples(st.integers(1, 2**20), st.integers(0, 2**40)), min_size=1, max_size=5
    ),
    size=st.integers(1, 2**40),
    seed=SEEDS,
)
@settings(max_examples=60, deadline=None)
def test_permutations_are_their_definitions(data, groups, size, seed):
    index = [data.draw(st.integers(0, most - 1)) for most, _ in groups]
    sizes, numbers = np.array(groups).T
    assert permute_many(np.array(index), sizes, numbers, (seed,)).tolist() == [
        plain_permute_many(one, most, number, (seed,))
        for one, (most, number) in zip(index, groups, strict=True)
    ]
    index = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=5))
    expected = [plain_permute(one, size, (seed, 7)) for one in index]
    assert permute(np.array(index), size, (seed, 7)).tolist() == expected
