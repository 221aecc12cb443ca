"""Sum of three embeddings, LayerNorm and dropout on a GPU: one Triton kernel forward, one backward.

Backward gathers the rows again and computes their sum; nothing of size [T, D] is kept.

Shape letters: T tokens, D hidden, K token types.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlperf_bert.model.triton_norm import norm_gradient, statistics_of
from mlperf_bert.model.triton_parts import (
    channels_of,
    computed_in,
    drop,
    empty_sums,
    kernel,
    load_channels,
    num_groups,
    num_programs,
    num_warps,
    store_channels,
    sum_programs,
)

Three = tuple[Tensor, Tensor, Tensor]  # of words, token types and positions


def embedding_norm(
    ids: Three,
    tables: Three,
    weight: Tensor,
    norm_bias: Tensor,
    epsilon: float,
    keep: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """dropout(LayerNorm(sum of three rows)) of T tokens, and the LayerNorm's statistics.

    Args:
        ids: int64 [T] each.
        tables: [any, D] each, contiguous, of one dtype.
        weight: [D], of the LayerNorm.
        norm_bias: [D].
        epsilon: added to the variance.
        keep: uint8 [T, ceil(D / 8)], see `keep_bits`; None drops nothing.
        scale: of what is kept.

    Returns:
        [T, D] in the dtype of the tables, and [2, T] mean and one over the standard deviation.
    """
    rows, size = len(ids[0]), tables[0].shape[1]
    groups = num_groups(size)
    output = tables[0].new_empty((rows, size))
    statistics = empty_sums(output, 2, rows)
    _embedding_forward[(rows,)](
        *ids,
        *tables,
        weight,
        norm_bias,
        ids[0] if keep is None else keep,
        output,
        statistics,
        rows,
        size,
        epsilon,
        scale,
        keep is not None,
        computed_in(output),
        groups,
        num_warps=num_warps(groups),
    )
    return output, statistics


def embedding_norm_backward(
    gradient: Tensor,
    ids: Three,
    tables: Three,
    weight: Tensor,
    statistics: Tensor,
    keep: Tensor | None,
    scale: float,
) -> tuple[Three, tuple[Tensor, ...]]:
    """Gradients of `embedding_norm`, whose arguments and statistics these are.

    All sums have a fixed order, and nothing waits for the device. Those of words and positions are
    torch's, by sorting; the few types, on each of which falls a large share of the tokens, are
    summed with the LayerNorm's parameters.

    Args:
        gradient: [T, D], contiguous, of the output.
        ids: as above.
        tables: as above.
        weight: as above.
        statistics: what `embedding_norm` returned.
        keep: as above.
        scale: as above.

    Returns:
        Those of the tables; those of weight and norm_bias [D].
    """
    words, types, positions = tables
    rows, size, num_types = len(ids[0]), words.shape[1], len(types)
    groups, programs = num_groups(size), num_programs(rows)
    of_sum = torch.empty_like(gradient)
    partials = empty_sums(gradient, programs, 2 + num_types, size)
    _embedding_backward[(programs,)](
        gradient,
        *ids,
        *tables,
        weight,
        statistics,
        ids[0] if keep is None else keep,
        of_sum,
        partials,
        rows,
        size,
        scale,
        keep is not None,
        num_types,
        triton.next_power_of_2(num_types),
        computed_in(words),
        groups,
        num_warps=num_warps(groups),
    )
    dtypes = (weight.dtype, weight.dtype, *[types.dtype] * num_types)
    of_weight, of_norm_bias, *of_types = sum_programs(partials, dtypes)
    of_words, of_positions = (
        torch.ops.aten.embedding_dense_backward(of_sum, index, len(table), -1, False)
        for index, table in ((ids[0], words), (ids[2], positions))
    )
    return (of_words, torch.stack(of_types), of_positions), (of_weight, of_norm_bias)


@kernel
def _embedding_forward(
    word_ids: tl.tensor,
    type_ids: tl.tensor,
    position_ids: tl.tensor,
    words: tl.tensor,
    types: tl.tensor,
    positions: tl.tensor,
    weight: tl.tensor,
    norm_bias: tl.tensor,
    keep: tl.tensor,
    output: tl.tensor,
    statistics: tl.tensor,
    rows: tl.tensor,
    size: tl.constexpr,
    epsilon: tl.constexpr,
    scale: tl.constexpr,
    has_keep: tl.constexpr,
    dtype: tl.constexpr,
    groups: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    channels = channels_of(groups)
    total = load_channels(words + tl.load(word_ids + row) * size, channels, size, dtype)
    total += load_channels(types + tl.load(type_ids + row) * size, channels, size, dtype)
    total += load_channels(positions + tl.load(position_ids + row) * size, channels, size, dtype)
    mean, inverse_deviation = statistics_of(total, channels, size, epsilon)
    tl.store(statistics + row, mean)
    tl.store(statistics + rows + row, inverse_deviation)
    normalised = (total - mean) * inverse_deviation * load_channels(weight, channels, size, dtype)
    normalised += load_channels(norm_bias, channels, size, dtype)
    if has_keep:
        normalised = drop(normalised, keep, row, size, scale, groups)
    store_channels(output + row * size, channels, normalised, size)


@kernel
def _embedding_backward(
    gradient: tl.tensor,
    word_ids: tl.tensor,
    type_ids: tl.tensor,
    position_ids: tl.tensor,
    words: tl.tensor,
    types: tl.tensor,
    positions: tl.tensor,
    weight: tl.tensor,
    statistics: tl.tensor,
    keep: tl.tensor,
    of_sum: tl.tensor,
    partials: tl.tensor,
    rows: tl.tensor,
    size: tl.constexpr,
    scale: tl.constexpr,
    has_keep: tl.constexpr,
    num_types: tl.constexpr,
    padded_types: tl.constexpr,
    dtype: tl.constexpr,
    groups: tl.constexpr,
) -> None:
    channels = channels_of(groups)
    weights = load_channels(weight, channels, size, dtype)
    of_weight = tl.zeros((groups, 8), dtype)
    of_norm_bias = tl.zeros((groups, 8), dtype)
    of_types = tl.zeros((padded_types, groups, 8), dtype)
    kinds = tl.arange(0, padded_types)[:, None, None]
    row = tl.program_id(0).to(tl.int64)
    while row < rows:
        kind = tl.load(type_ids + row)
        total = load_channels(words + tl.load(word_ids + row) * size, channels, size, dtype)
        total += load_channels(types + kind * size, channels, size, dtype)
        position = tl.load(position_ids + row)
        total += load_channels(positions + position * size, channels, size, dtype)
        given = load_channels(gradient + row * size, channels, size, dtype)
        if has_keep:
            given = drop(given, keep, row, size, scale, groups)
        normalised, of_total = norm_gradient(
            given, total, weights, statistics, row, rows, channels, size
        )
        store_channels(of_sum + row * size, channels, of_total, size)
        of_weight += given * normalised
        of_norm_bias += given
        of_types += tl.where(kinds == kind, of_total[None, :, :], 0.0)
        row += tl.num_programs(0)
    own = partials + tl.program_id(0) * (2 + num_types) * size
    store_channels(own, channels, of_weight, size)
    store_channels(own + size, channels, of_norm_bias, size)
    at = own + (2 + kinds) * size + channels[None, :, :]
    is_there = (kinds < num_types) & (channels < size)[None, :, :]
    tl.store(at, of_types, mask=is_there)
