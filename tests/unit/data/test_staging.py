"""Staging for a captured step: padded where a capacity holds all ranks' forwards, else as it is."""

from dataclasses import replace

import numpy as np
import torch

from bert_tools.bench.synthetic import synthetic_samples
from mlperf_bert.data.balance import StepPlan, StepPlanner
from mlperf_bert.data.batch import UnpaddedBatch, blank, make_batch, pad
from mlperf_bert.data.capacity import StaticShape, shape_of
from mlperf_bert.data.sampler import UniformSampler
from mlperf_bert.data.staging import CapacityStaging
from shard_sets import assert_same_batch

CPU = torch.device("cpu")
SMALL = StaticShape(tokens=32, sequences=2, masked=12, max_seqlen=24, max_masked=6)
LARGE = StaticShape(tokens=48, sequences=2, masked=12, max_seqlen=24, max_masked=6)


def plan_of(lengths: list[int], world_size: int = 1) -> StepPlan:
    """Of a step in which each rank gets two of the sequences, in two forwards or in one."""
    sampler = UniformSampler(len(lengths), len(lengths), seed=1)
    masked = np.full(len(lengths), 4, dtype=np.uint8)
    planner = StepPlanner(sampler, np.array(lengths, np.uint16), masked, world_size=world_size)
    return planner.plan(1)


def batch_of(lengths: list[int]) -> UnpaddedBatch:
    samples = synthetic_samples(np.array(lengths), vocab_size=50, max_predictions=4, seed=1)
    return make_batch(samples, np.arange(len(lengths)), mlm_denominator=4, nsp_denominator=2)


def test_a_batch_is_padded_to_the_smallest_shape_that_holds_it() -> None:
    staging = CapacityStaging((SMALL, LARGE), 1, CPU)
    batch = batch_of([10, 12])
    (received,) = staging.receive(staging.send((batch,), plan_of([10, 12])))
    assert_same_batch(received, pad(batch, SMALL))
    (received,) = staging.receive(staging.send((batch_of([20, 20]),), plan_of([20, 20])))
    assert received.shape is LARGE


def test_what_no_shape_holds_stays_unpadded() -> None:
    staging = CapacityStaging((SMALL,), 1, CPU)
    batch = batch_of([20, 20])
    (received,) = staging.receive(staging.send((batch,), plan_of([20, 20])))
    assert received is batch and received.shape is None


def test_all_ranks_choose_the_shape_that_the_longest_needs() -> None:
    plan = plan_of([9, 10, 9, 10], world_size=2)
    one_long = replace(plan, num_tokens=np.array([[19], [33]]))
    assert shape_of(plan, (SMALL, LARGE)) is SMALL
    assert shape_of(one_long, (SMALL, LARGE)) is LARGE
    too_long = replace(plan, num_tokens=np.array([[19], [49]]))
    assert shape_of(too_long, (SMALL, LARGE)) is None


def test_a_blank_batch_has_the_sizes_of_a_padded_one() -> None:
    padded, empty = pad(batch_of([10, 12]), SMALL), blank(SMALL, CPU)
    assert empty.shape is SMALL
    empty.block.copy_(padded.block)
    for name in ("input_ids", "cu_seqlens", "labels", "next_sentence_label", "nsp_denominator"):
        assert torch.equal(getattr(empty, name), getattr(padded, name))
