"""Run one AdamW, LAMB or Muon update of a flat shard on a GPU, with one Triton program per block.

The kernels compute the same as `adamw_update`, `lamb_update` and `muon_update`. A step with these
kernels can be captured, because they read scalars on the device and all results have fixed shapes.
No result depends on the order in which programs run.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlperf_bert.distributed.bucket_plan import BLOCK
from mlperf_bert.optim.flat_optimizer import Constants, FlatShard, StepScalars


def _kernel(function: Callable[..., None]) -> Any:
    return triton.jit(function)


def adamw(shard: FlatShard, constants: Constants, scalars: StepScalars) -> None:
    """Run one step of AdamW on every element of a shard. See `Kernels.adamw`."""
    _adamw[(len(shard.tensor_of_block),)](
        *(_state(shard, shard.gradients), _of_blocks(shard), _on_device(scalars)),
        *(constants.beta_1, constants.beta_2, constants.epsilon, BLOCK),
    )


def muon_momentum(shard: FlatShard, constants: Constants, scalars: StepScalars) -> None:
    """Update the momentum and directions of Muon's matrices. See `Kernels.muon_momentum`."""
    _muon_momentum[(len(shard.tensor_of_block),)](
        *(shard.masters, shard.gradients, shard.exp_avg, shard.direction),
        *(shard.tensor_of_block, shard.direction_scale, scalars.gradient_factor, scalars.skip),
        *(constants.momentum, BLOCK),
    )


def muon_apply(shard: FlatShard, constants: Constants, scalars: StepScalars) -> None:
    """Update master weights and model weights by one step of Muon. See `Kernels.muon_apply`."""
    _muon_apply[(len(shard.tensor_of_block),)](
        *(_state(shard, shard.gradients), _of_blocks(shard), _on_device(scalars)),
        *((shard.direction, shard.direction_scale), constants.beta_1, constants.beta_2),
        *(constants.epsilon, BLOCK),
    )


def lamb_norms(shard: FlatShard, constants: Constants, scalars: StepScalars) -> Tensor:
    """Update LAMB's moments, and sum the squares for its norms. See `Kernels.lamb_norms`."""
    num_blocks, num_tensors = len(shard.tensor_of_block), len(shard.weight_decay)
    device = shard.masters.device
    # Each tensor's first block in this shard, and the block after its last. Both are 0 if the shard
    # has no block of the tensor.
    spans = torch.zeros((num_tensors, 2), dtype=torch.int32, device=device)
    squares_of_blocks = shard.masters.new_empty((num_blocks, 2))
    squares = torch.empty((num_tensors, 2), dtype=torch.float64, device=device)
    _moments_and_squares[(num_blocks,)](
        *(_state(shard, shard.gradients), _of_blocks(shard), _on_device(scalars)),
        *((spans, squares_of_blocks), constants.beta_1, constants.beta_2, constants.epsilon, BLOCK),
    )
    _sum_squares[(num_tensors,)](spans, squares_of_blocks, squares, BLOCK)
    return squares


def lamb_apply(
    shard: FlatShard, constants: Constants, scalars: StepScalars, ratios: Tensor
) -> None:
    """Update master weights and model weights by one step of LAMB. See `Kernels.lamb_apply`."""
    _apply[(len(shard.tensor_of_block),)](
        *(_state(shard, ratios), _of_blocks(shard), _on_device(scalars), constants.epsilon, BLOCK)
    )


def _state(shard: FlatShard, other: Tensor) -> tuple[Tensor | None, ...]:
    return shard.masters, shard.weights, shard.exp_avg, shard.exp_avg_sq, other


def _of_blocks(shard: FlatShard) -> tuple[Tensor, Tensor]:
    return shard.tensor_of_block, shard.weight_decay


def _on_device(scalars: StepScalars) -> tuple[Tensor, ...]:
    corrections = scalars.correction_1, scalars.correction_2
    return scalars.learning_rate, *corrections, scalars.gradient_factor, scalars.skip


