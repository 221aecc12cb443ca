"""A rank's optimizer state and its update on flat buffers, common to all rules.

With one shard, a rank updates everything without communication. With several (ZeRO stage 1, arXiv
1910.02054), it holds masters and moments of its own pieces only and updates those. The pieces are
gathered one bucket at a time while the next forward pass begins, in the order that it needs them.
Any other reader of the model's weights must call `wait_for_weights` first.

A flat buffer holds many tensors one after the other, each starting at a multiple of BLOCK elements
and followed by zeros up to the next. So every block of BLOCK elements belongs to one tensor, also
in slices cut at multiples of BLOCK, and a kernel looks up which. The zeros stay zero under all
update rules.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mlperf_bert.distributed.bucket_plan import BLOCK, FlatLayout, FlatTensor, Segment
from mlperf_bert.distributed.flat_reducer import FlatBuffers, ShardGroup

# Copies a tensor to the host, under a name that tells it from other copies.
Copy = Callable[[str, Tensor], Tensor]


def copy_to_host(name: str, tensor: Tensor) -> Tensor:
    """A new copy of `tensor` on the host."""
    return tensor.to("cpu", copy=True)


@dataclass(frozen=True, slots=True)
class FlatShard:
    """n elements (a multiple of BLOCK) of all flat buffers, contiguous, on one device."""

    masters: Tensor  # [n] float32 or float64: the weights to update
    gradients: Tensor  # [n] of any float dtype
    weights: Tensor | None  # [n] bfloat16: the rounded masters; None if not rounded
    exp_avg: Tensor  # [n] as masters
    exp_avg_sq: Tensor  # [n] as masters
    tensor_of_block: Tensor  # [n / BLOCK] int32: the tensor of each block
    weight_decay: Tensor  # [tensors] float64, of the whole model
    adapted: Tensor  # [tensors] bool: whether LAMB scales the tensor's update
    # Of Muon alone:
    direction: Tensor | None = None  # [n]: matrices' Nesterov momentum, then its orthogonal form
    direction_scale: Tensor | None = None  # [tensors] float64: its factor; 0: AdamW updates it

    def part(self, start: int, stop: int) -> "FlatShard":
        """Views of the elements `start` to `stop`, both multiples of BLOCK."""
        elements, blocks = slice(start, stop), slice(start // BLOCK, stop // BLOCK)
        return FlatShard(
            masters=self.masters[elements],
            gradients=self.gradients[elements],
            weights=None if self.weights is None else self.weights[elements],
            exp_avg=self.exp_avg[elements],
            exp_avg_sq=self.exp_avg_sq[elements],
            tensor_of_block=self.tensor_of_block[blocks],
            weight_decay=self.weight_decay,
            adapted=self.adapted,
            direction=None if self.direction is None else self.direction[elements],
            direction_scale=self.direction_scale,
        )


MUON_MOMENTUM = 0.95  # of its matrices (arXiv 2502.16982)


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """An optimizer's constants, the same for all tensors and steps."""

    beta_1: float
    beta_2: float
    epsilon: float
    momentum: float = MUON_MOMENTUM


@dataclass(frozen=True, kw_only=True, slots=True)
class StepScalars:
    """Scalars that change each step: 0-d tensors on the shard's device; no host sync reads them."""

    learning_rate: Tensor  # float64
    correction_1: Tensor  # float64: 1 - beta_1 ** t, of the t-th update from 1
    correction_2: Tensor  # float64: 1 - beta_2 ** t
    gradient_factor: Tensor  # float32: multiplies every gradient first, to clip it
    skip: Tensor  # float32: if 1.0, nothing is written


