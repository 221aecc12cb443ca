"""The optimizer state that a rank owns, and its update: common to AdamW and LAMB on flat buffers.

Where the buffers are one shard, a rank updates everything and there is nobody to ask. Where they
are more (ZeRO stage 1, arXiv 1910.02054), it holds masters and moments of its own pieces alone and
updates those. The pieces of all are brought together again a bucket at a time, those that a forward
needs first, while the next forward begins: whoever reads the model's weights otherwise calls
`settle` before.

A flat buffer holds many tensors one after the other, each beginning at a multiple of BLOCK elements
and followed by zeros up to the next. So every block of BLOCK elements belongs to one tensor, and so
does every block of a slice that is cut at a multiple of BLOCK: a kernel looks up whose it is. The
zeros stay zero under both update rules.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mlperf_bert.distributed.bucket_plan import BLOCK, FlatLayout, FlatTensor, Segment
from mlperf_bert.distributed.flat_reducer import FlatBuffers, ShardGroup

# Copies a tensor to the host; its name tells one copy from another.
Copy = Callable[[str, Tensor], Tensor]


def copy_to_host(name: str, tensor: Tensor) -> Tensor:
    """A copy of its own."""
    return tensor.to("cpu", copy=True)


@dataclass(frozen=True, slots=True)
class FlatShard:
    """n elements (a multiple of BLOCK) of all flat buffers, contiguous, on one device."""

    masters: Tensor  # [n] float32 or float64: the weights that are updated
    gradients: Tensor  # [n] of any float dtype
    weights: Tensor | None  # [n] bfloat16 or float16: receives the rounded masters; None if they do
    exp_avg: Tensor  # [n] as masters
    exp_avg_sq: Tensor  # [n] as masters
    tensor_of_block: Tensor  # [n / BLOCK] int32: which tensor a block belongs to
    weight_decay: Tensor  # [tensors] float64, of the whole model
    adapted: Tensor  # [tensors] bool: whether LAMB scales the tensor's update

    def part(self, start: int, stop: int) -> "FlatShard":
        """The elements `start` to `stop`, both multiples of BLOCK, as views."""
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
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """An optimizer's constants, the same for all tensors and steps."""

    beta_1: float
    beta_2: float
    epsilon: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepScalars:
    """What changes from step to step: 0-d tensors on the shard's device, never read by the host
    where that is a GPU.
    """

    learning_rate: Tensor  # float64
    correction_1: Tensor  # float64: 1 - beta_1 ** t, of the t-th update from 1
    correction_2: Tensor  # float64: 1 - beta_2 ** t
    gradient_factor: Tensor  # float32: multiplies every gradient first (clip, loss scale)
    skip: Tensor  # float32: where it is 1.0, nothing is written


