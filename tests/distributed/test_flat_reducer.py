"""The flat reducer and DDP's hook on two and four ranks: policies and dtypes against formulas."""

import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_clip_policies import (
    BUCKET_CAP_MB,
    CASES,
    FORWARDS,
    POLICIES,
    SCALES,
    TOLERANCE,
    Array,
    Formula,
    make_model,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from forked_ranks import as_rank, what_ranks_saw
from mlperf_bert.config.sections import ClipSection
from mlperf_bert.distributed.bucket_plan import FlatLayout, plan_in_reverse, plan_layout
from mlperf_bert.distributed.clipping import DTYPES, ClipOutcome, Clipping, make_clipping, make_wire
from mlperf_bert.distributed.flat_reducer import FlatBuffers, FlatReducer, ShardGroup, flat_weights
from mlperf_bert.distributed.launch import RankInfo

CPU = torch.device("cpu")
LOSS_SCALES = {"fp32": 1.0, "bf16": 1.0, "fp16": 256.0}  # by the gradients' dtype
WIRES = [  # dtypes of gradients, and on the wire
    *(("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "as_gradients"), ("bf16", "fp32")),
    *(("bf16", "fp16"), ("fp16", "as_gradients"), ("fp16", "fp32"), ("fp16", "bf16")),
]
TINY = 3e-8  # in place of SCALES: what is sent is too small for fp16 to keep more than a bit of it


def groups(info: RankInfo) -> dict[str, ShardGroup]:
    """Those that are not the same on so many ranks."""
    counts = {"flat": 1, "shard_world": info.world_size}
    if info.world_size > 2:
        counts["shard_node"] = 2
    return {mode: ShardGroup(info, count, CPU) for mode, count in counts.items()}


def loss_of(model: nn.Module, rank: int, forward: int, scale: float) -> Tensor:
    """That of test_clip_policies, of a model in any dtype."""
    generator = torch.Generator().manual_seed(10 * rank + forward)
    inputs = torch.randn(6, 8, generator=generator).to(next(model.parameters()).dtype)
    outputs: Tensor = model(inputs)
    return scale * (1 + rank) * outputs.float().square().sum()


def local_gradients(dtype: str, rank: int, scale: float) -> list[dict[str, Tensor]]:
    """This rank's gradients, of each forward alone, in float64."""
    found = []
    for forward in range(FORWARDS):
        model = make_model().to(DTYPES[dtype])
        (LOSS_SCALES[dtype] * loss_of(model, rank, forward, scale)).backward()
        named = model.named_parameters()
        found.append({name: each.grad.double() / LOSS_SCALES[dtype] for name, each in named})  # type: ignore[union-attr]
    return found


def layout_of(model: nn.Module, num_shards: int) -> FlatLayout:
    """As `parts/build.py` plans it."""
    named = dict(model.named_parameters())
    numel = {name: each.numel() for name, each in named.items()}
    item_bytes = next(iter(named.values())).element_size()
    buckets = plan_in_reverse(numel, item_bytes, BUCKET_CAP_MB)
    shapes = {name: tuple(each.shape) for name, each in named.items()}
    return plan_layout(shapes, [bucket.names for bucket in buckets], num_shards)


class Reduction:
    """A model of one dtype, and who averages its gradients."""

    def __init__(
        self,
        clip: ClipSection,
        dtype: str,
        wire_dtype: Any,
        info: RankInfo,
        group: ShardGroup | None,
    ) -> None:
        self.model = make_model().to(DTYPES[dtype])
        self._rank = info.rank
        self._loss_scale = torch.tensor(LOSS_SCALES[dtype])
        wire = make_wire(clip, DTYPES[dtype], wire_dtype, self._loss_scale)
        self._group = group
        if group is None:
            ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
            self._called: nn.Module = ddp
            self._clipping: Clipping = make_clipping(clip, ddp, wire, forwards=FORWARDS)
            return
        self._called = self.model
        self._layout = layout_of(self.model, group.count)
        self._buffers = FlatBuffers(
            self.model, self._layout, flat_weights(self.model, self._layout)
        )
        self._clipping = self._reducer = FlatReducer(
            self.model, self._buffers, clip, group, wire, info.world_size, FORWARDS
        )

    def update(self, scale: float) -> dict[str, Any]:
        """Reduced gradients, (first element, values in float64) of each tensor, and the outcome."""
        if self._group is not None:
            self._buffers.begin_update()
        self.model.zero_grad()
        for forward in range(FORWARDS):
            with self._clipping.forward(is_last=forward == FORWARDS - 1):
                loss = loss_of(self._called, self._rank, forward, scale)
                (loss * self._loss_scale).backward()
        outcome = self._clipping.finish()
        return {
            "gradients": self._reduced(outcome),
            "clipped_fraction": float(outcome.clipped_fraction),
            "grad_norm": float(outcome.grad_norm),
            "skip": float(outcome.skip),
        }

    def _reduced(self, outcome: ClipOutcome) -> dict[str, tuple[int, Tensor]]:
        factor = outcome.gradient_factor.double()
        if self._group is None:
            named = self.model.named_parameters()
            return {name: (0, each.grad.double().flatten() * factor) for name, each in named}  # type: ignore[union-attr]
        mine = self._reducer.shard_gradients.double() * factor
        segments = self._layout.segments(self._group.index)
        return {each.tensor.name: (each.first, mine[each.in_shard]) for each in segments}


def all_cases(info: RankInfo) -> dict[str, Any]:
    """Everything that test_flat_reducer.py looks at."""
    seen: dict[str, Any] = {}
    for dtype in DTYPES:
        buckets = layout_of(make_model().to(DTYPES[dtype]), 1).buckets
        seen[f"buckets {dtype}"] = [[each.name for each in bucket.tensors] for bucket in buckets]
        for size, scale in {**SCALES, "tiny": TINY}.items():
            seen[f"local {dtype} {size}"] = local_gradients(dtype, info.rank, scale)
    made = groups(info)
    for mode, group in made.items():
        for name, clip in CASES.items():
            reduction = Reduction(clip, "fp32", "as_gradients", info, group)
            for size, scale in SCALES.items():
                seen[f"{mode} {name} {size}"] = reduction.update(scale)
    for mode, policy, (dtype, wire) in product(("ddp", *made), POLICIES, WIRES):
        clip = ClipSection(policy=policy)  # type: ignore[arg-type]
        reduction = Reduction(clip, dtype, wire, info, made.get(mode))
        for size in ("mixed", "tiny"):
            scale = {**SCALES, "tiny": TINY}[size]
            seen[f"{mode} {policy} {dtype} {wire} {size}"] = reduction.update(scale)
    return seen


Seen = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[2, 4])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return what_ranks_saw(__file__, (), request.param, tmp_path_factory.mktemp("reducer"))


def modes(seen: Seen) -> tuple[str, ...]:
    return ("flat", "shard_world", *(["shard_node"] if len(seen) > 2 else []))


def formula_of(seen: Seen, dtype: str, size: str) -> Formula:
    local = f"local {dtype} {size}"
    names = ({"buckets": rank[f"buckets {dtype}"], f"local {size}": rank[local]} for rank in seen)
    return Formula(list(names), size)


def found_by(seen: Seen, case: str, formula: Formula) -> list[Array]:
    """The gradient that each rank has a part of: its own part, and the others' from elsewhere."""
    whole = {}
    for rank in seen:
        for name, (first, values) in rank[case]["gradients"].items():
            part = slice(first, first + len(values))
            own = whole.setdefault(name, np.full(size_of(seen, name), np.nan))
            assert np.isnan(own[part]).all() or np.array_equal(own[part], values)
            own[part] = values
    return np.concatenate([whole[name] for name in formula.names])


def size_of(seen: Seen, name: str) -> int:
    return int(seen[0]["local fp32 mixed"][0][name].numel())


@pytest.mark.parametrize("size", SCALES)
@pytest.mark.parametrize("case", CASES)
def test_each_policy_equals_its_formula(seen: Seen, case: str, size: str) -> None:
    formula = formula_of(seen, "fp32", size)
    expected = formula.gradient(case)
    assert len(formula.buckets) > 2
    for mode in modes(seen):
        found = found_by(seen, f"{mode} {case} {size}", formula)
        assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()
        for rank in seen:
            assert rank[f"{mode} {case} {size}"]["skip"] == 0


def unit(*dtypes: str) -> float:
    """Largest relative error of rounding to the coarsest of them."""
    return max(torch.finfo(DTYPES[dtype]).eps for dtype in dtypes) / 2


def assert_within_roundings(
    seen: Seen, case: str, formula: Formula, policy: str, roundings: float
) -> None:
    """Elements are off by so many units of the largest that a rank sends at most."""
    contributions = [formula.contribution(policy, rank) for rank in range(len(seen))]
    largest = max(float(np.abs(each).max()) for each in contributions)
    found = found_by(seen, case, formula)
    assert np.abs(found - formula.gradient(policy)).max() <= roundings * largest
    for rank in seen:
        assert rank[case]["skip"] == 0


@pytest.mark.parametrize(("dtype", "wire"), WIRES)
@pytest.mark.parametrize("policy", POLICIES)
def test_dtypes_of_gradients_and_wire(seen: Seen, policy: str, dtype: str, wire: str) -> None:
    formula = formula_of(seen, dtype, "mixed")
    sent_in = dtype if wire == "as_gradients" else wire
    # The sum of two forwards, what is sent, a sum for each rank, and the result are rounded.
    roundings = (3 + len(seen)) * unit(dtype, sent_in)
    of_ddp = () if policy == "bucket_before_allreduce" else ("ddp",)  # its buckets are others
    for mode in (*of_ddp, *modes(seen)):
        case = f"{mode} {policy} {dtype} {wire} mixed"
        assert_within_roundings(seen, case, formula, policy, roundings)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("policy", POLICIES)
def test_fp16_keeps_tiny_gradients(seen: Seen, policy: str, dtype: str) -> None:
    formula = formula_of(seen, dtype, "tiny")
    exact = formula.contribution(policy, 0) / len(seen)
    unscaled = exact.astype(np.float16).astype(np.float64)
    roundings = (3 + len(seen)) * unit(dtype, "fp16")
    assert np.abs(unscaled - exact).max() > 5 * roundings * np.abs(exact).max()
    of_ddp = () if policy == "bucket_before_allreduce" else ("ddp",)
    for mode in (*of_ddp, *modes(seen)):
        assert_within_roundings(
            seen, f"{mode} {policy} {dtype} fp16 tiny", formula, policy, roundings
        )


if __name__ == "__main__":
    as_rank(all_cases, Path(sys.argv[1]))