class Kernels(Protocol):
    """Updates of a shard, in place: cpu_kernels.py or triton_kernels.py.

    If `scalars.skip` is 1.0, nothing is written. A kernel may leave gradients multiplied by
    `scalars.gradient_factor`.
    """

    def adamw(self, shard: FlatShard, constants: Constants, scalars: StepScalars) -> None:
        """One step of `adamw_update` on every element."""

    def lamb_norms(self, shard: FlatShard, constants: Constants, scalars: StepScalars) -> Tensor:
        """The first half of `lamb_update`: new moments, and the squared sums for the norms.

        Returns:
            [tensors, 2] float64: over this shard's elements of each tensor, the sums of masters**2
            and of update**2; zero if `scalars.skip` is 1.0.
        """

    def lamb_apply(
        self, shard: FlatShard, constants: Constants, scalars: StepScalars, ratios: Tensor
    ) -> None:
        """The second half of `lamb_update`, from the first's moments: new masters and weights.

        `ratios` [tensors], float32 or float64, are the factors of the tensors' updates.
        """

    def muon_momentum(self, shard: FlatShard, constants: Constants, scalars: StepScalars) -> None:
        """The first half of `muon_update`: new momentum of the matrices, and their directions."""

    def muon_apply(self, shard: FlatShard, constants: Constants, scalars: StepScalars) -> None:
        """The second half, from orthogonalised directions; `adamw_update` of all else."""


