"""Strata: exact shares end together, published counts drain each stratum before it repeats."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from chi_square import chi_square, critical_value
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.data.length_histogram import wikipedia_lengths
from mlperf_bert.data.sampler import (
    PUBLISHED_COUNTS,
    Int64Array,
    PublishedStrataSampler,
    Sampler,
    Strata,
    StrataSampler,
)

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=6)
SEEDS = st.integers(0, 2**63 - 1)


def strata_of(sizes: list[int]) -> Strata:
    """Strata of these sizes whose samples are numbered in no order."""
    order = np.random.default_rng(sum(sizes)).permutation(sum(sizes))
    ends = np.cumsum(sizes)
    means, names = np.arange(1.0, len(sizes) + 1), tuple(f"{n}-{n}" for n in range(len(sizes)))
    return Strata(order, ends - sizes, np.array(sizes), means, names)


def stratum_of(ids: Int64Array, strata: Strata) -> Int64Array:
    """The stratum of each sample."""
    place = np.argsort(strata.order_by_length)[ids]
    return np.searchsorted(strata.starts, place, side="right") - 1


def draws(sampler: Sampler, steps: int) -> Int64Array:
    """The batches of the first steps, end to end."""
    return np.concatenate([sampler.global_batch(step) for step in range(1, steps + 1)])


def test_sets_are_cut_at_quarters_of_the_longest_length() -> None:
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


def time_order(sizes: list[int]) -> list[int]:
    """Strata of an epoch's draws by definition: draw k of n at (k + 1/2) / n, ties in order."""
    times = [
        (Fraction(2 * draw + 1, 2 * size), number)
        for number, size in enumerate(sizes)
        for draw in range(size)
    ]
    return [number for _, number in sorted(times)]