class LossScale:
    """The factor that lifts fp16 gradients above what fp16 rounds to zero, adjusted while training.

    Halved where a gradient overflowed and the step was skipped, doubled after so many steps without
    (Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, section 3.2). It lives in
    tensors on the device; the host reads none of them.

    Args:
        initial: factor of the first step.
        growth_steps: updates in a row after which it doubles; None where it is 1 for ever, as for
            precisions with the range of float32.
    """

    def __init__(
        self, device: torch.device, initial: float = 1.0, growth_steps: int | None = None
    ) -> None:
        self.scale = torch.full((), initial, dtype=torch.float32, device=device)
        self._since_change = torch.zeros((), dtype=torch.int32, device=device)
        self._growth_steps = growth_steps

    def of(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss if self._growth_steps is None else loss * self.scale

    def update(self, skip: Tensor) -> None:
        """After a step; `skip` (0-d float32) is 1.0 where it was skipped."""
        if self._growth_steps is not None:
            torch._amp_update_scale_(
                self.scale, self._since_change, skip, 2.0, 0.5, self._growth_steps
            )

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors themselves; none where the loss is not scaled."""
        if self._growth_steps is None:
            return {}
        return {"loss_scale": self.scale, "steps_since_loss_scale_changed": self._since_change}


class Kernels(Protocol):
    """Updates of a shard, in place: cpu_kernels.py or triton_kernels.py.

    Where `scalars.skip` is 1.0, nothing is written. Gradients may come back multiplied by
    `scalars.gradient_factor`.
    """

    def adamw(self, shard: FlatShard, constants: Constants, scalars: StepScalars) -> None:
        """One step of `adamw_update` on every element."""

    def lamb_norms(self, shard: FlatShard, constants: Constants, scalars: StepScalars) -> Tensor:
        """The first half of `lamb_update`: new moments, and what the norms are made of.

        Returns:
            [tensors, 2] float64: over this shard's elements of each tensor, the sums of masters**2
            and of update**2; zero where `scalars.skip` is 1.0.
        """

    def lamb_apply(
        self, shard: FlatShard, constants: Constants, scalars: StepScalars, ratios: Tensor
    ) -> None:
        """The second half, from the moments of the first: new masters and weights.

        `ratios` [tensors] float32 or float64 are what each tensor's update is multiplied by.
        """


class FlatOptimizer:
    """What both have in common; a rule is a subclass with `update`.

    Args:
        buffers: the model's.
        initial: [layout.numel], the weights before they were rounded to the buffers' dtype; the
            buffers' own where nothing was.
        gradients: [layout.shard_numel], where this shard's reduced gradients arrive.
        others: who holds the other shards.
        kernels: for the device of the weights.
    """

    def __init__(
        self,
        buffers: FlatBuffers,
        initial: Tensor,
        gradients: Tensor,
        others: ShardGroup,
        loss_scale: LossScale,
        constants: Constants,
        weight_decay: float,
        kernels: Kernels,
    ) -> None:
        self.loss_scale = loss_scale
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
        """One update; the host waits for nothing, and weights of other shards may still travel.

        Args:
            learning_rate: 0-d float64.
            gradient_factor: 0-d float32, multiplies every gradient first.
            skip: 0-d float32; where it is 1.0, weights, moments and count stay as they are.
        """
        self.settle()  # where the model did not use all of its weights
        self._buffers.collect()
        self._updates += 1 - skip
        number = self._updates.clamp(min=1)  # 0 where the first step is skipped
        self.update(
            StepScalars(
                learning_rate=learning_rate,
                correction_1=1 - self.constants.beta_1**number,
                correction_2=1 - self.constants.beta_2**number,
                gradient_factor=gradient_factor,
                skip=skip,
            )
        )
        self.loss_scale.update(skip)

    def correction_2(self) -> Tensor:
        """1 - beta_2^t after the t updates made so far, 0-d float64: 0 before the first."""
        return 1 - self.constants.beta_2**self._updates

    def reduced(self) -> FlatShard:
        """Its shard before a `step`, the reduced gradients in place."""
        self._buffers.collect()
        return self.shard

    def whole(self, own: Tensor) -> Tensor:
        """All shards' parts [layout.shard_numel] of a buffer as one [layout.numel].

        `own` itself where there is one shard. Every rank must call it at the same time.
        """
        layout = self._buffers.layout
        if layout.num_shards == 1:
            return own
        self.settle()
        whole = own.new_empty(layout.numel)
        for number, bucket in enumerate(layout.buckets):
            piece = own[layout.piece_in_shard(bucket)]
            self.others.publish(number, whole[bucket.start : bucket.stop], piece)
        self.settle()
        return whole

    def settle(self) -> None:
        """Return when all weights are in the model (on a GPU: for work queued from here on)."""
        self.others.wait()

    @property
    def layout(self) -> FlatLayout:
        """Where tensors lie in whole buffers."""
        return self._buffers.layout

    @property
    def num_shards(self) -> int:
        """In how many parts the state is cut."""
        return self._buffers.layout.num_shards

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every parameter, by name."""
        return {tensor.name: tensor.shape for tensor in self._buffers.layout.tensors}

    def segments(self) -> Iterator[Segment]:
        """The parts of parameters that this rank's shard holds, and where."""
        return self._buffers.layout.segments(self.others.index)

    def flat_state(self) -> dict[str, Tensor]:
        """This rank's shard of the moments, live: [shard_numel] each."""
        return {"exp_avg": self.shard.exp_avg, "exp_avg_sq": self.shard.exp_avg_sq}

    def scalar_state(self) -> dict[str, Tensor]:
        """What there is once for all weights, live, 0-d each, the same on every rank."""
        return {"updates": self._updates, **self.loss_scale.state_dict()}

    def changed_by_step(self) -> dict[str, Tensor]:
        """All tensors of this rank that a step changes beside the model's own weights, live."""
        # A skipped step publishes rounded weights again: they must not be another step's.
        rounded = {} if self.shard.weights is None else {"weights": self.shard.weights}
        moments_and_scalars = {**self.flat_state(), **self.scalar_state()}
        return {"masters": self.shard.masters, **rounded, **moments_and_scalars}

    def exact_weights(self, *, keep: bool = True, copy: Copy = copy_to_host) -> dict[str, Tensor]:
        """Every parameter before it was rounded to the model's dtype, on the CPU.

        Every rank must call it at the same time; one that does not `keep` them only helps. `copy`
        is given a bucket at a time, and the parameters are views of what it returns.
        """
        self.settle()
        exact = {}
        for number, part, whole, _ in self.parts:
            gathered = part.masters
            if part.masters.numel() < whole.numel():
                gathered = torch.empty_like(whole, dtype=part.masters.dtype)
                self.others.publish(number, gathered, part.masters)
                self.settle()
            if not keep:
                continue
            kept, tensors = copy(f"masters {number}", gathered), self._tensors_of(number)
            for tensor in tensors:
                first = tensor.start - tensors[0].start
                exact[tensor.name] = kept[first : first + tensor.numel].view(tensor.shape)
        return exact

    def set_weights(self, exact: Mapping[str, Tensor]) -> None:
        """Take over weights of every parameter; the model's are rounded from them.

        Every rank must call it at the same time.
        """
        self.settle()
        for segment in self.segments():
            values = exact[segment.tensor.name].reshape(-1)
            self.shard.masters[segment.in_shard].copy_(values[segment.first : segment.last])
        for number, part, whole, piece in self.parts:
            if part.weights is not None:
                part.weights.copy_(part.masters)
            self.others.publish(number, whole, piece)
        self.settle()

    def update(self, scalars: StepScalars) -> None:
        """Update and publish the shard: what a subclass is for."""
        raise NotImplementedError

    def _cut(self, layout: FlatLayout) -> Iterator[tuple[int, FlatShard, Tensor, Tensor]]:
        """What to update at a time, with the whole buffer's and this shard's slice of weights.

        Buckets by their number, those that a forward needs first, first.
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
    """Whether the parameter of this dotted name takes no decay: a bias, or part of a LayerNorm."""
    return name.endswith("bias") or "LayerNorm" in name
