"""Batches laid end to end, and padded to a capacity: what is padding counts for nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_tools.bench.training_run import synthetic_samples
from mlperf_bert.data.batch import IGNORED, NO_SAMPLE, blank, make_batch, pad
from mlperf_bert.data.capacity import CapacityPlan, StaticShape
from mlperf_bert.data.shards import Samples
from mlperf_bert.model.bert import last_rows

LONGEST, MOST_MASKED = 40, 6
LENGTHS = st.lists(st.integers(5, LONGEST), min_size=1, max_size=7)


def batch_of(lengths):
    samples = synthetic_samples(
        np.array(lengths), vocab_size=50, max_predictions=MOST_MASKED, seed=len(lengths)
    )
    ids = np.arange(100, 100 + len(lengths))
    return make_batch(samples, ids, mlm_denominator=3.5, nsp_denominator=2.5)


def shape_of(tokens, sequences, masked):
    capacity = CapacityPlan(tokens=tokens, sequences=sequences, masked=masked)
    return StaticShape.of(capacity, max_seqlen=LONGEST, max_masked=MOST_MASKED)


def room_for(batch, more):
    """A shape that holds the batch, and more tokens, sequences and masked positions."""
    tokens, sequences, masked = more
    slots, count = len(batch.lengths) + sequences, batch.input_ids.shape[0] + tokens
    shape = StaticShape(
        tokens=count,
        sequences=slots,
        masked=min(batch.labels.shape[0] + masked, MOST_MASKED * slots),
        max_seqlen=LONGEST,
        max_masked=MOST_MASKED,
    )
    return replace(shape, tokens=count + int(shape.least_padding(np.array(len(batch.lengths)))))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(lengths=LENGTHS, more=st.tuples(st.integers(0, 300), st.integers(0, 15), st.integers(0, 60)))
def test_what_is_real_stays_and_the_rest_is_marked(lengths, more):
    batch = batch_of(lengths)
    shape = room_for(batch, more)
    padded = pad(batch, shape)
    for each in (batch, padded):  # in one block of memory, which is copied to a device at once
        places = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(each).values()}
        assert len(places) == 1
    assert padded.shape is shape
    for name, tensor in tensors_of(blank(shape, torch.device("cpu"))).items():
        assert getattr(padded, name).shape == tensor.shape
    num_tokens, num_sequences = sum(lengths), len(lengths)
    for name in ("input_ids", "token_type_ids", "position_ids"):
        assert torch.equal(getattr(padded, name)[:num_tokens], getattr(batch, name))
        assert getattr(padded, name).shape == (shape.tokens,)
    assert padded.lengths[:num_sequences] == batch.lengths
    assert torch.equal(padded.sample_ids[:num_sequences], batch.sample_ids)
    assert (padded.sample_ids[num_sequences:] == NO_SAMPLE).all()
    assert torch.equal(padded.next_sentence_label[:num_sequences], batch.next_sentence_label)
    assert (padded.next_sentence_label[num_sequences:] == IGNORED).all()
    is_used = padded.labels != IGNORED
    assert torch.equal(padded.labels[is_used], batch.labels)
    assert torch.equal(padded.masked_token_index[is_used], batch.masked_token_index)
    assert padded.mlm_denominator == 3.5 and padded.nsp_denominator == 2.5

    # Sequences cover all tokens, and none is too long.
    assert len(padded.lengths) == shape.sequences + shape.dummies
    assert padded.cu_seqlens.tolist() == [0, *np.cumsum(padded.lengths)]
    assert padded.cu_seqlens[-1] == shape.tokens and max(padded.lengths) <= LONGEST
    assert padded.lengths[num_sequences] > 0 or shape.sequences == num_sequences
    assert 0 not in np.trim_zeros(padded.lengths, "b")
    places = torch.cat([torch.arange(length) for length in padded.lengths])
    assert torch.equal(padded.position_ids, places)
    # Each masked position, used or not, lies in its own sequence, and none has too many.
    assert sum(padded.masked_counts) == shape.masked
    assert max(padded.masked_counts) <= MOST_MASKED
    assert not any(padded.masked_counts[shape.sequences :])
    owner = torch.repeat_interleave(
        torch.arange(len(padded.lengths)), torch.tensor(padded.masked_counts)
    )
    starts, ends = padded.cu_seqlens[owner], padded.cu_seqlens[owner + 1]
    assert ((starts <= padded.masked_token_index) & (padded.masked_token_index < ends)).all()
    assert torch.equal(padded.masked_token_index, padded.masked_token_index.sort().values)
    # None has too many rows in the last layer, whose numbers the device and the host know.
    queries, _ = last_rows(padded, LONGEST, shape.sequences)
    assert queries.cu_seqlens.diff().tolist() == list(queries.lengths)
    assert max(queries.lengths) <= queries.max_length == 1 + MOST_MASKED


def tensors_of(batch):
    found = {name: getattr(batch, name) for name in batch.__slots__}
    return {name: each for name, each in found.items() if isinstance(each, torch.Tensor)}


@pytest.mark.parametrize(
    ("tokens", "sequences", "masked", "held"),
    [
        (48, 4, 20, True),
        (49, 4, 20, False),
        (47, 3, 20, True),
        (48, 3, 20, False),  # the empty slot needs a token
        (47, 1, 20, False),  # 20 masked and 4 first tokens are rows of 4 sequences, of 7 at most
        (45, 1, 20, True),
        (40, 5, 20, False),
        (40, 4, 21, False),
    ],
)
def test_what_a_shape_holds(tokens, sequences, masked, held):
    sizes = {"tokens": tokens, "sequences": sequences, "masked": masked}
    small = {"tokens": 5, "sequences": 4, "masked": 1}
    both = {name: np.array([[small[name]], [size]]) for name, size in sizes.items()}
    assert shape_of(48, 4, 20).holds(**both) is held


def test_a_shape_is_rounded_up_to_what_fp8_takes():
    found = shape_of(33, 2, 100)
    assert (found.tokens, found.masked) == (48, 12)


def test_make_batch_lays_sequences_end_to_end():
    samples = Samples(
        input_ids=np.array([2, 7, 3, 8, 9, 3, 2, 5, 3, 6, 3]),
        lengths=np.array([6, 5]),
        segment_b_start=np.array([3, 3]),
        masked_positions=np.array([1, 4, 3]),
        masked_ids=np.array([10, 11, 12]),
        masked_counts=np.array([2, 1]),
        next_sentence_label=np.array([0, 1]),
    )
    batch = make_batch(samples, np.array([7, 3]), mlm_denominator=3.0, nsp_denominator=2.0)
    assert batch.cu_seqlens.tolist() == [0, 6, 11]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]
    assert batch.token_type_ids.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1]
    assert batch.masked_token_index.tolist() == [1, 4, 9]
    assert batch.labels.tolist() == [10, 11, 12]
    assert batch.lengths == (6, 5) and batch.max_seqlen == 6
    assert batch.masked_counts == (2, 1) and batch.sample_ids.tolist() == [7, 3]
