"""Buckets and clip policies on two and four real ranks: our plan against DDP's own buckets after
its rebuild; DDP's hook and the flat reducer against formulas.

Formulas are in float64; beside them plain DDP, all dtypes of gradients and wire, and a run that is
spoilt.
"""

import copy
import math
import sys
from itertools import accumulate, product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bert_tools.plan.buckets import backward_order
from forked_ranks import as_rank, what_ranks_saw
from mlperf_bert.config.files import load_config
from mlperf_bert.config.sections import ClipSection
from mlperf_bert.distributed.bucket_plan import (
    ddp_bucket_cap_mb,
    plan_buckets,
    plan_in_reverse,
    plan_layout,
)
from mlperf_bert.distributed.clipping import (
    PUBLISHED_BUCKETS,
    ClipState,
    clip_hook,
    limit_factor,
    make_clipping,
    wire_dtype,
)
from mlperf_bert.distributed.flat_reducer import FlatBuffers, FlatReducer, ShardGroup, flat_weights
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.model.layers import pretraining_loss
from mlperf_bert.run.directory import RunDirectory
from mlperf_bert.step.captured import synthetic_batch
from mlperf_bert.step.data_parallel import make_data_parallel
from mlperf_bert.train import MAX_SKIPPED_IN_A_ROW, train
from model_cases import loss_sums
from support import metrics_records

CPU = torch.device("cpu")
MICRO_BATCHES = 2
BUCKET_CAP_MB = 0.0002  # three buckets, of a layer each
BEFORE = ("whole_before_allreduce", "bucket_before_allreduce")
POLICIES = ("none", "after_allreduce", *BEFORE)
CASES = {
    **{policy: ClipSection(policy=policy) for policy in POLICIES},
    "equal_share": ClipSection(policy="bucket_before_allreduce", bucket_limit="equal_share"),
}
# Factors of losses: gradients far below the limit of 1, some buckets above theirs, all far above.
SCALES = {"under": 1e-4, "mixed": 0.07, "over": 1e4}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WIRES = (("fp32", "bf16"), ("bf16", "as_gradients"))  # dtypes of gradients, and on the wire
DDP_CASES = (("fp32", 0.1), ("bf16", 0.1), ("fp32", 0.05), ("fp32", 25.0))  # cap in MiB
# Large enough for a second bucket after a first one of 1 MiB.
WIDER = ("model.hidden_size=128", "model.intermediate_size=512")
SPOILT_FROM = 4
LAST_STEP = SPOILT_FROM + MAX_SKIPPED_IN_A_ROW - 1
WARM_UP_STEPS = 3  # run.warm_up_steps' default: the hook is called in them too


def make_model():
    """A model that is equal on every rank; bucket sizes differ."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 4)
    )


def loss_of(model, rank, forward, scale):
    """A loss that differs between ranks and micro-batches, in size too."""
    generator = torch.Generator().manual_seed(10 * rank + forward)
    inputs = torch.randn(6, 8, generator=generator).to(next(model.parameters()).dtype)
    outputs = model(inputs)
    return scale * (1 + rank) * outputs.float().square().sum()


def local_gradients(dtype, rank, scale):
    """This rank's gradients, of each micro-batch alone, in float64."""
    found = []
    for forward in range(MICRO_BATCHES):
        model = make_model().to(DTYPES[dtype])
        loss_of(model, rank, forward, scale).backward()
        named = model.named_parameters()
        found.append({name: each.grad.double() for name, each in named})
    return found


def layout_of(model, num_shards):
    """The bucket layout that `step/data_parallel.py` plans."""
    named = dict(model.named_parameters())
    numel = {name: each.numel() for name, each in named.items()}
    item_bytes = next(iter(named.values())).element_size()
    buckets = plan_in_reverse(numel, item_bytes, BUCKET_CAP_MB)
    shapes = {name: tuple(each.shape) for name, each in named.items()}
    return plan_layout(shapes, buckets, num_shards)


