"""Run one AdamW, LAMB or Muon update of a flat shard on a CPU, with torch and compiled kernels.

The kernels compute the same as `adamw_update`, `lamb_update` and `muon_update`, but with the bias
corrections folded into the constants. Each thread updates a range of blocks.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlperf_bert.compiled import compiled_arithmetic
from mlperf_bert.distributed.bucket_plan import BLOCK
from mlperf_bert.optim.flat_optimizer import Constants, FlatShard, StepScalars

Floats = NDArray[Any]  # in the masters' dtype
Run = tuple[slice, tuple[float, ...]]  # elements, and the values that they all share

MIN_BLOCKS_PER_THREAD = 1024  # a million elements, which take far longer than starting a thread


def adamw(shard: FlatShard, constants: Constants, scalars: StepScalars) -> None:
    """Run one step of AdamW on every element of a shard. See `Kernels.adamw`."""
    if scalars.skip.item() == 1.0:
        return
    _fused_adamw(shard, constants, scalars, list(_runs(shard, shard.weight_decay)))
    if shard.weights is not None:
        shard.weights.copy_(shard.masters)


def muon_momentum(shard: FlatShard, constants: Constants, scalars: StepScalars) -> None:
    """Update the momentum and directions of Muon's matrices. See `Kernels.muon_momentum`."""
    if scalars.skip.item() == 1.0:
        return
    assert shard.direction is not None and shard.direction_scale is not None
    factor, momentum = scalars.gradient_factor.item(), constants.momentum
    for run, (scale,) in _runs(shard, shard.direction_scale):
        if scale > 0:
            gradient = shard.gradients[run].to(shard.masters.dtype) * factor
            shard.exp_avg[run].lerp_(gradient, 1 - momentum)
            shard.direction[run].copy_(gradient.lerp_(shard.exp_avg[run], momentum))


def muon_apply(shard: FlatShard, constants: Constants, scalars: StepScalars) -> None:
    """Update master weights and model weights by one step of Muon. See `Kernels.muon_apply`."""
    if scalars.skip.item() == 1.0:
        return
    assert shard.direction is not None and shard.direction_scale is not None
    rate, by_adamw = scalars.learning_rate.item(), []
    for run, (scale, decay) in _runs(shard, shard.direction_scale, shard.weight_decay):
        if scale > 0:
            values = shard.masters[run].mul_(1 - rate * decay)
            values.add_(shard.direction[run], alpha=-rate * scale)
        else:
            by_adamw.append((run, (decay,)))
    _fused_adamw(shard, constants, scalars, by_adamw)
    if shard.weights is not None:
        shard.weights.copy_(shard.masters)


def _fused_adamw(
    shard: FlatShard, constants: Constants, scalars: StepScalars, runs: Sequence[Run]
) -> None:
    """Run one step of AdamW on ranges of blocks, each with its own weight decay."""
    factor = scalars.gradient_factor.item()
    correction_1, root_2 = scalars.correction_1.item(), math.sqrt(scalars.correction_2.item())
    # lr * (m / c1) / (sqrt(v / c2) + eps) equals the form without corrections with another lr and
    # eps. After infinitely many steps torch's corrections are 1.
    infinite_steps = torch.tensor(math.inf)
    for decay in {decay for _, (decay,) in runs}:
        chosen = [run for run, (of_run,) in runs if of_run == decay]
        gradients = [shard.gradients[run].to(shard.masters.dtype) for run in chosen]
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        torch._fused_adamw_(
            [shard.masters[run] for run in chosen],
            gradients,
            [shard.exp_avg[run] for run in chosen],
            [shard.exp_avg_sq[run] for run in chosen],
            [],
            [infinite_steps] * len(chosen),
            lr=scalars.learning_rate.item() * root_2 / correction_1,
            beta1=constants.beta_1,
            beta2=constants.beta_2,
            weight_decay=decay * correction_1 / root_2,
            eps=constants.epsilon * root_2,
            amsgrad=False,
            maximize=False,
        )


def lamb_norms(shard: FlatShard, constants: Constants, scalars: StepScalars) -> Tensor:
    """Update LAMB's moments, and sum the squares for its norms. See `Kernels.lamb_norms`."""
    num_tensors = len(shard.weight_decay)
    if scalars.skip.item() == 1.0:
        return torch.zeros((num_tensors, 2), dtype=torch.float64)
    tensors = shard.tensor_of_block.numpy()
    number = _dtype(shard).type
    squares = np.empty((2, len(tensors)))
    _run_in_threads(
        _moments_and_squares,
        len(tensors),
        _blocks(shard.masters),
        _blocks(shard.gradients.to(shard.masters.dtype)),
        _blocks(shard.exp_avg),
        _blocks(shard.exp_avg_sq),
        number(scalars.gradient_factor.item()),
        *map(number, (constants.beta_1, 1 - constants.beta_1)),
        *map(number, (constants.beta_2, 1 - constants.beta_2)),
        *_update_arguments(shard, constants, scalars),
        squares,
    )
    # Sums are added in block order, so that the number of threads does not change the result.
    sums = [np.bincount(tensors, of_blocks, num_tensors) for of_blocks in squares]
    return torch.from_numpy(np.stack(sums, axis=1))


