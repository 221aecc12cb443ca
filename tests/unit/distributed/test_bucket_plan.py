"""Buckets by the rule of DistributedDataParallel, layouts of any buckets, and views of buffers."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mlperf_bert.distributed.bucket_plan import (
    BLOCK,
    MIB,
    ReadyGradient,
    ddp_bucket_cap_mb,
    plan_buckets,
    plan_layout,
)
from mlperf_bert.distributed.flat_reducer import FlatBuffers, flat_weights, views


def gradients(numels):
    return [
        ReadyGradient(name=f"p{n}", numel=numel, ready_at=(n + 1) / len(numels))
        for n, numel in enumerate(numels)
    ]


def test_ddps_default_cap_has_a_small_first_bucket():
    quarter_mib = gradients([MIB // 16] * 200)
    assert [len(bucket) for bucket in plan_buckets(quarter_mib, 4, 25.0)] == [4, 100, 96]
    assert [len(bucket) for bucket in plan_buckets(quarter_mib, 4, 24.0)] == [96, 96, 8]
    assert ddp_bucket_cap_mb(25.0) is None
    assert ddp_bucket_cap_mb(24.0) == 24.0


@given(
    numels=st.lists(st.integers(1, 1000), max_size=30),
    element_bytes=st.sampled_from((2, 4)),
    cap_bytes=st.integers(1, 4000),
)
def test_every_gradient_is_in_one_bucket_and_only_the_last_may_be_short(
    numels, element_bytes, cap_bytes
):
    ready = gradients(numels)
    buckets = plan_buckets(ready, element_bytes, cap_bytes / MIB)
    assert [each for bucket in buckets for each in bucket] == ready
    sizes = [[element_bytes * each.numel for each in bucket] for bucket in buckets]
    assert all(each and sum(each[:-1]) < cap_bytes for each in sizes)
    assert all(sum(each) >= cap_bytes for each in sizes[:-1])


SIZES = st.integers(1, 5) | st.integers(BLOCK - 2, BLOCK + 2) | st.integers(1, 5 * BLOCK)
BUCKETS = st.lists(st.lists(SIZES, min_size=1, max_size=6), min_size=1, max_size=4)


def layout_of(buckets, num_shards):
    names = [[f"{b}.{t}" for t in range(len(bucket))] for b, bucket in enumerate(buckets)]
    shapes = {
        name: (1, size)
        for in_bucket, sizes in zip(names, buckets, strict=True)
        for name, size in zip(in_bucket, sizes, strict=True)
    }
    return plan_layout(shapes, names, num_shards)


def owners(layout):
    """The place in `tensors` of every buffer element's tensor; -1 in padding."""
    found = np.full(layout.numel, -1)
    for place, tensor in enumerate(layout.tensors):
        assert (found[tensor.start : tensor.stop] == -1).all()
        found[tensor.start : tensor.stop] = place
    return found


@given(BUCKETS, st.integers(1, 5))
def test_every_tensor_has_its_own_blocks_of_equally_cut_buckets(buckets, num_shards):
    layout = layout_of(buckets, num_shards)
    assert [[each.numel for each in bucket.tensors] for bucket in layout.buckets] == buckets
    edges = [0, *(bucket.stop for bucket in layout.buckets)]
    for bucket, both in zip(layout.buckets, pairwise(edges), strict=True):
        assert (bucket.start, bucket.stop) == both
        assert (bucket.stop - bucket.start) % (BLOCK * num_shards) == 0
        used = sum(-(-tensor.numel // BLOCK) * BLOCK for tensor in bucket.tensors)
        assert 0 <= bucket.stop - bucket.start - used < BLOCK * num_shards
    assert layout.numel == edges[-1] == num_shards * layout.shard_numel
    of_elements = owners(layout)
    for block in of_elements.reshape(-1, BLOCK):
        assert len(set(block[block >= 0])) <= 1
    gaps = np.zeros(layout.numel, dtype=bool)
    for gap in layout.gaps:
        gaps[gap] = True
    assert ((of_elements == -1) == gaps).all()


@given(BUCKETS, st.integers(1, 5))
def test_shards_have_every_element_of_every_tensor_once(buckets, num_shards):
    layout = layout_of(buckets, num_shards)
    of_elements = owners(layout)
    found = np.zeros(layout.numel, dtype=int)
    for shard in range(num_shards):
        # What a reduce-scatter of every bucket leaves with this shard, one after the other.
        pieces = [np.arange(layout.numel)[layout.piece(each, shard)] for each in layout.buckets]
        own = np.concatenate(pieces)
        assert len(own) == layout.shard_numel
        for bucket, piece in zip(layout.buckets, pieces, strict=True):
            assert np.array_equal(own[layout.piece_in_shard(bucket)], piece)
        segments = list(layout.segments(shard))
        assert len({each.tensor.name for each in segments}) == len(segments)
        for segment in segments:
            places = own[segment.in_shard]
            expected = segment.tensor.start + np.arange(segment.first, segment.last)
            assert np.array_equal(places, expected)
            assert segment.is_whole == (len(places) == segment.tensor.numel)
            found[places] += 1
        blocks = of_elements[own].reshape(-1, BLOCK)
        for block, tensor in zip(blocks, layout.tensor_of_block(shard), strict=True):
            assert set(block) <= {tensor, -1}
    assert np.array_equal(found, (of_elements >= 0).astype(int))


def make_buffers():
    """A model, its buffers, and the weights that it had before."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    before = copy.deepcopy(model.state_dict())
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    layout = plan_layout(shapes, [["2.bias", "2.weight"], ["0.bias", "0.weight"]], 2)
    return model, FlatBuffers(model, layout, flat_weights(model, layout)), before


def gradients_in(buffers, model):
    """The gradients in the flat buffer, in the model's order."""
    names = [tensor.name for tensor in buffers.layout.tensors]
    by_name = dict(zip(names, views(buffers.gradients, buffers.layout), strict=True))
    return [by_name[name] for name, _ in model.named_parameters()]


def test_parameters_become_views_and_keep_their_values():
    model, buffers, before = make_buffers()
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    buffers.weights.add_(1.0)
    assert all(torch.equal(each, before[name] + 1) for name, each in model.state_dict().items())
    assert len(buffers.parameters) == len(before)


@pytest.mark.parametrize("taken", [True, False])
def test_gradients_of_forwards_add_up_in_the_buffer(taken):
    model, buffers, _ = make_buffers()
    buffers.gradients.fill_(99.0)  # of an update before
    for _ in range(2):  # updates of two micro-batches
        buffers.begin_update()
        alone = []
        for inputs in torch.randn(2, 3, 5):
            loss = model(inputs).square().sum()
            alone.append(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))
            loss.backward()
            if taken:
                for number in range(len(buffers.parameters)):
                    buffers.take(number)
        buffers.collect()
        expected = [first + second for first, second in zip(*alone, strict=True)]
        torch.testing.assert_close(gradients_in(buffers, model), expected)
        assert all(not bool(buffers.gradients[gap].any()) for gap in buffers.layout.gaps)


def test_gradients_kept_elsewhere_are_fetched_and_a_missing_one_is_zero():
    model, buffers, _ = make_buffers()
    buffers.gradients.fill_(99.0)
    buffers.begin_update()
    buckets = [torch.full_like(each, 3.0) for each in model.parameters()]
    for parameter, bucket in zip(list(model.parameters())[:3], buckets[:3], strict=True):
        parameter.grad = bucket  # as DistributedDataParallel's views of its own
    buffers.collect()
    *found, last = gradients_in(buffers, model)
    torch.testing.assert_close(found, buckets[:3])
    assert not bool(last.any())
