"""Token packets come out as they went in, and an exchange without communication: deals, routes."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlperf_bert.data.balance import Balance
from mlperf_bert.data.exchange import samples_of_rank
from mlperf_bert.data.mpi_readers import wanted_indices
from mlperf_bert.data.shards import Samples
from mlperf_bert.data.token_packets import (
    gathered_bytes,
    join,
    narrowed,
    pack,
    split,
    take,
    unpack,
)
from mlperf_bert.vocabulary.word_pieces import token_dtype
from plan_cases import planner_of

SMALL, LARGE = token_dtype(30_522), token_dtype(120_000)


def make_samples(lengths, vocab_size=30_000):
    rng = np.random.default_rng(len(lengths) + sum(lengths))
    counts = np.array([rng.integers(1, length + 1) for length in lengths], dtype=np.int64)
    pairs = zip(lengths, counts, strict=True)
    positions = [np.sort(rng.choice(length, count, replace=False)) for length, count in pairs]
    return Samples(
        input_ids=rng.integers(0, vocab_size, sum(lengths)),
        lengths=np.array(lengths, dtype=np.int64),
        segment_b_start=np.array([rng.integers(0, n + 1) for n in lengths], dtype=np.int64),
        masked_positions=np.concatenate([*positions, np.zeros(0, dtype=np.int64)]),
        masked_ids=rng.integers(0, vocab_size, counts.sum()),
        masked_counts=counts,
        next_sentence_label=rng.integers(0, 2, len(lengths)),
    )


def assert_equal(found, expected):
    for field in fields(Samples):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        assert one.tolist() == other.tolist(), field.name


RAGGED = st.lists(st.lists(st.integers(1, 400), max_size=6), min_size=1, max_size=4)


@settings(max_examples=50, deadline=None)
@given(RAGGED, st.sampled_from([(SMALL, 30_522), (LARGE, 120_000)]))
def test_packets_that_follow_each_other_come_out_as_they_went_in(ragged, token):
    samples = [make_samples(lengths, token[1]) for lengths in ragged]
    packets = unpack(np.concatenate([pack(narrowed(each, token[0])) for each in samples]))
    assert len(packets) == len(samples)
    for packet, expected in zip(packets, samples, strict=True):
        assert packet.input_ids.dtype == token[0] and packet.lengths.dtype == np.uint16
        assert_equal(packet, expected)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.data())
def test_samples_are_taken_whole(lengths, data):
    samples = narrowed(make_samples(lengths), SMALL)
    places = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=15))
    alone = split(samples, np.ones(len(lengths), dtype=np.int64))
    for place in places:
        start = sum(lengths[:place])
        ids = samples.input_ids[start : start + lengths[place]]
        assert alone[place].lengths.tolist() == [lengths[place]]
        assert alone[place].input_ids.tolist() == ids.tolist()
    if places:
        wanted = join([alone[place] for place in places])
        assert_equal(take(samples, np.array(places, dtype=np.int64)), wanted)
    assert_equal(join(alone), samples)


@pytest.mark.parametrize("token", [SMALL, LARGE])
def test_bytes_are_told_from_the_index(token):
    assert (token_dtype(2**16).itemsize, token_dtype(2**16 + 1).itemsize) == (2, 4)
    drawn = [
        [5, 9],
        [30, 2],
        [7, 8],
        [1, 40],
        [3, 3],
        [2, 6],
    ]  # of three ranks, two micro-batches each
    ranks = [[make_samples(each) for each in drawn[number::3]] for number in range(3)]
    lengths, masked = (
        np.array([[getattr(forward, name) for forward in rank] for rank in ranks])
        for name in ("lengths", "masked_counts")
    )
    largest = max(sum(len(pack(narrowed(each, token))) for each in rank) for rank in ranks)
    assert gathered_bytes(lengths, masked, token) == 2 * (largest + 8)


@given(
    lengths=st.integers(1, 5).flatmap(
        lambda each: st.lists(
            st.lists(st.integers(1, 9), min_size=each, max_size=each), min_size=1, max_size=5
        )
    )
)
@settings(max_examples=50, deadline=None)
def test_hands_are_those_of_the_single_process_definition(lengths):
    drawn = [narrowed(make_samples(each), SMALL) for each in lengths]
    cost = np.array(lengths, dtype=np.float64)[:, np.newaxis]
    places = Balance(policy="exchange_global")(cost).indices
    for rank, each in enumerate(np.split(places, len(lengths))):
        assert_equal(samples_of_rank(drawn, rank), take(join(drawn), each))


def plan_of(num_samples, policy, step):
    lengths = np.random.default_rng(num_samples).integers(1, 100, num_samples)
    balance = Balance(policy=policy, ranks_per_node=2)
    return planner_of(lengths, 48, world_size=4, grad_accum_steps=2, balance=balance).plan(step)


@pytest.mark.parametrize(
    ("policy", "ranks"), [("exchange_local", range(2, 4)), ("exchange_global", range(4))]
)
@pytest.mark.parametrize("num_samples", [1000, 61])  # of 61, some steps draw a sample twice
def test_routes_lead_to_the_plan(policy, ranks, num_samples):
    for plan in [plan_of(num_samples, policy, step) for step in (1, 2, 3)]:
        drawn = plan.drawn_ids[ranks.start : ranks.stop]
        wanted = wanted_indices(plan, ranks)
        assert sorted(np.concatenate(wanted).tolist()) == list(range(drawn.size))
        for rank, places in zip(ranks, wanted, strict=True):
            planned = [plan.ids_of(rank, forward) for forward in range(2)]
            assert drawn.ravel()[places].tolist() == np.concatenate(planned).tolist()


def test_a_group_that_is_not_the_plans_is_refused():
    plan = plan_of(1000, "exchange_global", 1)
    with pytest.raises(AssertionError, match="that others drew"):
        wanted_indices(plan, range(2))