@_kernel
def _adamw(
    state: tl.tuple,
    of_blocks: tl.tuple,
    scalars: tl.tuple,
    beta_1: tl.constexpr,
    beta_2: tl.constexpr,
    epsilon: tl.constexpr,
    block: tl.constexpr,
) -> None:
    masters, weights, exp_avg, exp_avg_sq, gradients = state
    tensor_of_block, weight_decay = of_blocks
    learning_rate, correction_1, correction_2, gradient_factor, skip = scalars
    if tl.load(skip) != 1.0:
        number = tl.program_id(0).to(tl.int64)
        at = number * block + tl.arange(0, block)
        values = tl.load(masters + at)
        mean, variance = _moments(
            gradients, exp_avg, exp_avg_sq, gradient_factor, at, values.dtype, beta_1, beta_2
        )
        tl.store(exp_avg + at, mean)
        tl.store(exp_avg_sq + at, variance)
        rate = tl.load(learning_rate)
        decay = tl.load(weight_decay + tl.load(tensor_of_block + number))
        update = _bias_corrected(mean, variance, correction_1, correction_2, epsilon)
        values = values * (1 - rate * decay).to(values.dtype) - rate.to(values.dtype) * update
        tl.store(masters + at, values)
        if weights is not None:
            tl.store(weights + at, values.to(weights.dtype.element_ty))


@_kernel
def _muon_momentum(
    masters: tl.tensor,
    gradients: tl.tensor,
    exp_avg: tl.tensor,
    direction: tl.tensor,
    tensor_of_block: tl.tensor,
    direction_scale: tl.tensor,
    gradient_factor: tl.tensor,
    skip: tl.tensor,
    momentum: tl.constexpr,
    block: tl.constexpr,
) -> None:
    number = tl.program_id(0).to(tl.int64)
    is_matrix = tl.load(direction_scale + tl.load(tensor_of_block + number)) > 0
    if is_matrix & (tl.load(skip) != 1.0):
        at = number * block + tl.arange(0, block)
        dtype = masters.dtype.element_ty
        gradient = tl.load(gradients + at).to(dtype) * tl.load(gradient_factor).to(dtype)
        mean = momentum * tl.load(exp_avg + at) + (1 - momentum) * gradient
        tl.store(exp_avg + at, mean)
        ahead = momentum * mean + (1 - momentum) * gradient
        tl.store(direction + at, ahead.to(direction.dtype.element_ty))


@_kernel
def _muon_apply(
    state: tl.tuple,
    of_blocks: tl.tuple,
    scalars: tl.tuple,
    directions: tl.tuple,
    beta_1: tl.constexpr,
    beta_2: tl.constexpr,
    epsilon: tl.constexpr,
    block: tl.constexpr,
) -> None:
    masters, weights, exp_avg, exp_avg_sq, gradients = state
    tensor_of_block, weight_decay = of_blocks
    learning_rate, correction_1, correction_2, gradient_factor, skip = scalars
    direction, direction_scale = directions
    if tl.load(skip) != 1.0:
        number = tl.program_id(0).to(tl.int64)
        at = number * block + tl.arange(0, block)
        values = tl.load(masters + at)
        tensor = tl.load(tensor_of_block + number)
        scale, rate = tl.load(direction_scale + tensor), tl.load(learning_rate)
        if scale > 0:
            update = scale.to(values.dtype) * tl.load(direction + at).to(values.dtype)
        else:
            mean, variance = _moments(
                gradients, exp_avg, exp_avg_sq, gradient_factor, at, values.dtype, beta_1, beta_2
            )
            tl.store(exp_avg + at, mean)
            tl.store(exp_avg_sq + at, variance)
            update = _bias_corrected(mean, variance, correction_1, correction_2, epsilon)
        decay = tl.load(weight_decay + tensor)
        values = values * (1 - rate * decay).to(values.dtype) - rate.to(values.dtype) * update
        tl.store(masters + at, values)
        if weights is not None:
            tl.store(weights + at, values.to(weights.dtype.element_ty))


