"""The loader: the plan's samples, read ahead, staged and padded, errors raised in the loop."""

import threading
import time
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import dali_stand_in
from bert_tools.bench.training_run import synthetic_samples
from mlperf_bert.data.batch import make_batch, pad
from mlperf_bert.data.capacity import StaticShape, plan_shapes, shape_of
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.loader import PREFETCHED_STEPS, DaliCopy, DirectSource, Loader, Staging
from mlperf_bert.data.shards import SampleReader
from mlperf_bert.errors import DataError
from plan_cases import planner_of
from shard_sets import MAX_LENGTH, MAX_PREDICTIONS, assert_same_batch, write_set

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def a_set(tmp_path_factory):
    set_dir = tmp_path_factory.mktemp("loader") / "set"
    return set_dir, write_set(set_dir, [(40, "<u2"), (30, "<u4"), (20, "<u2")], seed=1)


@pytest.fixture
def planner(a_set):
    index = LengthIndex.open(a_set[0])
    shape = {"world_size": 2, "grad_accum_steps": 2}
    return planner_of(index.lengths, 16, masked_counts=index.masked_counts, **shape)


@pytest.fixture
def reader(a_set):
    return SampleReader(*a_set)


def test_batches_hold_the_planned_samples(planner, reader):
    with Loader(planner, DirectSource(reader, 1), CPU, first_step=3) as loader:
        for step, batch in zip((3, 4), loader, strict=False):
            assert batch.plan.step == step
            micro_batches = planner.plan(step).micro_batches_of(1)
            for found, (ids, denominators) in zip(batch.micro_batches, micro_batches, strict=True):
                assert_same_batch(found, make_batch(reader.read(ids), ids, **denominators))


def test_nothing_is_read_before_the_first_batch(planner, reader, monkeypatch):
    read = Mock(wraps=reader.read)
    monkeypatch.setattr(reader, "read", read)
    with Loader(planner, DirectSource(reader, 0), CPU) as loader:
        time.sleep(0.05)
        assert not read.called
        next(iter(loader))
        deadline = time.monotonic() + 60
        while read.call_count < 2 * (1 + PREFETCHED_STEPS) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert read.call_count >= 2 * (1 + PREFETCHED_STEPS)  # and goes on reading ahead
    assert not [thread for thread in threading.enumerate() if thread.name == "loader"]


def test_an_error_of_the_thread_reaches_the_loop(planner, reader, monkeypatch):
    damaged = DataError("shard", "is damaged", "make it again")
    monkeypatch.setattr(reader, "read", Mock(side_effect=damaged))
    with (
        pytest.raises(DataError, match="damaged"),
        Loader(planner, DirectSource(reader, 0), CPU) as loader,
    ):
        next(iter(loader))


SMALL = StaticShape(tokens=32, sequences=2, masked=12, max_seqlen=24, max_masked=6)
LARGE = StaticShape(tokens=48, sequences=2, masked=12, max_seqlen=24, max_masked=6)


def plan_of(lengths, world_size=1):
    """The plan of a step in which each rank gets two sequences, in two micro-batches or in one."""
    masked = np.full(len(lengths), 4)
    planner = planner_of(
        np.array(lengths), len(lengths), masked_counts=masked, world_size=world_size
    )
    return planner.plan(1)


def batch_of(lengths):
    samples = synthetic_samples(np.array(lengths), vocab_size=50, max_predictions=4, seed=1)
    return make_batch(samples, np.arange(len(lengths)), mlm_denominator=4, nsp_denominator=2)


def test_a_batch_is_padded_to_the_smallest_shape_that_holds_it_or_left_as_it_is():
    small, large = batch_of([10, 12]), batch_of([20, 20])

    def received(batch, staging):
        with staging.thread_context():
            staged = staging.send((batch,), plan_of(list(batch.lengths)))
        assert staged.copied is None  # on a CPU nothing is waited for
        (found,) = staging.receive(staged)
        return found

    assert received(large, Staging(CPU)) is large
    assert received(large, Staging(CPU, shapes=(SMALL,))) is large
    staging = Staging(CPU, shapes=(SMALL, LARGE))
    assert_same_batch(received(small, staging), pad(small, SMALL))
    assert received(large, staging).shape is LARGE

    def copy(block, memory):
        memory.fill_(1)  # which is what is received

    for staging in (Staging(CPU, copy), Staging(CPU, copy, (SMALL,))):
        assert set(received(small, staging).block.tolist()) == {1}


def test_all_ranks_choose_the_shape_that_the_longest_needs():
    plan = plan_of([9, 10, 9, 10], world_size=2)
    one_long = replace(plan, num_tokens=np.array([[19], [33]]))
    assert shape_of(plan, (SMALL, LARGE)) is SMALL
    assert shape_of(one_long, (SMALL, LARGE)) is LARGE
    too_long = replace(plan, num_tokens=np.array([[19], [49]]))
    assert shape_of(too_long, (SMALL, LARGE)) is None


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("is_real", [False, True])
def test_batches_by_dali_are_the_same_bit_for_bit(planner, reader, monkeypatch, is_real, is_padded):
    if is_real:
        pytest.importorskip("nvidia.dali", reason="nvidia-dali is not installed")
    else:
        dali_stand_in.install(monkeypatch)
    limits = {"max_seqlen": MAX_LENGTH, "max_masked": MAX_PREDICTIONS}
    shapes = plan_shapes(planner, 8, **limits) if is_padded else ()
    staging = Staging(CPU, DaliCopy(CPU), shapes)
    source = DirectSource(reader, 0)
    with Loader(planner, source, CPU, staging=staging) as loader:
        # All are kept until the end: none may lie in memory that a later one overwrites.
        steps = [step for _, step in zip(range(8), loader, strict=False)]
    for step in steps:
        expected = source.micro_batches(planner.plan(step.plan.step))
        assert len(step.micro_batches) == len(expected) == 2
        shape = shape_of(step.plan, shapes) if is_padded else None
        assert (shape is not None) == is_padded
        for batch, wanted in zip(step.micro_batches, expected, strict=True):
            assert batch.shape is shape
            assert_same_batch(batch, wanted if shape is None else pad(wanted, shape))
    assert len(np.unique([step.plan.step for step in steps])) == 8
