"""Store and update a rank's optimizer state on flat buffers, for all update rules.

If the optimizer state is not sharded, each rank updates all weights without communication. If it is
sharded (ZeRO stage 1, arXiv 1910.02054), a rank stores and updates only the master weights and
moments of its own shard. The updated weights are then gathered from all shards, one bucket at a
time, while the next forward pass starts. The buckets are sorted in the order in which the forward
pass needs them. All other code that reads the model's weights must call `wait_for_weights` first.

A flat buffer contains many tensors one after the other. Each tensor starts at a multiple of BLOCK
elements and is padded with zeros up to the next multiple. Every block of BLOCK elements therefore
belongs to exactly one tensor, and a kernel can look up this tensor. Slices that are cut at
multiples of BLOCK have the same property. All update rules keep the zeros of the padding.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mlperf_bert.distributed.bucket_plan import BLOCK, FlatLayout, FlatTensor, Segment
from mlperf_bert.distributed.flat_reducer import FlatBuffers, ShardGroup

# Copies a tensor to the host. The name distinguishes it from other copies.
Copy = Callable[[str, Tensor], Tensor]


def copy_to_host(name: str, tensor: Tensor) -> Tensor:
    """Return a copy of `tensor` on the host. `name` is not used."""
    return tensor.to("cpu", copy=True)


@dataclass(frozen=True, slots=True)
class FlatShard:
    """A shard, which consists of the same n contiguous elements of all flat buffers.

    All tensors are on one device, and n is a multiple of BLOCK.
    """

    masters: Tensor  # [n] float32 or float64: the unrounded weights
    gradients: Tensor  # [n] of any float dtype
    weights: Tensor | None  # [n] bfloat16: rounded masters, or None without rounding
    exp_avg: Tensor  # [n], same dtype as masters
    exp_avg_sq: Tensor  # [n], same dtype as masters
    tensor_of_block: Tensor  # [n / BLOCK] int32: number of each block's tensor
    weight_decay: Tensor  # [tensors] float64, for all tensors of the model
    adapted: Tensor  # [tensors] bool: whether LAMB scales the tensor's update
    # Only Muon uses these:
    direction: Tensor | None = None  # [n]: matrices' Nesterov momentum, later orthogonalized
    direction_scale: Tensor | None = None  # [tensors] float64: scale of `direction`, 0 for AdamW

    def part(self, start: int, stop: int) -> "FlatShard":
        """Return the elements from `start` up to, but not including, `stop`, as views.

        Both bounds must be multiples of BLOCK.
        """
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


MUON_MOMENTUM = 0.95  # momentum of Muon's matrices (arXiv 2502.16982)


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """The constants of an optimizer, which are the same for all tensors and steps."""

    beta_1: float
    beta_2: float
    epsilon: float
    momentum: float = MUON_MOMENTUM


@dataclass(frozen=True, kw_only=True, slots=True)
class StepScalars:
    """Scalars that change with each step, as 0-d tensors on the shard's device.

    Kernels can read them there without synchronizing the host with the device.
    """

    learning_rate: Tensor  # float64
    correction_1: Tensor  # float64: 1 - beta_1 ** t in update number t, from 1
    correction_2: Tensor  # float64: 1 - beta_2 ** t
    gradient_factor: Tensor  # float32: clips gradients, which are multiplied by it first
    skip: Tensor  # float32: if 1.0, nothing is written


class Kernels(Protocol):
    """Kernels that update a shard in place, implemented in cpu_kernels.py and triton_kernels.py.

    If `scalars.skip` is 1.0, kernels do not change the shard. A kernel may leave the gradients
    multiplied by `scalars.gradient_factor`.
    """

    def adamw(self, shard: FlatShard, constants: Constants, scalars: StepScalars) -> None:
        """Run one step of `adamw_update` on every element."""

    def lamb_norms(self, shard: FlatShard, constants: Constants, scalars: StepScalars) -> Tensor:
        """Run the first half of `lamb_update`, which updates moments and sums squares for norms.

        Returns:
            [tensors, 2] float64: the sums of masters**2 and update**2 over this shard's elements of
            each tensor, or zeros if `scalars.skip` is 1.0.
        """

    def lamb_apply(
        self, shard: FlatShard, constants: Constants, scalars: StepScalars, ratios: Tensor
    ) -> None:
        """Run the second half of `lamb_update`, which updates master weights and model weights.

        `ratios` contains the trust ratio of each tensor, float32 or float64 [tensors].
        """

    def muon_momentum(self, shard: FlatShard, constants: Constants, scalars: StepScalars) -> None:
        """Run the first half of `muon_update`, which updates the momentum and directions."""

    def muon_apply(self, shard: FlatShard, constants: Constants, scalars: StepScalars) -> None:
        """Apply the orthogonalized directions to matrices, and `adamw_update` to other tensors."""


class FlatOptimizer:
    """Base class of all optimizers. A subclass implements the update rule in `update`.

    Args:
        buffers: the model's flat buffers.
        initial: [layout.numel], the weights before they were rounded to the buffers' dtype. If they
            were not rounded, these are the buffers' own weights.
        gradients: [layout.shard_numel], the memory that receives the reduced gradients of this
            shard.
        others: process group of the ranks that own the other shards.
        constants: constants of the update rule.
        weight_decay: weight decay of all tensors except those for which `is_exempt` returns true.
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
        """Set all gradients to zero before the first backward pass of an update."""
        self._buffers.begin_update()

    @torch.no_grad()
    def step(self, learning_rate: Tensor, gradient_factor: Tensor, skip: Tensor) -> None:
        """Run one update. On a GPU, the host does not wait until the update has finished.

        When this method returns, this rank may not have received the weights of other shards yet.
        See `wait_for_weights`.

        Args:
            learning_rate: 0-d float64 tensor.
            gradient_factor: 0-d float32 tensor by which every gradient is multiplied first.
            skip: 0-d float32 tensor. If it is 1.0, weights, moments and the count of updates do not
                change.
        """
        self.wait_for_weights()  # needed if the model did not use all of its weights
        self._buffers.collect()
        self._updates += 1 - skip
        number = self._updates.clamp(min=1)  # avoids a correction of 0 if step 1 is skipped
        self.update(
            StepScalars(
                learning_rate=learning_rate,
                correction_1=1 - self.constants.beta_1**number,
                correction_2=1 - self.constants.beta_2**number,
                gradient_factor=gradient_factor,
                skip=skip,
            )
        )

    def wait_for_weights(self) -> None:
        """Wait until the model contains the updated weights of all shards.

        On a GPU, the host does not wait, but work queued later on the current stream does.
        """
        self.others.wait()

    @property
    def layout(self) -> FlatLayout:
        """Layout of the parameters in the whole flat buffers."""
        return self._buffers.layout

    @property
    def num_shards(self) -> int:
        """Number of shards of the optimizer state."""
        return self._buffers.layout.num_shards

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter, by name."""
        return {tensor.name: tensor.shape for tensor in self._buffers.layout.tensors}

    def segments(self) -> Iterator[Segment]:
        """Yield the parts of parameters that are in this rank's shard, with their positions."""
        return self._buffers.layout.segments(self.others.index)

    def flat_state(self) -> dict[str, Tensor]:
        """Return the moments of this rank's shard by name, each [shard_numel], without a copy."""
        return {"exp_avg": self.shard.exp_avg, "exp_avg_sq": self.shard.exp_avg_sq}

    def scalar_state(self) -> dict[str, Tensor]:
        """Return the optimizer's scalars, which all weights share, by name.

        The scalars are 0-d tensors, are equal on all ranks, and are not copied.
        """
        return {"updates": self._updates}

    def changed_by_step(self) -> dict[str, Tensor]:
        """Return all tensors of this rank that a step changes, except the weights in the model."""
        # The rounded weights are included because a skipped step publishes them again.
        rounded = {} if self.shard.weights is None else {"weights": self.shard.weights}
        moments_and_scalars = {**self.flat_state(), **self.scalar_state()}
        return {"masters": self.shard.masters, **rounded, **moments_and_scalars}

    def exact_weights(self, *, keep: bool = True, copy: Copy = copy_to_host) -> dict[str, Tensor]:
        """Gather all parameters on the CPU, without rounding them to the model's dtype.

        All ranks must call this collective method. If `keep` is false, a rank only takes part in
        the communication. The method calls `copy` with one bucket at a time. The returned
        parameters are views of the results of these calls.
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
            copied, tensors = copy(f"masters {number}", gathered), self._tensors_of(number)
            for tensor in tensors:
                first = tensor.start - tensors[0].start
                exact[tensor.name] = copied[first : first + tensor.numel].view(tensor.shape)
        return exact

    def set_weights(self, exact: Mapping[str, Tensor]) -> None:
        """Set all parameters to the weights in `exact`, rounded to the model's dtype.

        The optimizer keeps the exact weights. All ranks must call this collective method.
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
        """Update the shard and send its new weights to all ranks. Subclasses implement this."""
        raise NotImplementedError

    def _cut(self, layout: FlatLayout) -> Iterator[tuple[int, FlatShard, Tensor, Tensor]]:
        """Yield the buckets to update, in the order in which the next forward pass needs them.

        Each element is a tuple of the bucket's number, this rank's part of the bucket, the bucket's
        weights in the whole buffer, and this rank's part of the new weights, which the other ranks
        receive.
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
        masters = torch.cat([initial[layout.piece(bucket, index)] for bucket in layout.buckets])
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
    """Return True if a parameter is exempt from weight decay.

    Biases and the parameters of normalization modules are exempt. `name` is the dotted name of the
    parameter. Normalization modules have names like LayerNorm or `mlp_norm`.
    """
    return name.endswith("bias") or "norm" in name.lower()