@_kernel
def _moments_and_squares(
    state: tl.tuple,
    of_blocks: tl.tuple,
    scalars: tl.tuple,
    squares_of_tensors: tl.tuple,
    beta_1: tl.constexpr,
    beta_2: tl.constexpr,
    epsilon: tl.constexpr,
    block: tl.constexpr,
) -> None:
    masters, _, exp_avg, exp_avg_sq, gradients = state
    tensor_of_block, weight_decay = of_blocks
    _, correction_1, correction_2, gradient_factor, skip = scalars
    spans, squares = squares_of_tensors
    if tl.load(skip) != 1.0:
        number = tl.program_id(0).to(tl.int64)
        at = number * block + tl.arange(0, block)
        values = tl.load(masters + at)
        mean, variance = _moments(
            gradients, exp_avg, exp_avg_sq, gradient_factor, at, values.dtype, beta_1, beta_2
        )
        tl.store(exp_avg + at, mean)
        tl.store(exp_avg_sq + at, variance)
        tensor = tl.load(tensor_of_block + number)
        update = _bias_corrected(mean, variance, correction_1, correction_2, epsilon)
        update += tl.load(weight_decay + tensor).to(values.dtype) * values
        tl.store(squares + 2 * number, tl.sum(values * values))
        tl.store(squares + 2 * number + 1, tl.sum(update * update))
        # Only the first and the last block of a tensor write, each to its own element.
        last = tl.num_programs(0) - 1
        before = tl.load(tensor_of_block + number - 1, mask=number > 0, other=-1)
        after = tl.load(tensor_of_block + number + 1, mask=number < last, other=-1)
        tl.store(spans + 2 * tensor, number.to(tl.int32), mask=before != tensor)
        tl.store(spans + 2 * tensor + 1, number.to(tl.int32) + 1, mask=after != tensor)


@_kernel
def _sum_squares(
    spans: tl.tensor, squares: tl.tensor, sums: tl.tensor, block: tl.constexpr
) -> None:
    tensor = tl.program_id(0)
    first, stop = tl.load(spans + 2 * tensor), tl.load(spans + 2 * tensor + 1)
    of_values = tl.zeros((block,), tl.float64)
    of_updates = tl.zeros((block,), tl.float64)
    # `range` is not used, because Triton's older interpreters reject these bounds with numpy 2.4.
    while first < stop:
        at = first + tl.arange(0, block)
        of_values += tl.load(squares + 2 * at, mask=at < stop, other=0.0).to(tl.float64)
        of_updates += tl.load(squares + 2 * at + 1, mask=at < stop, other=0.0).to(tl.float64)
        first += block
    tl.store(sums + 2 * tensor, tl.sum(of_values))
    tl.store(sums + 2 * tensor + 1, tl.sum(of_updates))


@_kernel
def _apply(
    state: tl.tuple,
    of_blocks: tl.tuple,
    scalars: tl.tuple,
    epsilon: tl.constexpr,
    block: tl.constexpr,
) -> None:
    masters, weights, exp_avg, exp_avg_sq, ratios = state
    tensor_of_block, weight_decay = of_blocks
    learning_rate, correction_1, correction_2, _, skip = scalars
    if tl.load(skip) != 1.0:
        number = tl.program_id(0).to(tl.int64)
        at = number * block + tl.arange(0, block)
        values = tl.load(masters + at)
        tensor = tl.load(tensor_of_block + number)
        mean, variance = tl.load(exp_avg + at), tl.load(exp_avg_sq + at)
        update = _bias_corrected(mean, variance, correction_1, correction_2, epsilon)
        update += tl.load(weight_decay + tensor).to(values.dtype) * values
        rate = tl.load(learning_rate) * tl.load(ratios + tensor)
        values -= rate.to(values.dtype) * update
        tl.store(masters + at, values)
        if weights is not None:
            tl.store(weights + at, values.to(weights.dtype.element_ty))


@_kernel
def _moments(
    gradients: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    gradient_factor: tl.tensor,
    at: tl.tensor,
    dtype: tl.constexpr,
    beta_1: tl.constexpr,
    beta_2: tl.constexpr,
) -> Any:
    gradient = tl.load(gradients + at).to(dtype) * tl.load(gradient_factor).to(dtype)
    mean = beta_1 * tl.load(exp_avg + at) + (1 - beta_1) * gradient
    variance = beta_2 * tl.load(exp_avg_sq + at) + (1 - beta_2) * gradient * gradient
    return mean, variance


@_kernel
def _bias_corrected(
    mean: tl.tensor,
    variance: tl.tensor,
    correction_1: tl.tensor,
    correction_2: tl.tensor,
    epsilon: tl.constexpr,
) -> Any:
    # The inverse is computed in float64, because a correction is small in the first steps.
    inverse_1 = (1 / tl.load(correction_1)).to(mean.dtype)
    inverse_2 = (1 / tl.load(correction_2)).to(mean.dtype)
    return mean * inverse_1 / (tl.sqrt(variance * inverse_2) + epsilon)