def lamb_apply(
    shard: FlatShard, constants: Constants, scalars: StepScalars, ratios: Tensor
) -> None:
    """Update master weights and model weights by one step of LAMB. See `Kernels.lamb_apply`."""
    if scalars.skip.item() == 1.0:
        return
    tensors = shard.tensor_of_block.numpy()
    rates = scalars.learning_rate.item() * ratios.double().numpy()
    _run_in_threads(
        _apply,
        len(tensors),
        _blocks(shard.masters),
        _blocks(shard.exp_avg),
        _blocks(shard.exp_avg_sq),
        *_update_arguments(shard, constants, scalars),
        rates[tensors].astype(_dtype(shard)),
    )
    if shard.weights is not None:
        shard.weights.copy_(shard.masters)


def _runs(shard: FlatShard, *tables: Tensor) -> Iterator[Run]:
    """Yield ranges of consecutive blocks whose tensors have the same values in all tables.

    Each table has one value per tensor. Yields the slice of a range's elements, and its values.
    """
    numbers = torch.stack(tables, dim=1).numpy()[shard.tensor_of_block.numpy()]
    changes = 1 + np.flatnonzero((numbers[1:] != numbers[:-1]).any(axis=1))
    edges = [0, *changes.tolist(), len(numbers)]
    for first, last in pairwise(edges):
        yield slice(first * BLOCK, last * BLOCK), tuple(numbers[first].tolist())


def _update_arguments(
    shard: FlatShard, constants: Constants, scalars: StepScalars
) -> tuple[Any, ...]:
    """Return the arguments that both LAMB kernels need in addition to the buffers.

    These are the bias corrections, epsilon and the weight decay of each block, in the dtype of the
    master weights.
    """
    dtype = _dtype(shard)
    inverses = (1 / scalars.correction_1.item(), 1 / scalars.correction_2.item())
    decays = shard.weight_decay.numpy()[shard.tensor_of_block.numpy()]
    return (
        *map(dtype.type, (*inverses, constants.epsilon)),
        decays.astype(dtype),
    )


def _blocks(buffer: Tensor) -> Floats:
    return buffer.view(-1, BLOCK).numpy()


def _dtype(shard: FlatShard) -> np.dtype[Any]:
    return shard.masters.numpy().dtype


def _run_in_threads(kernel: Callable[..., None], num_blocks: int, *arguments: Any) -> None:
    """Run `kernel(first, last, *arguments)` in threads, on ranges that cover all blocks."""
    threads = max(1, min(torch.get_num_threads(), num_blocks // MIN_BLOCKS_PER_THREAD))
    edges = [num_blocks * thread // threads for thread in range(threads + 1)]
    if threads == 1:
        kernel(0, num_blocks, *arguments)
        return
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(kernel, *bounds, *arguments) for bounds in pairwise(edges)]
    for future in futures:
        future.result()


@compiled_arithmetic
def _moments_and_squares(
    first: int,
    last: int,
    masters: Floats,
    gradients: Floats,
    exp_avg: Floats,
    exp_avg_sq: Floats,
    factor: float,
    beta_1: float,
    rest_1: float,
    beta_2: float,
    rest_2: float,
    inverse_1: float,
    inverse_2: float,
    epsilon: float,
    decays: Floats,
    squares: Floats,
) -> None:
    for block in range(first, last):
        values, grads = masters[block], gradients[block]
        means, variances = exp_avg[block], exp_avg_sq[block]
        decay = decays[block]
        values_sum = updates_sum = 0.0
        for i in range(len(values)):
            gradient = grads[i] * factor
            mean = beta_1 * means[i] + rest_1 * gradient
            variance = beta_2 * variances[i] + rest_2 * (gradient * gradient)
            means[i] = mean
            variances[i] = variance
            update = mean * inverse_1 / (np.sqrt(variance * inverse_2) + epsilon)
            update += decay * values[i]
            values_sum += np.float64(values[i]) * np.float64(values[i])
            updates_sum += np.float64(update) * np.float64(update)
        squares[0, block] = values_sum
        squares[1, block] = updates_sum


@compiled_arithmetic
def _apply(
    first: int,
    last: int,
    masters: Floats,
    exp_avg: Floats,
    exp_avg_sq: Floats,
    inverse_1: float,
    inverse_2: float,
    epsilon: float,
    decays: Floats,
    rates: Floats,
) -> None:
    for block in range(first, last):
        values, means, variances = masters[block], exp_avg[block], exp_avg_sq[block]
        decay, rate = decays[block], rates[block]
        for i in range(len(values)):
            update = means[i] * inverse_1 / (np.sqrt(variances[i] * inverse_2) + epsilon)
            values[i] -= rate * (update + decay * values[i])