class FlatOptimizer:
    """The common base of the optimizers; an update rule is a subclass with `update`.

    Args:
        buffers: the model's flat buffers.
        initial: [layout.numel], the weights before rounding to the buffers' dtype; the buffers' own
            if nothing was rounded.
        gradients: [layout.shard_numel], receives this shard's reduced gradients.
        others: the group of ranks that hold the other shards.
        kernels: update kernels for the device of the weights.
    """

    def __init__(
        self,
        buffers: FlatBuffers,
        initial: Tensor,
        gradients: Tensor,
        others: ShardGroup,
        constants: Constants,
        weight_decay: float,
        kernels: Kernels,
    ) -> None:
        self._buffers = buffers
        self.others = others
        self.constants = constants
        self.weight_decay = weight_decay
        self._updates = torch.zeros((), dtype=torch.float64, device=initial.device)
        self.shard = _make_shard(buffers, initial, gradients, others.index, weight_decay)
        self.kernels = kernels
        self.parts = list(self._cut(buffers.layout))

    def zero_grad(self) -> None:
        """Begin an update."""
        self._buffers.begin_update()

    @torch.no_grad()
    def step(self, learning_rate: Tensor, gradient_factor: Tensor, skip: Tensor) -> None:
        """Make one update; the host does not wait, and other shards' weights may still travel.

        Args:
            learning_rate: 0-d float64.
            gradient_factor: 0-d float32, multiplies every gradient first.
            skip: 0-d float32; if 1.0, weights, moments and count do not change.
        """
        self.wait_for_weights()  # needed if the model did not use all of its weights
        self._buffers.collect()
        self._updates += 1 - skip
        number = self._updates.clamp(min=1)  # 0 if the first step is skipped
        self.update(
            StepScalars(
                learning_rate=learning_rate,
                correction_1=1 - self.constants.beta_1**number,
                correction_2=1 - self.constants.beta_2**number,
                gradient_factor=gradient_factor,
                skip=skip,
            )
        )

    def reduced(self) -> FlatShard:
        """This rank's shard with the reduced gradients, before a `step`."""
        self._buffers.collect()
        return self.shard

    def wait_for_weights(self) -> None:
        """Return when all weights are in the model (on a GPU: for work queued from here on)."""
        self.others.wait()

    @property
    def layout(self) -> FlatLayout:
        """The places of tensors in whole buffers."""
        return self._buffers.layout

    @property
    def num_shards(self) -> int:
        """Number of shards of the state."""
        return self._buffers.layout.num_shards

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all parameters, by name."""
        return {tensor.name: tensor.shape for tensor in self._buffers.layout.tensors}

    def segments(self) -> Iterator[Segment]:
        """The parts of parameters that this rank's shard holds, with their places."""
        return self._buffers.layout.segments(self.others.index)

    def flat_state(self) -> dict[str, Tensor]:
        """This rank's shard of the moments, live: [shard_numel] each."""
        return {"exp_avg": self.shard.exp_avg, "exp_avg_sq": self.shard.exp_avg_sq}

    def scalar_state(self) -> dict[str, Tensor]:
        """Live state that all weights share: 0-d tensors, the same on every rank."""
        return {"updates": self._updates}

    def changed_by_step(self) -> dict[str, Tensor]:
        """Live tensors of this rank that a step changes beside the model's own weights."""
        # A skipped step publishes the rounded weights again, so they must be this step's.
        rounded = {} if self.shard.weights is None else {"weights": self.shard.weights}
        moments_and_scalars = {**self.flat_state(), **self.scalar_state()}
        return {"masters": self.shard.masters, **rounded, **moments_and_scalars}

    def exact_weights(self, *, keep: bool = True, copy: Copy = copy_to_host) -> dict[str, Tensor]:
        """Every parameter before it was rounded to the model's dtype, on the CPU.

        Every rank must call it at the same time; with `keep` false it only takes part. `copy`
        receives one bucket at a time, and the parameters are views of its results.
        """
        self.wait_for_weights()
        exact = {}
        for number, part, whole, _ in self.parts:
            gathered = part.masters
            if part.masters.numel() < whole.numel():
                gathered = torch.empty_like(whole, dtype=part.masters.dtype)
                self.others.publish(number, gathered, part.masters)
                self.wait_for_weights()
            if not keep:
                continue
            kept, tensors = copy(f"masters {number}", gathered), self._tensors_of(number)
            for tensor in tensors:
                first = tensor.start - tensors[0].start
                exact[tensor.name] = kept[first : first + tensor.numel].view(tensor.shape)
        return exact

    def set_weights(self, exact: Mapping[str, Tensor]) -> None:
        """Set the exact weights of every parameter, and the model's rounded ones from them.

        Every rank must call it at the same time.
        """
        self.wait_for_weights()
        for segment in self.segments():
            values = exact[segment.tensor.name].reshape(-1)
            self.shard.masters[segment.in_shard].copy_(values[segment.first : segment.last])
        for number, part, whole, piece in self.parts:
            if part.weights is not None:
                part.weights.copy_(part.masters)
            self.others.publish(number, whole, piece)
        self.wait_for_weights()

    def update(self, scalars: StepScalars) -> None:
        """Update and publish the shard; each subclass implements it."""
        raise NotImplementedError

    def _cut(self, layout: FlatLayout) -> Iterator[tuple[int, FlatShard, Tensor, Tensor]]:
        """Buckets to update in turn, with the whole buffer's and this shard's slices of weights.

        Buckets come by number, in the order that a micro-batch needs them.
        """
        if layout.num_shards == 1:
            yield 0, self.shard, self._buffers.weights, self._buffers.weights
            return
        for number, bucket in reversed(list(enumerate(layout.buckets))):
            own = layout.piece_in_shard(bucket)
            part = self.shard.part(own.start, own.stop)
            sent = part.masters if part.weights is None else part.weights
            yield number, part, self._buffers.weights[bucket.start : bucket.stop], sent

    def _tensors_of(self, number: int) -> tuple[FlatTensor, ...]:
        layout = self._buffers.layout
        return layout.tensors if layout.num_shards == 1 else layout.buckets[number].tensors


def _make_shard(
    buffers: FlatBuffers, initial: Tensor, gradients: Tensor, index: int, weight_decay: float
) -> FlatShard:
    layout, device = buffers.layout, initial.device
    exempt = torch.tensor([is_exempt(tensor.name) for tensor in layout.tensors], device=device)
    is_rounded = buffers.weights.dtype != initial.dtype
    if layout.num_shards == 1:
        masters = initial
        weights = buffers.weights if is_rounded else None
    else:
        masters = torch.cat([initial[layout.piece(each, index)] for each in layout.buckets])
        weights = masters.to(buffers.weights.dtype) if is_rounded else None
    return FlatShard(
        masters=masters,
        gradients=gradients,
        weights=weights,
        exp_avg=torch.zeros_like(masters),
        exp_avg_sq=torch.zeros_like(masters),
        tensor_of_block=torch.from_numpy(layout.tensor_of_block(index)).to(device),
        weight_decay=(~exempt).double() * weight_decay,
        adapted=~exempt,
    )


def is_exempt(name: str) -> bool:
    """True if the parameter of this dotted name has no decay: a bias or part of a LayerNorm.

    Modules that normalise are called LayerNorm, or like `mlp_norm`.
    """
    return name.endswith("bias") or "norm" in name.lower()
