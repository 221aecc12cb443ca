"""Sums with a LayerNorm on a GPU, each with one Triton kernel forward and one backward.

`residual_norm` is bias, dropout, residual sum and LayerNorm; `embedding_norm` is the sum of three
embeddings, LayerNorm and dropout. Backward recomputes the sum under the LayerNorm from its parts.
Saving it would move as many bytes (one write and one read, instead of one more read of product and
residual) and round it to 16 bits; the memory is the same too, because the product is kept in its
place. Statistics are float32, or float64 for float64.

`sum_norm` is the same before a block instead of behind one (pre-norm), without biases: its sum is a
result too, so backward reads that, and the product is not kept. `embedding_norm` has a form for
one table without biases.

Shape letters: R rows, T tokens, D hidden.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlperf_bert.model.fp8_cast import Target
from mlperf_bert.model.triton_fp8 import to_fp8, writing_rows
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

# One each for words, token types and positions; the latter two may be missing.
Three = tuple[Tensor, Tensor | None, Tensor | None]


def residual_norm(
    product: Tensor,
    bias: Tensor,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor,
    epsilon: float,
    keep: Tensor | None,
    scale: float,
    target: Target | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """LayerNorm(dropout(product + bias) + residual) and its statistics.

    Args:
        product: [R, D], contiguous.
        bias: [D], added to the product.
        residual: [R, D], contiguous.
        weight: [D], the LayerNorm's.
        norm_bias: [D], the LayerNorm's.
        epsilon: added to the variance.
        keep: uint8 [R, ceil(D / 8)], see `keep_bits`; None drops nothing.
        scale: factor of kept elements.
        target: target of an additional FP8 result, if wanted.

    Returns:
        [R, D] in the dtype that product and residual promote to; [2, R] mean and one over the
        standard deviation; and the result in FP8 [R, D] if there is a target.
    """
    rows, size = product.shape
    groups = num_groups(size)
    output = torch.empty_like(product, dtype=torch.promote_types(product.dtype, residual.dtype))
    statistics = empty_sums(product, 2, rows)
    output8 = None if target is None else torch.empty_like(product, dtype=target.dtype)
    _norm_forward[(rows,)](
        (product, bias, residual, weight, norm_bias, keep),
        (output, statistics, None),
        *writing_rows(output8, target),
        *(rows, size, epsilon, scale, computed_in(product, residual), groups),
        num_warps=num_warps(groups),
    )
    return output, statistics, output8


def residual_norm_backward(
    gradients: Sequence[Tensor],
    product: Tensor,
    bias: Tensor,
    residual: Tensor,
    weight: Tensor,
    statistics: Tensor,
    keep: Tensor | None,
    scale: float,
    target: Target | None = None,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Gradients of `residual_norm`, given its arguments and statistics.

    `gradients` are one or two [R, D], contiguous; their sum is the output's gradient.

    Returns:
        Gradients of product and residual [R, D]: one tensor if nothing is dropped and their dtypes
        are the same; the product's in FP8 only if there is a target. Then those of bias, weight and
        norm_bias [D].
    """
    given, other = gradients[0], gradients[1] if len(gradients) > 1 else None
    dtypes = (bias.dtype, weight.dtype, weight.dtype)
    return _backward(
        (given, other, None, product, bias, residual, weight, statistics, keep),
        *(product.dtype, dtypes, scale, target),
    )