def groups(info):
    """The groups that differ on this number of ranks."""
    counts = {"flat": 1, "zero1": info.world_size}
    if info.world_size > 2:
        counts["zero1_node"] = 2
    return {mode: ShardGroup(info, count, CPU) for mode, count in counts.items()}


class Reduction:
    """A model of one dtype, and who averages its gradients; DDP, without a group of shards."""

    def __init__(self, clip, dtype, allreduce_dtype, info, group):
        self.model = make_model().to(DTYPES[dtype])
        self._rank = info.rank
        wire = wire_dtype(DTYPES[dtype], allreduce_dtype)
        self._group = group
        if group is None:
            ddp = wrapped(self.model, view=True)
            self._called = ddp
            self._clipping = make_clipping(clip, ddp, wire)
            self.update(1.0)  # then its buckets are rebuilt
            return
        self._called = self.model
        self._layout = layout_of(self.model, group.count)
        self._buffers = FlatBuffers(
            self.model, self._layout, flat_weights(self.model, self._layout)
        )
        self._clipping = self._reducer = FlatReducer(
            self.model, self._buffers, clip, group, wire, info.world_size
        )

    def update(self, scale):
        """Reduced gradients, (first element, values in float64) of each tensor, and the outcome."""
        if self._group is not None:
            self._buffers.begin_update()
        self.model.zero_grad()
        for forward in range(MICRO_BATCHES):
            with self._clipping.forward(is_last=forward == MICRO_BATCHES - 1):
                loss_of(self._called, self._rank, forward, scale).backward()
        outcome = self._clipping.finish()
        return {
            "gradients": self._reduced(outcome),
            "clipped_fraction": float(outcome.clipped_fraction),
            "grad_norm": float(outcome.grad_norm),
            "skip": float(outcome.skip),
        }

    def _reduced(self, outcome):
        factor = outcome.gradient_factor.double()
        if self._group is None:
            named = self.model.named_parameters()
            return {name: (0, each.grad.double().flatten() * factor) for name, each in named}
        mine = self._reducer.shard_gradients.double() * factor
        segments = self._layout.segments(self._group.index)
        return {each.tensor.name: (each.first, mine[each.in_shard]) for each in segments}


def wrapped(model, *, view):
    """The model wrapped in DDP, with several buckets once rebuilt."""
    return DistributedDataParallel(model, bucket_cap_mb=BUCKET_CAP_MB, gradient_as_bucket_view=view)


