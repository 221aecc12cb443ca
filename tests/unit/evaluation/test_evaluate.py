"""Evaluation: batches cut by tokens, counts by definition, independent of ranks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from graph_cases import evaluator_of, small_model
from mlperf_bert.data.batch import make_batch
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.shards import SampleReader
from mlperf_bert.errors import DataError
from mlperf_bert.evaluation.evaluate import (
    TOKENS_CPU,
    TOKENS_CUDA,
    Accuracy,
    HeldOutBatches,
    cut_by_tokens,
    tokens_per_micro_batch,
)
from shard_sets import MAX_LENGTH, assert_same_batch, write_set

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    path = tmp_path_factory.mktemp("held_out") / "set"
    return SampleReader(path, write_set(path, [(170, "<u2"), (90, "<u2")], seed=5))


@pytest.fixture(scope="module")
def index(reader):
    return LengthIndex.open(reader.set_dir)


def held_out(index, reader, rank=0, world_size=1):
    return HeldOutBatches(
        index, reader, num_tokens=256, rank=rank, world_size=world_size, device=CPU
    )


def stored(reader, ids):
    return make_batch(reader.read(ids), ids, mlm_denominator=1.0, nsp_denominator=1.0)


def tokens(index, ids):
    return int(index.lengths[ids].sum(dtype=np.int64))


@given(num_tokens=st.integers(1, 10_000) | st.just(10**6))
@example(num_tokens=MAX_LENGTH)
@settings(max_examples=40, deadline=None)
def test_every_sample_is_in_one_batch_of_about_equal_tokens(index, num_tokens):
    batches = cut_by_tokens(index, num_tokens)
    assert np.array_equal(np.concatenate(batches), index.order_by_length)
    sizes = [tokens(index, ids) for ids in batches]
    mean = sum(sizes) / -(-sum(sizes) // num_tokens)
    assert mean <= num_tokens
    longest = int(index.lengths.max())
    assert max(sizes) < mean + longest
    if num_tokens > longest:
        assert min(sizes) > mean - longest


@pytest.mark.parametrize("world_size", [1, 3, 5])
def test_ranks_get_the_batches_in_turn(index, reader, world_size):
    cut = cut_by_tokens(index, 256)
    most_apart = max(tokens(index, ids) for ids in cut) + len(cut) // world_size * MAX_LENGTH
    found, loads = [], []
    for rank in range(world_size):
        static = held_out(index, reader, rank, world_size).static
        sizes = [len(batch.input_ids) for batch in static]
        assert sizes == sorted(sizes, reverse=True)
        found += [(batch.lengths, batch.masked_counts) for batch in static]
        loads.append(sum(sizes))
    assert max(loads) - min(loads) <= most_apart
    expected = [
        (tuple(index.lengths[ids].tolist()), tuple(index.masked_counts[ids].tolist()))
        for ids in cut
    ]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("ahead", [False, True])
def test_filling_keeps_every_tensor_in_its_place(index, reader, ahead):
    batches = held_out(index, reader, 1, 2)
    places = [batch.labels.data_ptr() for batch in batches.static]
    assert not any(batch.labels.any() for batch in batches.static)
    if ahead:
        batches.read_ahead()
    batches.fill()
    for place, batch in zip(places, batches.static, strict=True):
        assert_same_batch(batch, stored(reader, batch.sample_ids.numpy()))
        assert batch.labels.data_ptr() == place


def test_a_wrong_index_is_one_clear_error(index, reader):
    lengths = index.lengths.copy()
    first, last = index.order_by_length[[0, -1]]
    lengths[first], lengths[last] = lengths[last], lengths[first]
    batches = held_out(replace(index, lengths=lengths), reader)
    batches.read_ahead()
    with pytest.raises(DataError, match="sizes of samples do not match the set's index"):
        batches.fill()


def test_a_forward_is_a_share_of_the_set_where_ranks_are_many(index):
    total = int(index.lengths.sum(dtype=np.int64))
    assert TOKENS_CPU < total < TOKENS_CUDA
    assert tokens_per_micro_batch(index, 1, CPU) == TOKENS_CPU
    assert tokens_per_micro_batch(index, 1, torch.device("cuda")) == total
    assert len(cut_by_tokens(index, tokens_per_micro_batch(index, 8, CPU))) == 8


@pytest.fixture(scope="module")
def model():
    return small_model(3, hidden_dropout=0.5)


def test_counts_are_those_of_one_sample_at_a_time(model, synthetic_data):
    index = LengthIndex.open(synthetic_data / "eval")
    reader = SampleReader(synthetic_data / "eval", index.manifest)
    model.eval()
    right, total, right_at_mask, at_mask = 0, 0, 0, 0
    for sample in range(index.manifest.num_samples):
        batch = stored(reader, np.array([sample]))
        with torch.no_grad():
            guesses = model(batch).mlm.argmax(dim=-1)
        hit = guesses == batch.labels
        masked = batch.input_ids[batch.masked_token_index] == index.manifest.mask_id
        right, total = right + int(hit.sum()), total + len(hit)
        right_at_mask += int((hit & masked).sum())
        at_mask += int(masked.sum())
    model.train()
    found = evaluator_of(synthetic_data, 600)(model)
    assert found == Accuracy(right, total, right_at_mask, at_mask)
    assert 0 < right < total
    assert model.training  # dropout is off during, and on again after


def test_ranks_share_the_set_without_overlap(model, synthetic_data, monkeypatch):
    whole = evaluator_of(synthetic_data, 300)(model)
    shares = []
    monkeypatch.setattr("torch.distributed.all_reduce", shares.append)
    for rank in range(3):
        evaluator_of(synthetic_data, 300, rank=rank, world_size=3)(model)
    assert Accuracy(*torch.stack(shares).sum(dim=0).tolist()) == whole


def test_a_prepared_evaluation_follows_the_weights_of_its_own_model(model, synthetic_data):
    prepared = evaluator_of(synthetic_data, 600, step_mode="captured")
    prepared.prepare(model)
    assert model.training
    with pytest.raises(AssertionError):
        prepared(small_model(4))
    with prepared:
        first = prepared(model)
        assert first == evaluator_of(synthetic_data, 600)(model)
        bias = model.cls.predictions.bias
        with torch.no_grad():
            bias[7] += 100.0  # every guess is word 7
        assert prepared(model) == evaluator_of(synthetic_data, 600)(model) != first
        with torch.no_grad():
            bias[7] -= 100.0


def test_words_state_multiples_of_the_guess(synthetic_data):
    index = LengthIndex.open(synthetic_data / "eval")
    twice = round(2 * index.manifest.baseline.context_free_accuracy * 1_000_000)
    words = evaluator_of(synthetic_data, 300).in_words(Accuracy(twice, 1_000_000, 0, 100))
    assert "(2.00 x baseline)" in words and "on [MASK] inputs 0.0000 (0.00 x baseline)" in words
