"""One AdamW, LAMB or Muon update of a flat shard on a CPU: torch's kernels, and compiled loops.

The mathematics is that of `adamw_update`, `lamb_update` and `muon_update`; here the constants
include the bias corrections, and a thread takes a range of blocks.
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
Run = tuple[slice, tuple[float, ...]]  # elements, and what holds for all of them

BLOCKS_OF_A_THREAD = 1024  # a thread's least: a million elements take far longer than its start


def adamw(shard: FlatShard, constants: Constants, scalars: StepScalars) -> None:
    """See `Kernels`."""
    if scalars.skip.item() == 1.0:
        return
    _fused_adamw(shard, constants, scalars, list(_runs(shard, shard.weight_decay)))
    if shard.weights is not None:
        shard.weights.copy_(shard.masters)


def muon_momentum(shard: FlatShard, constants: Constants, scalars: StepScalars) -> None:
    """See `Kernels`."""
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
    """See `Kernels`."""
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
    """AdamW of runs of blocks, each with its weight decay."""
    factor = scalars.gradient_factor.item()
    correction_1, root_2 = scalars.correction_1.item(), math.sqrt(scalars.correction_2.item())
    # lr * (m / c1) / (sqrt(v / c2) + eps) equals the form without corrections with another lr and
    # eps, and torch drops the corrections after infinitely many steps.
    forever = torch.tensor(math.inf)
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
            [forever] * len(chosen),
            lr=scalars.learning_rate.item() * root_2 / correction_1,
            beta1=constants.beta_1,
            beta2=constants.beta_2,
            weight_decay=decay * correction_1 / root_2,
            eps=constants.epsilon * root_2,
            amsgrad=False,
            maximize=False,
        )


def lamb_norms(shard: FlatShard, constants: Constants, scalars: StepScalars) -> Tensor:
    """See `Kernels`."""
    num_tensors = len(shard.weight_decay)
    if scalars.skip.item() == 1.0:
        return torch.zeros((num_tensors, 2), dtype=torch.float64)
    tensors = shard.tensor_of_block.numpy()
    number = _dtype(shard).type
    squares = np.empty((2, len(tensors)))
    _in_threads(
        _moments_and_squares,
        len(tensors),
        _blocks(shard.masters),
        _blocks(shard.gradients.to(shard.masters.dtype)),
        _blocks(shard.exp_avg),
        _blocks(shard.exp_avg_sq),
        number(scalars.gradient_factor.item()),
        *map(number, (constants.beta_1, 1 - constants.beta_1)),
        *map(number, (constants.beta_2, 1 - constants.beta_2)),
        *_of_update(shard, constants, scalars),
        squares,
    )
    # In block order, whichever thread computed them.
    sums = [np.bincount(tensors, of_blocks, num_tensors) for of_blocks in squares]
    return torch.from_numpy(np.stack(sums, axis=1))


def lamb_apply(
    shard: FlatShard, constants: Constants, scalars: StepScalars, ratios: Tensor
) -> None:
    """See `Kernels`."""
    if scalars.skip.item() == 1.0:
        return
    tensors = shard.tensor_of_block.numpy()
    rates = scalars.learning_rate.item() * ratios.double().numpy()
    _in_threads(
        _apply,
        len(tensors),
        _blocks(shard.masters),
        _blocks(shard.exp_avg),
        _blocks(shard.exp_avg_sq),
        *_of_update(shard, constants, scalars),
        rates[tensors].astype(_dtype(shard)),
    )
    if shard.weights is not None:
        shard.weights.copy_(shard.masters)


def _runs(shard: FlatShard, *tables: Tensor) -> Iterator[Run]:
    """Runs of blocks with the same numbers in the tables [tensors], and the numbers."""
    numbers = torch.stack(tables, dim=1).numpy()[shard.tensor_of_block.numpy()]
    changes = 1 + np.flatnonzero((numbers[1:] != numbers[:-1]).any(axis=1))
    edges = [0, *changes.tolist(), len(numbers)]
    for first, last in pairwise(edges):
        yield slice(first * BLOCK, last * BLOCK), tuple(numbers[first].tolist())


def _of_update(shard: FlatShard, constants: Constants, scalars: StepScalars) -> tuple[Any, ...]:
    """The update's arguments beside moments and masters, in their dtype; decays by block."""
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


def _in_threads(kernel: Callable[..., None], num_blocks: int, *arguments: Any) -> None:
    """Run `kernel(first, last, *arguments)` on ranges that together cover all blocks."""
    threads = max(1, min(torch.get_num_threads(), num_blocks // BLOCKS_OF_A_THREAD))
    edges = [num_blocks * thread // threads for thread in range(threads + 1)]
    if threads == 1:
        kernel(0, num_blocks, *arguments)
        return
    with ThreadPoolExecutor(threads) as pool:
        ranges = [pool.submit(kernel, *both, *arguments) for both in pairwise(edges)]
    for each in ranges:
        each.result()


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
        of_values = of_updates = 0.0
        for i in range(len(values)):
            gradient = grads[i] * factor
            mean = beta_1 * means[i] + rest_1 * gradient
            variance = beta_2 * variances[i] + rest_2 * (gradient * gradient)
            means[i] = mean
            variances[i] = variance
            update = mean * inverse_1 / (np.sqrt(variance * inverse_2) + epsilon)
            update += decay * values[i]
            of_values += np.float64(values[i]) * np.float64(values[i])
            of_updates += np.float64(update) * np.float64(update)
        squares[0, block] = of_values
        squares[1, block] = of_updates


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