def several_updates(rank, prepare, view):
    """Weights after five updates under limits that nothing reaches."""
    ddp = wrapped(make_model(), view=view)
    state = prepare(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    for number in range(5):
        optimizer.zero_grad()
        loss_of(ddp, rank, number, 1.0).backward()
        if state is not None:
            assert state.finish().skip == 0
        optimizer.step()
    return copy.deepcopy(ddp.module.state_dict())


def with_hook(policy):
    """Registers the hook by itself, as docs/concepts/clipping.md does."""

    def prepare(ddp):
        clip = ClipSection(policy=policy, max_norm=1e6)
        state = ClipState(clip, ddp.parameters(), dist.get_world_size())
        ddp.register_comm_hook(state, clip_hook)
        return state

    return prepare


def spoilt_run(config, data, output, info):
    """Steps of a run in which the last rank's gradient of one tensor is spoilt from one on."""
    settings = (
        *(f"parallel.ranks_per_node={info.world_size}", "parallel.local_batch_size=4"),
        *("checkpoint.interval_steps=never", "eval.interval_samples=1000000", "run.max_steps=20"),
        *("parallel.bucket_cap_mb=0.02", "clip.policy=bucket_before_allreduce"),
    )
    case = load_config(config, settings)
    step = -WARM_UP_STEPS

    def hook(gradient):
        nonlocal step
        step += 1
        return gradient if step < SPOILT_FROM else gradient * math.nan

    def made_spoilt(model, *arguments):
        made = make_data_parallel(model, *arguments)
        if info.rank == info.world_size - 1:
            named = model.named_parameters()
            norm = next(each for name, each in named if name.endswith("LayerNorm.weight"))
            norm.register_hook(hook)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlperf_bert.train.make_data_parallel", made_spoilt)
        directory = RunDirectory(output / "run", 0)
        return train(case, info, CPU, directory, data, int(case.run.seed)).steps


def buckets_of_a_step(config, dtype, cap_mb):
    """DDP's own buckets of a BERT, as its hook got them in the third step."""
    model = BertForPretraining(config.model, torch.device("cpu")).to(DTYPES[dtype])
    names = {parameter: name for name, parameter in model.named_parameters()}
    ddp = DistributedDataParallel(
        model, bucket_cap_mb=ddp_bucket_cap_mb(cap_mb), gradient_as_bucket_view=True
    )
    seen = []

    def hook(_, bucket):
        buffer = bucket.buffer()
        start = buffer.storage_offset()
        own = [names[parameter] for parameter in bucket.parameters()]
        offsets = [each.storage_offset() - start for each in bucket.gradients()]
        num_bytes = buffer.numel() * buffer.element_size()
        seen.append((own, offsets, buffer.numel(), num_bytes))
        sent = dist.all_reduce(buffer, async_op=True).get_future()
        return sent.then(lambda done: done.value()[0])

    ddp.register_comm_hook(None, hook)
    batch = synthetic_batch(config)
    for _ in range(3):
        seen.clear()
        pretraining_loss(loss_sums(ddp(batch), batch), batch).backward()
    return seen


def all_cases(config, data, output, info):
    """Gradients of small models, local and reduced; then a whole run, which leaves a directory."""
    seen = {}
    for dtype in DTYPES:
        buckets = layout_of(make_model().to(DTYPES[dtype]), 1).buckets
        seen[f"buckets {dtype}"] = [[each.name for each in bucket.tensors] for bucket in buckets]
        for size, scale in SCALES.items():
            seen[f"local {dtype} {size}"] = local_gradients(dtype, info.rank, scale)
    made = {"ddp": None, **groups(info)}
    for (mode, group), (name, clip) in product(made.items(), CASES.items()):
        reduction = Reduction(clip, "fp32", "as_gradients", info, group)
        for size, scale in SCALES.items():
            seen[f"{mode} {name} {size}"] = reduction.update(scale)
    for mode, group in groups(info).items():
        number = torch.tensor(float(info.rank))
        group.add_up(number)
        seen[f"sum {mode}"] = float(number)
    for mode, policy, (dtype, wire) in product(made, POLICIES, WIRES):
        reduction = Reduction(CASES[policy], dtype, wire, info, made[mode])
        seen[f"{mode} {policy} {dtype} {wire}"] = reduction.update(SCALES["mixed"])
    for view in (True, False):
        seen[f"plain {view}"] = several_updates(info.rank, lambda ddp: None, view)
        for policy in BEFORE:
            seen[f"{policy} {view}"] = several_updates(info.rank, with_hook(policy), view)
    wider = load_config(config, WIDER)
    seen["ddp buckets"] = [buckets_of_a_step(wider, *case) for case in DDP_CASES]
    return seen | {"last step": spoilt_run(config, data, output, info)}


# Relative to the largest element of a gradient: fp32 sums of four ranks and a factor.
TOLERANCE = 1e-6


@pytest.fixture(scope="module", params=[4, pytest.param(2, marks=pytest.mark.longest)])
def job(request, tiny_config, synthetic_data, tmp_path_factory):
    """The ranks' run directory and observations; the ranks are started once for all tests."""
    output = tmp_path_factory.mktemp("clip")
    seen = what_ranks_saw(__file__, (tiny_config, synthetic_data), request.param, output)
    return output, seen


@pytest.fixture(scope="module")
def seen(job):
    return job[1]


def modes(seen):
    return ("ddp", "flat", "zero1", *(["zero1_node"] if len(seen) > 2 else []))


def test_nodes_agree_on_sums_over_their_shards(seen):
    """Two nodes of two shards take the mean of their sums, which rounding could make differ."""
    numbers = range(len(seen))
    expected = {"flat": [*numbers], "zero1": [sum(numbers)] * len(seen)}
    if len(seen) > 2:
        expected["zero1_node"] = [sum(numbers) / 2] * len(seen)
    assert {mode: [each[f"sum {mode}"] for each in seen] for mode in expected} == expected


def limited(gradient, limit):
    return gradient * min(1.0, limit / float(np.linalg.norm(gradient)))


class Formula:
    """The policies' formulas in float64, from every rank's local gradients."""

    def __init__(self, seen, size, dtype="fp32"):
        self.buckets = seen[0][f"buckets {dtype}"]
        self.names = [name for bucket in self.buckets for name in bucket]
        # By rank and forward: the gradient's parts, by bucket.
        self.local = [
            [[joined(of_micro_batch, bucket) for bucket in self.buckets] for of_micro_batch in rank]
            for rank in (one[f"local {dtype} {size}"] for one in seen)
        ]
        self.numel = sum(part.size for part in self.local[0][0])

    def gradient(self, case):
        clip = CASES[case]
        mean = np.mean([self.contribution(case, rank) for rank in range(len(self.local))], axis=0)
        return limited(mean, clip.max_norm) if clip.policy == "after_allreduce" else mean

    def contribution(self, case, rank):
        """A rank's part of the mean, not divided by the ranks."""
        clip, parts = CASES[case], self.accumulated(rank)
        if clip.policy == "whole_before_allreduce":
            return limited(np.concatenate(parts), clip.max_norm)
        if clip.policy == "bucket_before_allreduce":
            limits = [self.limit(case, part.size) for part in parts]
            return np.concatenate(list(map(limited, parts, limits)))
        return np.concatenate(parts)

    def accumulated(self, rank):
        """The sum of its micro-batches, by bucket."""
        return [np.sum(each, axis=0) for each in zip(*self.local[rank], strict=True)]

    def limit(self, case, numel):
        clip = CASES[case]
        if clip.bucket_limit == "equal_share":
            return clip.max_norm / PUBLISHED_BUCKETS**0.5
        return clip.max_norm * (numel / self.numel) ** 0.5


def joined(gradients, names):
    return np.concatenate([gradients[name].numpy().ravel() for name in names])


def found_by(seen, case, formula):
    """The gradient that each rank has a part of: its own part, and the others' from elsewhere."""
    whole = {}
    for rank in seen:
        assert rank[case]["skip"] == 0
        for name, (first, values) in rank[case]["gradients"].items():
            part = slice(first, first + len(values))
            size = int(seen[0]["local fp32 mixed"][0][name].numel())
            own = whole.setdefault(name, np.full(size, np.nan))
            assert np.isnan(own[part]).all() or np.array_equal(own[part], values)
            own[part] = values
    return np.concatenate([whole[name] for name in formula.names])


def planned(gradients, item_bytes, cap_mb):
    """Our plan, told as `buckets_of_a_step` tells DDP's."""
    found = []
    for bucket in plan_buckets(gradients, item_bytes, cap_mb):
        ends = list(accumulate(gradient.numel for gradient in bucket))
        names, offsets = [gradient.name for gradient in bucket], [0, *ends[:-1]]
        found.append((names, offsets, ends[-1], ends[-1] * item_bytes))
    return found


def test_a_norm_within_the_limit_changes_no_bit():
    for limit in np.random.default_rng(0).uniform(1e-3, 10, 2000):
        norms = torch.tensor([0.5 * limit, limit, 2 * limit])
        factors = limit_factor(norms, float(limit))
        assert factors[:2].tolist() == [1, 1] and 0.499 < factors[2] < 0.501
    assert limit_factor(torch.tensor([torch.inf, torch.nan]), 1.0).isnan().all()


def test_the_plan_is_what_ddp_does(seen, tiny_config):
    config = load_config(tiny_config, WIDER)
    gradients = backward_order(config.model, num_tokens=32, num_masked=5)
    plans = [planned(gradients, DTYPES[dtype].itemsize, cap_mb) for dtype, cap_mb in DDP_CASES]
    assert all(rank["ddp buckets"] == plans for rank in seen)
    assert all(len(plan) > 1 for plan in plans)


@pytest.mark.parametrize("size", SCALES)
@pytest.mark.parametrize("case", CASES)
def test_each_policy_equals_its_formula(seen, case, size):
    formula = Formula(seen, size)
    expected = formula.gradient(case)
    for mode in modes(seen):
        found = found_by(seen, f"{mode} {case} {size}", formula)
        assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()


def unit(*dtypes):
    """Largest relative error of rounding to the coarsest of them."""
    return max(torch.finfo(DTYPES[dtype]).eps for dtype in dtypes) / 2


@pytest.mark.parametrize(("dtype", "wire"), WIRES)
@pytest.mark.parametrize("policy", POLICIES)
def test_dtypes_of_gradients_and_wire(seen, policy, dtype, wire):
    """Elements are off by so many units of the largest that a rank sends at most."""
    # The sum of two micro-batches, what is sent, a sum for each rank, and the result are rounded.
    roundings = (3 + len(seen)) * unit(dtype, dtype if wire == "as_gradients" else wire)
    formula = Formula(seen, "mixed", dtype)
    sent = [formula.contribution(policy, rank) for rank in range(len(seen))]
    largest = max(float(np.abs(each).max()) for each in sent)
    for mode in modes(seen):
        found = found_by(seen, f"{mode} {policy} {dtype} {wire}", formula)
        assert np.abs(found - formula.gradient(policy)).max() <= roundings * largest


@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("policy", BEFORE)
def test_under_the_limit_training_is_plain_ddp_bit_for_bit(seen, policy, view):
    for rank in seen:
        plain, hooked = rank[f"plain {view}"], rank[f"{policy} {view}"]
        assert all(torch.equal(plain[name], hooked[name]) for name in plain)


@pytest.mark.parametrize("policy", BEFORE)
def test_clipped_share_and_own_norm_are_counted(seen, policy):
    formula = Formula(seen, "mixed")
    shares = []
    for number, rank in enumerate(seen):
        parts = formula.accumulated(number)
        norm = np.linalg.norm(np.concatenate(parts))
        over = [bool(np.linalg.norm(p) > formula.limit(policy, p.size)) for p in parts]
        expected = float(norm > 1) if policy == "whole_before_allreduce" else np.mean(over)
        for mode in modes(seen):
            found = rank[f"{mode} {policy} mixed"]
            assert found["clipped_fraction"] == pytest.approx(expected)
            assert found["grad_norm"] == pytest.approx(norm, rel=TOLERANCE)
            assert rank[f"{mode} {policy} under"]["clipped_fraction"] == 0
            assert rank[f"{mode} {policy} over"]["clipped_fraction"] == 1
        shares += over
    assert 0 < sum(shares) < len(shares)


def test_all_ranks_stop_after_ten_spoilt_steps_in_a_row(job):
    """What is skipped, and what is not spoilt by it: test_sharded_optimizer.py."""
    output, seen = job
    assert [rank["last step"] for rank in seen] == [LAST_STEP] * len(seen)
    skipped = [record["skipped_steps"] for record in metrics_records(output / "run")]
    assert skipped == [int(step >= SPOILT_FROM) for step in range(1, LAST_STEP + 1)]
    log = (output / "run/run_0/stdout.log").read_text().splitlines()
    (said,) = [line for line in log if "non-finite gradient" in line and "stopped" in line]
    assert f"{MAX_SKIPPED_IN_A_ROW} steps" in said and "optim.learning_rate" in said


if __name__ == "__main__":
    places = [Path(each) for each in sys.argv[1:]]
    as_rank(lambda info: all_cases(*places, info), places[-1])
