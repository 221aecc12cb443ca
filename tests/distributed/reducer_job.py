"""What test_flat_reducer.py runs on N ranks at once: `reducer_job.py OUTPUT`.

Every rank writes OUTPUT/rank_<n>.pt: gradients of a small model, its own and reduced, by the flat
reducer and by DDP's hook, in several dtypes.
"""

import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
from clip_job import BUCKET_CAP_MB, CASES, FORWARDS, POLICIES, SCALES, make_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mlperf_bert.config.sections import ClipSection
from mlperf_bert.distributed.bucket_plan import FlatLayout, plan_in_reverse, plan_layout
from mlperf_bert.distributed.clipping import DTYPES, ClipOutcome, Clipping, make_clipping, make_wire
from mlperf_bert.distributed.flat_reducer import FlatBuffers, FlatReducer, ShardGroup, flat_weights
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import in_session

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
    """clip_job's, of a model in any dtype."""
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


def main(output: Path) -> int:
    """Do everything one after the other, in one process group."""

    def work(info: RankInfo, device: torch.device) -> int:
        torch.save(all_cases(info), output / f"rank_{info.rank}.pt")
        return 0

    return in_session(work, "cpu", "refuse")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