@given(sizes=SIZES, batch=st.integers(1, 50), seed=SEEDS)
@settings(max_examples=150, deadline=None)
def test_strata_are_drawn_by_time_and_each_sample_once_an_epoch(
    sizes: list[int], batch: int, seed: int
) -> None:
    assume(min(sizes) * batch >= sum(sizes))
    strata = strata_of(sizes)
    num_samples = sum(sizes)
    ids = draws(StrataSampler(strata, batch, seed), -(-3 * num_samples // batch))
    for epoch in ids[: 3 * num_samples].reshape(3, num_samples):
        assert np.array_equal(np.sort(epoch), np.arange(num_samples))
        assert stratum_of(epoch, strata).tolist() == time_order(sizes)


@given(sizes=st.lists(st.integers(1, 2000), min_size=2, max_size=6), batch=st.integers(2, 500))
@settings(max_examples=50, deadline=None)
def test_counts_stay_at_the_exact_share_and_all_strata_end_together(
    sizes: list[int], batch: int
) -> None:
    assume(min(sizes) * batch >= sum(sizes))
    strata, total, kinds = strata_of(sizes), sum(sizes), len(sizes)
    drawn = stratum_of(draws(StrataSampler(strata, batch, 3), -(-total // batch))[:total], strata)
    counts = np.cumsum(drawn[:, np.newaxis] == np.arange(kinds), axis=0)
    share = np.array(sizes) / total
    exact = np.arange(1, total + 1)[:, np.newaxis] * share
    # When time t of an epoch has passed, stratum i has had n_i t + e_i draws, |e_i| <= 1/2, and
    # all together d = N t + sum(e). So its count is off s_i d, its share s_i = n_i / N, by
    # e_i - s_i sum(e) = (1 - s_i) e_i - s_i (the other e), at most (1 - s_i) / 2 + s_i (K - 1) / 2.
    assert (np.abs(counts - exact) <= 0.5 + share * (kinds - 2) / 2 + 1e-9).all()
    # Its last draw is at t = 1 - 1 / (2 n_i), where d >= N t - K / 2.
    last = np.array([np.flatnonzero(drawn == kind)[-1] + 1 for kind in range(kinds)])
    assert (last >= total * (1 - 1 / (2 * np.array(sizes))) - kinds / 2).all()


def test_batches_that_hold_less_than_one_of_a_stratum_name_quantile() -> None:
    strata = strata_of([50, 30, 20])
    assert len(StrataSampler(strata, 5, 1).global_batch(1)) == 5
    with pytest.raises(ConfigError, match=r"global batch of 5, as 20\.0% .*'quantile'"):
        StrataSampler(strata, 4, 1)


@st.composite
def published(draw: st.DrawFn) -> tuple[Strata, tuple[int, ...], int]:
    """Strata, counts and a batch that some stratum can fill."""
    counts = draw(st.sampled_from(sorted(PUBLISHED_COUNTS.values())))
    groups = draw(st.integers(1, 3))
    sizes = [count * groups + draw(st.integers(0, 60)) for count in counts]
    return strata_of(sizes), counts, groups * sum(counts)


@given(case=published(), seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_published_counts_hold_in_every_group_and_no_stratum_repeats_early(
    case: tuple[Strata, tuple[int, ...], int], seed: int
) -> None:
    strata, counts, batch = case
    ids = draws(PublishedStrataSampler(strata, counts, batch, seed), 40)
    kinds = stratum_of(ids, strata)
    for group in kinds.reshape(-1, sum(counts)):
        assert tuple(np.bincount(group)) == counts
    for kind, size in enumerate(strata.sizes):
        own = ids[kinds == kind]
        for first in range(0, len(own), size):
            assert len(np.unique(own[first : first + size])) == len(own[first : first + size])


@given(case=published(), seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_left_overs_are_as_reported_and_come_first(
    case: tuple[Strata, tuple[int, ...], int], seed: int
) -> None:
    strata, counts, batch = case
    sampler = PublishedStrataSampler(strata, counts, batch, seed)
    steps = sampler.steps_of_pass
    in_pass, after = draws(sampler, steps), draws(sampler, steps + 60)[steps * batch :]
    assert len(np.unique(in_pass)) == len(in_pass)
    one_more = draws(sampler, steps + 1)
    of_kind = np.bincount(stratum_of(one_more, strata))
    assert (of_kind > strata.sizes).any()  # so no longer pass is possible
    kinds = stratum_of(after, strata)
    for kind, left in enumerate(sampler.left_over):
        members = strata.order_by_length[strata.starts[kind] :][: strata.sizes[kind]]
        undrawn = set(members.tolist()) - set(in_pass.tolist())
        assert len(undrawn) == left
        assert set(after[kinds == kind][:left].tolist()) == undrawn


def test_left_overs_in_words() -> None:
    # A batch of 16 takes 6, 3, 2 and 5: the third stratum's 7 samples fill 3 steps.
    sampler = PublishedStrataSampler(strata_of([30, 20, 7, 18]), (6, 3, 2, 5), 16, seed=1)
    assert sampler.steps_of_pass == 3
    assert sampler.left_over == (12, 11, 1, 3)
    # Mean lengths of these strata are 1 to 4; the data's is (30 + 40 + 21 + 72) / 75.
    assert sampler.mean_length == (6 + 6 + 6 + 20) / 16
    assert sampler.in_words() == (
        "mean length drawn 2.38, +9.3% against the data's 2.17; a pass of 3 steps leaves "
        "12 of 0-0, 11 of 1-1, 1 of 2-2, 3 of 3-3 tokens, which come first in the next"
    )


@pytest.mark.parametrize(
    ("sizes", "batch", "words"),
    [
        ([99, 99, 99, 99], 24, "counts 6/3/2/5 need a multiple of 16 samples; the global batch"),
        ([99, 99, 99], 16, "the data has samples of 0-0, 1-1, 2-2 tokens only; use 'quantile'"),
        ([99, 99, 3, 99], 32, r"batch of 32 needs more .*: 99, 99, 3, 99\); lower the batch"),
    ],
)
def test_published_counts_that_do_not_fit_are_refused(
    sizes: list[int], batch: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        PublishedStrataSampler(strata_of(sizes), (6, 3, 2, 5), batch, seed=1)


@pytest.mark.parametrize("name", ["strata", "strata_6_3_2_5"])
def test_rounds_of_a_stratum_differ(name: str) -> None:
    strata = strata_of([60, 30, 20, 50])  # both take 6, 3, 2 and 5 a step: rounds of 10 steps
    sampler: Sampler = StrataSampler(strata, 16, 5)
    if name in PUBLISHED_COUNTS:
        sampler = PublishedStrataSampler(strata, PUBLISHED_COUNTS[name], 16, 5)
    first, second = draws(sampler, 20).reshape(2, 160)
    kinds = stratum_of(first, strata)
    assert np.array_equal(kinds, stratum_of(second, strata))
    for kind in range(4):
        assert not np.array_equal(first[kinds == kind], second[kinds == kind])


def wikipedia_strata() -> tuple[Strata, Int64Array]:
    """The published lengths, samples numbered by length, and where each length ends."""
    histogram = wikipedia_lengths()
    counts = np.zeros(histogram.max_length + 1, dtype=np.int64)
    counts[histogram.lengths] = histogram.counts
    order = np.arange(histogram.num_sequences, dtype=np.uint32)
    return Strata.of(order, counts.tolist()), np.cumsum(counts)


@pytest.mark.parametrize(
    ("name", "mean_length"), [("strata_6_3_2_5", 254.98), ("strata_4_2_2_4", 271.69)]
)
def test_mean_lengths_of_the_published_counts(name: str, mean_length: float) -> None:
    strata, _ = wikipedia_strata()
    counts = PUBLISHED_COUNTS[name]
    sampler = PublishedStrataSampler(strata, counts, sum(counts), seed=1)
    assert round(sampler.mean_length, 2) == mean_length
    assert round(strata.mean_length, 2) == 255.83


@pytest.mark.parametrize(("name", "passes"), [("strata", True), ("strata_4_2_2_4", False)])
def test_chi_square_of_lengths_against_the_data(name: str, passes: bool) -> None:
    strata, ends = wikipedia_strata()
    sampler: Sampler = StrataSampler(strata, 16_416, seed=7)
    if name in PUBLISHED_COUNTS:
        sampler = PublishedStrataSampler(strata, PUBLISHED_COUNTS[name], 16_416, seed=7)
    lengths = np.searchsorted(ends, draws(sampler, 12), side="right")
    classes = np.arange(0, len(ends), 4)
    counts = np.add.reduceat(np.bincount(lengths, minlength=len(ends)), classes)
    expected = np.add.reduceat(np.diff(ends, prepend=0), classes) * len(lengths) / ends[-1]
    used = expected > 5  # every length from 5 tokens on: the class of lengths 0 to 3 is empty
    assert counts[~used].sum() == 0 and used.sum() == len(classes) - 1
    is_below = chi_square(counts[used], expected[used]) < critical_value(int(used.sum()))
    assert is_below == passes