def sum_norm(
    product: Tensor,
    residual: Tensor,
    weight: Tensor,
    epsilon: float,
    keep: Tensor | None,
    scale: float,
    target: Target | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """residual + dropout(product), the LayerNorm of that without bias, and its statistics.

    Arguments are those of `residual_norm`. The LayerNorm is that of the rounded sum.

    Returns:
        Sum and LayerNorm [R, D] in the residual's dtype; [2, R] mean and one over the standard
        deviation; and the LayerNorm in FP8 [R, D] if there is a target.
    """
    rows, size = product.shape
    groups = num_groups(size)
    total, output = torch.empty_like(residual), torch.empty_like(residual)
    statistics = empty_sums(residual, 2, rows)
    output8 = None if target is None else torch.empty_like(product, dtype=target.dtype)
    _norm_forward[(rows,)](
        (product, None, residual, weight, None, keep),
        (output, statistics, total),
        *writing_rows(output8, target),
        *(rows, size, epsilon, scale, computed_in(product, residual), groups),
        num_warps=num_warps(groups),
    )
    return total, output, statistics, output8


def sum_norm_backward(
    gradients: tuple[Tensor | None, Tensor],
    total: Tensor,
    weight: Tensor,
    statistics: Tensor,
    keep: Tensor | None,
    scale: float,
    product_dtype: torch.dtype,
    target: Target | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `sum_norm`, given its sum `total`, arguments and statistics.

    `gradients` are those of the sum (None: zero) and of the LayerNorm, [R, D], contiguous.

    Returns:
        Gradients of product and residual as from `residual_norm_backward`, and of weight [D].
    """
    of_total, of_output = gradients
    of_product, of_residual, (of_weight,) = _backward(
        (of_output, None, of_total, None, None, total, weight, statistics, keep),
        *(product_dtype, (weight.dtype,), scale, target),
    )
    return of_product, of_residual, of_weight


def _backward(
    inputs: tuple[Tensor | None, ...],
    product_dtype: torch.dtype,
    dtypes: tuple[torch.dtype, ...],
    scale: float,
    target: Target | None,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Launch `_norm_backward` with these inputs; `dtypes` are those of its sums over rows."""
    residual, statistics, keep = inputs[5], inputs[7], inputs[8]
    assert residual is not None and statistics is not None
    rows, size = residual.shape
    groups, programs = num_groups(size), num_programs(rows)
    of_residual = torch.empty_like(residual)
    # Without dropout both are equal, and one is written.
    is_same = target is None and keep is None and product_dtype == residual.dtype
    dtype = product_dtype if target is None else target.dtype
    of_product = of_residual if is_same else torch.empty_like(residual, dtype=dtype)
    partials = empty_sums(statistics, programs, len(dtypes), size)
    _norm_backward[(programs,)](
        inputs,
        (None if is_same or target is not None else of_product, of_residual, partials),
        *writing_rows(of_product, target),
        *(rows, size, scale, computed_in(statistics), groups),
        num_warps=num_warps(groups),
    )
    return of_product, of_residual, sum_programs(partials, dtypes)


def embedding_norm(
    ids: Three,
    tables: Three,
    weight: Tensor,
    norm_bias: Tensor | None,
    epsilon: float,
    keep: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """dropout(LayerNorm(sum of three rows)) of T tokens, and the LayerNorm's statistics.

    Token types, positions and `norm_bias` are there together, or none of them.

    Args:
        ids: int64 [T] each.
        tables: [any, D] each, contiguous, of one dtype.
        weight: this and all that follow as for `residual_norm`; `keep` is uint8 [T, ceil(D / 8)].

    Returns:
        [T, D] in the dtype of the tables, and [2, T] mean and one over the standard deviation.
    """
    rows, size = len(ids[0]), tables[0].shape[1]
    groups = num_groups(size)
    output = tables[0].new_empty((rows, size))
    statistics = empty_sums(output, 2, rows)
    _embedding_forward[(rows,)](
        *(ids, tables, (weight, norm_bias, keep), (output, statistics)),
        *(rows, size, epsilon, scale, computed_in(output), groups),
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
    """Gradients of `embedding_norm`, given its arguments and statistics.

    All sums have a fixed order, and nothing waits for the device. torch sums those of words and
    positions, by sorting. The few token types, each with a large share of the tokens, are summed
    with the LayerNorm's parameters.

    The output's `gradient` [T, D] is contiguous. Returns the tables' gradients, and those of weight
    and norm_bias [D]: None for tables that are missing, and no norm_bias then.
    """
    words, types, positions = tables
    rows, size, num_types = len(ids[0]), words.shape[1], 0 if types is None else len(types)
    dtypes = [weight.dtype] if types is None else [weight.dtype] * 2 + [types.dtype] * num_types
    groups, programs = num_groups(size), num_programs(rows)
    of_sum = torch.empty_like(gradient)
    partials = empty_sums(gradient, programs, len(dtypes), size)
    _embedding_backward[(programs,)](
        *(ids, tables, (gradient, weight, statistics, keep), (of_sum, partials)),
        *(rows, size, scale, num_types, triton.next_power_of_2(max(num_types, 1))),
        *(computed_in(words), groups),
        num_warps=num_warps(groups),
    )
    sums = sum_programs(partials, tuple(dtypes))
    dense_backward = torch.ops.aten.embedding_dense_backward
    of_words = dense_backward(of_sum, ids[0], len(words), -1, False)
    if positions is None:
        return (of_words, None, None), sums
    of_positions = dense_backward(of_sum, ids[2], len(positions), -1, False)
    return (of_words, torch.stack(sums[2:]), of_positions), sums[:2]


@kernel
def _norm_forward(
    inputs: tl.tuple,
    outputs: tl.tuple,
    fp8: tl.tuple,
    limit: tl.constexpr,
    rows: tl.tensor,
    size: tl.constexpr,
    epsilon: tl.constexpr,
    scale: tl.constexpr,
    dtype: tl.constexpr,
    groups: tl.constexpr,
) -> None:
    product, bias, residual, weight, norm_bias, keep = inputs
    output, statistics, sums = outputs
    output8, unit, maximum = fp8
    row = tl.program_id(0).to(tl.int64)
    channels = channels_of(groups)
    biases = None if bias is None else load_channels(bias, channels, size, dtype)
    total = _sum_of_row(product, biases, residual, keep, row, channels, size, scale, dtype, groups)
    if sums is not None:
        total = total.to(sums.dtype.element_ty)
        store_channels(sums + row * size, channels, total, size)
        total = total.to(dtype)
    normalised = _normalise(
        total, statistics, weight, norm_bias, row, rows, channels, size, epsilon, dtype
    )
    store_channels(output + row * size, channels, normalised, size)
    if output8 is not None:  # FP8 of the rounded values
        rounded = normalised.to(output.dtype.element_ty).to(tl.float32)
        written = to_fp8(rounded, output8, unit, maximum, limit, True)
        store_channels(output8 + row * size, channels, written, size)


@kernel
def _norm_backward(
    inputs: tl.tuple,
    outputs: tl.tuple,
    fp8: tl.tuple,
    limit: tl.constexpr,
    rows: tl.tensor,
    size: tl.constexpr,
    scale: tl.constexpr,
    dtype: tl.constexpr,
    groups: tl.constexpr,
) -> None:
    gradient, other_gradient, of_sum, product, bias, residual, weight, statistics, keep = inputs
    of_product, of_residual, partials = outputs
    of_product8, unit, maximum = fp8
    channels = channels_of(groups)
    biases = None if bias is None else load_channels(bias, channels, size, dtype)
    weights = load_channels(weight, channels, size, dtype)
    of_bias = tl.zeros((groups, 8), dtype)
    of_weight = tl.zeros((groups, 8), dtype)
    of_norm_bias = tl.zeros((groups, 8), dtype)
    row = tl.program_id(0).to(tl.int64)
    while row < rows:
        total = _sum_of_row(
            product, biases, residual, keep, row, channels, size, scale, dtype, groups
        )
        given = load_channels(gradient + row * size, channels, size, dtype)
        if other_gradient is not None:
            given += load_channels(other_gradient + row * size, channels, size, dtype)
        normalised, of_total = _norm_gradient(
            given, total, weights, statistics, row, rows, channels, size
        )
        if of_sum is not None:
            of_total += load_channels(of_sum + row * size, channels, size, dtype)
        store_channels(of_residual + row * size, channels, of_total, size)
        of_weight += given * normalised
        of_norm_bias += given
        if keep is not None:
            of_total = drop(of_total, keep, row, size, scale, groups)
        if of_product8 is not None:
            written = to_fp8(of_total, of_product8, unit, maximum, limit, False)
            store_channels(of_product8 + row * size, channels, written, size)
        if of_product is not None:
            store_channels(of_product + row * size, channels, of_total, size)
        of_bias += of_total
        row += tl.num_programs(0)
    if bias is None:
        store_channels(partials + tl.program_id(0) * size, channels, of_weight, size)
    else:
        own = partials + tl.program_id(0) * 3 * size
        store_channels(own, channels, of_bias, size)
        store_channels(own + size, channels, of_weight, size)
        store_channels(own + 2 * size, channels, of_norm_bias, size)


@kernel
def _embedding_forward(
    ids: tl.tuple,
    tables: tl.tuple,
    others: tl.tuple,
    outputs: tl.tuple,
    rows: tl.tensor,
    size: tl.constexpr,
    epsilon: tl.constexpr,
    scale: tl.constexpr,
    dtype: tl.constexpr,
    groups: tl.constexpr,
) -> None:
    weight, norm_bias, keep = others
    output, statistics = outputs
    row = tl.program_id(0).to(tl.int64)
    channels = channels_of(groups)
    total, _ = _sum_of_embeddings(ids, tables, row, channels, size, dtype)
    normalised = _normalise(
        total, statistics, weight, norm_bias, row, rows, channels, size, epsilon, dtype
    )
    if keep is not None:
        normalised = drop(normalised, keep, row, size, scale, groups)
    store_channels(output + row * size, channels, normalised, size)


@kernel
def _embedding_backward(
    ids: tl.tuple,
    tables: tl.tuple,
    inputs: tl.tuple,
    outputs: tl.tuple,
    rows: tl.tensor,
    size: tl.constexpr,
    scale: tl.constexpr,
    num_types: tl.constexpr,
    padded_types: tl.constexpr,
    dtype: tl.constexpr,
    groups: tl.constexpr,
) -> None:
    gradient, weight, statistics, keep = inputs
    of_sum, partials = outputs
    channels = channels_of(groups)
    weights = load_channels(weight, channels, size, dtype)
    of_weight = tl.zeros((groups, 8), dtype)
    of_norm_bias = tl.zeros((groups, 8), dtype)
    of_types = tl.zeros((padded_types, groups, 8), dtype)
    kinds = tl.arange(0, padded_types)[:, None, None]
    row = tl.program_id(0).to(tl.int64)
    while row < rows:
        total, kind = _sum_of_embeddings(ids, tables, row, channels, size, dtype)
        given = load_channels(gradient + row * size, channels, size, dtype)
        if keep is not None:
            given = drop(given, keep, row, size, scale, groups)
        normalised, of_total = _norm_gradient(
            given, total, weights, statistics, row, rows, channels, size
        )
        store_channels(of_sum + row * size, channels, of_total, size)
        of_weight += given * normalised
        of_norm_bias += given
        if num_types > 0:
            of_types += tl.where(kinds == kind, of_total[None, :, :], 0.0)
        row += tl.num_programs(0)
    if num_types == 0:
        store_channels(partials + tl.program_id(0) * size, channels, of_weight, size)
    else:
        own = partials + tl.program_id(0) * (2 + num_types) * size
        store_channels(own, channels, of_weight, size)
        store_channels(own + size, channels, of_norm_bias, size)
        at = own + (2 + kinds) * size + channels[None, :, :]
        is_there = (kinds < num_types) & (channels < size)[None, :, :]
        tl.store(at, of_types, mask=is_there)


@kernel
def _sum_of_row(
    product: tl.tensor,
    biases: tl.tensor,
    residual: tl.tensor,
    keep: tl.tensor,
    row: tl.tensor,
    channels: tl.tensor,
    size: tl.constexpr,
    scale: tl.constexpr,
    dtype: tl.constexpr,
    groups: tl.constexpr,
) -> Any:
    """Residual and, where they are given, product and biases with dropout."""
    if product is None:
        total = load_channels(residual + row * size, channels, size, dtype)
    else:
        values = load_channels(product + row * size, channels, size, dtype)
        if biases is not None:
            values += biases
        if keep is not None:
            values = drop(values, keep, row, size, scale, groups)
        total = values + load_channels(residual + row * size, channels, size, dtype)
    return total


@kernel
def _sum_of_embeddings(
    ids: tl.tuple,
    tables: tl.tuple,
    row: tl.tensor,
    channels: tl.tensor,
    size: tl.constexpr,
    dtype: tl.constexpr,
) -> Any:
    """Sum of a token's embeddings, and its token type (0 without types)."""
    words, types, positions = tables
    if types is None:
        kind = row * 0
        total = load_channels(words + tl.load(ids[0] + row) * size, channels, size, dtype)
    else:
        kind = tl.load(ids[1] + row)
        total = load_channels(words + tl.load(ids[0] + row) * size, channels, size, dtype)
        total += load_channels(types + kind * size, channels, size, dtype)
        total += load_channels(positions + tl.load(ids[2] + row) * size, channels, size, dtype)
    return total, kind


@kernel
def _normalise(
    values: tl.tensor,
    statistics: tl.tensor,
    weight: tl.tensor,
    norm_bias: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    size: tl.constexpr,
    epsilon: tl.constexpr,
    dtype: tl.constexpr,
) -> Any:
    """LayerNorm of a row, zero past its end; writes its mean and one over its deviation.

    `norm_bias` may be None.
    """
    mean = tl.sum(values) / size
    centered = tl.where(channels < size, values - mean, 0.0)
    variance = tl.sum(centered * centered) / size
    inverse_deviation = 1 / tl.sqrt(variance + epsilon)
    tl.store(statistics + row, mean)
    tl.store(statistics + rows + row, inverse_deviation)
    normalised = (values - mean) * inverse_deviation * load_channels(weight, channels, size, dtype)
    if norm_bias is not None:
        normalised += load_channels(norm_bias, channels, size, dtype)
    return normalised


@kernel
def _norm_gradient(
    given: tl.tensor,
    values: tl.tensor,
    weights: tl.tensor,
    statistics: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    size: tl.constexpr,
) -> Any:
    """A row's normalised values, and their gradient given that of the LayerNorm."""
    mean, inverse_deviation = tl.load(statistics + row), tl.load(statistics + rows + row)
    normalised = tl.where(channels < size, (values - mean) * inverse_deviation, 0.0)
    scaled = given * weights
    along_ones = tl.sum(scaled) / size
    along_normalised = tl.sum(scaled * normalised) / size
    return normalised, (scaled - along_ones - normalised * along_normalised) * inverse_deviation
