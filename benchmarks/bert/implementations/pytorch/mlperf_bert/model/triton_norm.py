"""Sums with a LayerNorm on a GPU, with one Triton kernel for each forward and backward pass.

`residual_norm` computes bias, dropout, residual sum and LayerNorm. `embedding_norm` computes the
sum of three embeddings, LayerNorm and dropout, and also supports a single table without biases.
Their backward passes recompute the input of the LayerNorm from its parts. Saving that input would
move as many bytes, because one write and one read would replace the second reads of product and
residual. Saving it would also round it to 16 bits. Both ways need the same memory, because the
product is saved instead. Statistics are float32, or float64 for float64 tensors.

`sum_norm` is the pre-norm counterpart of `residual_norm`, without biases. Its sum is a result too,
so the backward pass reads that sum, and the product is not saved.

Shapes use the letters R (rows), T (tokens) and D (hidden size).
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlperf_bert.model.fp8_cast import Target
from mlperf_bert.model.triton_fp8 import cast_scaled, finite_or_nan, record, row_destination, to_fp8
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

# One tensor each for words, token types and positions. The last two may be None.
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
    """Compute LayerNorm(dropout(product + bias) + residual) and its statistics.

    Args:
        product: [R, D], contiguous.
        bias: [D], added to the product.
        residual: [R, D], contiguous.
        weight: [D], weight of the LayerNorm.
        norm_bias: [D], bias of the LayerNorm.
        epsilon: added to the variance.
        keep: uint8 [R, ceil(D / 8)], the result of `keep_bits`. If it is None, nothing is dropped.
        scale: factor of kept elements.
        target: dtype and unit of an additional result in FP8, or None.

    Returns:
        The result [R, D] in the dtype that product and residual promote to, statistics [2, R] (mean
        and inverse of the standard deviation), and the result in FP8 [R, D], or None without a
        target.
    """
    rows, size = product.shape
    groups = num_groups(size)
    output = torch.empty_like(product, dtype=torch.promote_types(product.dtype, residual.dtype))
    statistics = empty_sums(product, 2, rows)
    output8 = None if target is None else torch.empty_like(product, dtype=target.dtype)
    _norm_forward[(rows,)](
        (product, bias, residual, weight, norm_bias, keep),
        (output, statistics, None),
        *row_destination(output8, target),
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
    """Compute the gradients of `residual_norm`, given its arguments and statistics.

    `gradients` contains one or two contiguous tensors [R, D], whose sum is the output's gradient.

    Returns:
        Gradients of product and residual [R, D], and those of bias, weight and norm_bias [D]. The
        first two are the same tensor if nothing is dropped and their dtypes are equal. The
        product's gradient is in FP8 if there is a target.
    """
    upstream, other = gradients[0], gradients[1] if len(gradients) > 1 else None
    dtypes = (bias.dtype, weight.dtype, weight.dtype)
    return _backward(
        (upstream, other, None, product, bias, residual, weight, statistics, keep),
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
    """Compute residual + dropout(product), its LayerNorm without bias, and the statistics.

    The arguments are those of `residual_norm`. The LayerNorm is computed from the rounded sum.

    Returns:
        Sum and LayerNorm [R, D] in the residual's dtype, statistics [2, R] (mean and inverse of the
        standard deviation), and the LayerNorm in FP8 [R, D], or None without a target.
    """
    rows, size = product.shape
    groups = num_groups(size)
    total, output = torch.empty_like(residual), torch.empty_like(residual)
    statistics = empty_sums(residual, 2, rows)
    output8 = None if target is None else torch.empty_like(product, dtype=target.dtype)
    _norm_forward[(rows,)](
        (product, None, residual, weight, None, keep),
        (output, statistics, total),
        *row_destination(output8, target),
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
    """Compute the gradients of `sum_norm`, given its arguments, its sum `total` and its statistics.

    `gradients` contains the gradients of the sum (None means zero) and of the LayerNorm, each
    contiguous [R, D].

    Returns:
        Gradients of product and residual as in `residual_norm_backward`, and of weight [D].
    """
    grad_total, grad_output = gradients
    grad_product, grad_residual, (grad_weight,) = _backward(
        (grad_output, None, grad_total, None, None, total, weight, statistics, keep),
        *(product_dtype, (weight.dtype,), scale, target),
    )
    return grad_product, grad_residual, grad_weight


def _backward(
    inputs: tuple[Tensor | None, ...],
    product_dtype: torch.dtype,
    dtypes: tuple[torch.dtype, ...],
    scale: float,
    target: Target | None,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Launch the kernel `_norm_backward`, and return gradients as `residual_norm_backward` does.

    `inputs` are the kernel's inputs. `dtypes` are the dtypes of the gradients that the kernel sums
    over rows.
    """
    residual, statistics, keep = inputs[5], inputs[7], inputs[8]
    assert residual is not None and statistics is not None
    rows, size = residual.shape
    groups, programs = num_groups(size), num_programs(rows)
    grad_residual = torch.empty_like(residual)
    # If nothing is dropped, the two gradients are equal, and only one is written.
    is_same = target is None and keep is None and product_dtype == residual.dtype
    dtype = product_dtype if target is None else target.dtype
    grad_product = grad_residual if is_same else torch.empty_like(residual, dtype=dtype)
    partials = empty_sums(statistics, programs, len(dtypes), size)
    _norm_backward[(programs,)](
        inputs,
        (None if is_same or target is not None else grad_product, grad_residual, partials),
        *row_destination(grad_product, target),
        *(rows, size, scale, computed_in(statistics), groups),
        num_warps=num_warps(groups),
    )
    return grad_product, grad_residual, sum_programs(partials, dtypes)


def embedding_norm(
    ids: Three,
    tables: Three,
    weight: Tensor,
    norm_bias: Tensor | None,
    epsilon: float,
    keep: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute dropout(LayerNorm(sum of three embeddings)) of T tokens, and its statistics.

    The token types, the positions and `norm_bias` are either all given or all missing (None).

    Args:
        ids: int64 [T] each.
        tables: [any, D] each, contiguous, all of the same dtype.
        weight: [D], weight of the LayerNorm. The arguments after it are those of `residual_norm`,
            with T instead of R rows.

    Returns:
        The result [T, D] in the dtype of the tables, and statistics [2, T] (mean and inverse of the
        standard deviation).
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
    """Compute the gradients of `embedding_norm`, given its arguments and statistics.

    All sums have a fixed order, and the host does not wait for the device. torch sums the gradients
    of words and positions by sorting. One kernel sums the gradients of token types together with
    those of the LayerNorm's parameters, because there are few types and each has a large share of
    the tokens.

    The output's `gradient` [T, D] is contiguous.

    Returns:
        The gradients of the tables, with None for missing tables, and a tuple of the gradients of
        weight and norm_bias [D]. The tuple does not contain norm_bias if tables are missing.
    """
    words, types, positions = tables
    rows, size, num_types = len(ids[0]), words.shape[1], 0 if types is None else len(types)
    dtypes = [weight.dtype] if types is None else [weight.dtype] * 2 + [types.dtype] * num_types
    groups, programs = num_groups(size), num_programs(rows)
    grad_sum = torch.empty_like(gradient)
    partials = empty_sums(gradient, programs, len(dtypes), size)
    _embedding_backward[(programs,)](
        *(ids, tables, (gradient, weight, statistics, keep), (grad_sum, partials)),
        *(rows, size, scale, num_types, triton.next_power_of_2(max(num_types, 1))),
        *(computed_in(words), groups),
        num_warps=num_warps(groups),
    )
    sums = sum_programs(partials, tuple(dtypes))
    dense_backward = torch.ops.aten.embedding_dense_backward
    grad_words = dense_backward(grad_sum, ids[0], len(words), -1, False)
    if positions is None:
        return (grad_words, None, None), sums
    grad_positions = dense_backward(grad_sum, ids[2], len(positions), -1, False)
    return (grad_words, torch.stack(sums[2:]), grad_positions), sums[:2]


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
    normalized = _normalize(
        total, statistics, weight, norm_bias, row, rows, channels, size, epsilon, dtype
    )
    store_channels(output + row * size, channels, normalized, size)
    if output8 is not None:  # the FP8 result is a cast of the rounded values
        rounded = normalized.to(output.dtype.element_ty).to(tl.float32)
        written = to_fp8(rounded, output8, unit, maximum, limit)
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
    gradient, other_gradient, grad_sum, product, bias, residual, weight, statistics, keep = inputs
    grad_product, grad_residual, partials = outputs
    grad_product8, unit, maximum = fp8
    channels = channels_of(groups)
    biases = None if bias is None else load_channels(bias, channels, size, dtype)
    weights = load_channels(weight, channels, size, dtype)
    grad_bias = tl.zeros((groups, 8), dtype)
    grad_weight = tl.zeros((groups, 8), dtype)
    grad_norm_bias = tl.zeros((groups, 8), dtype)
    largest = tl.zeros((groups,), tl.float32)  # of each thread, so that rows need no reduction
    factor = 1.0 if grad_product8 is None else 1.0 / tl.load(unit)
    row = tl.program_id(0).to(tl.int64)
    while row < rows:
        total = _sum_of_row(
            product, biases, residual, keep, row, channels, size, scale, dtype, groups
        )
        upstream = load_channels(gradient + row * size, channels, size, dtype)
        if other_gradient is not None:
            upstream += load_channels(other_gradient + row * size, channels, size, dtype)
        normalized, grad_total = _norm_gradient(
            upstream, total, weights, statistics, row, rows, channels, size
        )
        if grad_sum is not None:
            grad_total += load_channels(grad_sum + row * size, channels, size, dtype)
        store_channels(grad_residual + row * size, channels, grad_total, size)
        grad_weight += upstream * normalized
        grad_norm_bias += upstream
        if keep is not None:
            grad_total = drop(grad_total, keep, row, size, scale, groups)
        if grad_product8 is not None:
            finite, of_row = finite_or_nan(grad_total, 1)
            largest = tl.maximum(largest, of_row)
            written = cast_scaled(finite, grad_product8, factor, limit)
            store_channels(grad_product8 + row * size, channels, written, size)
        if grad_product is not None:
            store_channels(grad_product + row * size, channels, grad_total, size)
        grad_bias += grad_total
        row += tl.num_programs(0)
    if grad_product8 is not None:
        record(maximum, tl.max(largest))
    if bias is None:
        store_channels(partials + tl.program_id(0) * size, channels, grad_weight, size)
    else:
        own = partials + tl.program_id(0) * 3 * size
        store_channels(own, channels, grad_bias, size)
        store_channels(own + size, channels, grad_weight, size)
        store_channels(own + 2 * size, channels, grad_norm_bias, size)


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
    normalized = _normalize(
        total, statistics, weight, norm_bias, row, rows, channels, size, epsilon, dtype
    )
    if keep is not None:
        normalized = drop(normalized, keep, row, size, scale, groups)
    store_channels(output + row * size, channels, normalized, size)


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
    grad_sum, partials = outputs
    channels = channels_of(groups)
    weights = load_channels(weight, channels, size, dtype)
    grad_weight = tl.zeros((groups, 8), dtype)
    grad_norm_bias = tl.zeros((groups, 8), dtype)
    grad_types = tl.zeros((padded_types, groups, 8), dtype)
    kinds = tl.arange(0, padded_types)[:, None, None]
    row = tl.program_id(0).to(tl.int64)
    while row < rows:
        total, kind = _sum_of_embeddings(ids, tables, row, channels, size, dtype)
        upstream = load_channels(gradient + row * size, channels, size, dtype)
        if keep is not None:
            upstream = drop(upstream, keep, row, size, scale, groups)
        normalized, grad_total = _norm_gradient(
            upstream, total, weights, statistics, row, rows, channels, size
        )
        store_channels(grad_sum + row * size, channels, grad_total, size)
        grad_weight += upstream * normalized
        grad_norm_bias += upstream
        if num_types > 0:
            grad_types += tl.where(kinds == kind, grad_total[None, :, :], 0.0)
        row += tl.num_programs(0)
    if num_types == 0:
        store_channels(partials + tl.program_id(0) * size, channels, grad_weight, size)
    else:
        own = partials + tl.program_id(0) * (2 + num_types) * size
        store_channels(own, channels, grad_weight, size)
        store_channels(own + size, channels, grad_norm_bias, size)
        at = own + (2 + kinds) * size + channels[None, :, :]
        is_there = (kinds < num_types) & (channels < size)[None, :, :]
        tl.store(at, grad_types, mask=is_there)


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
    """Return a row's residual plus, if given, its product and biases with dropout."""
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
    """Sum a token's embeddings, and return the sum and its token type (0 without types)."""
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
def _normalize(
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
    """Compute the LayerNorm of a row, and write its mean and inverse standard deviation.

    The result is zero past the row's end. `norm_bias` may be None.
    """
    mean = tl.sum(values) / size
    centered = tl.where(channels < size, values - mean, 0.0)
    variance = tl.sum(centered * centered) / size
    inverse_deviation = 1 / tl.sqrt(variance + epsilon)
    tl.store(statistics + row, mean)
    tl.store(statistics + rows + row, inverse_deviation)
    normalized = (values - mean) * inverse_deviation * load_channels(weight, channels, size, dtype)
    if norm_bias is not None:
        normalized += load_channels(norm_bias, channels, size, dtype)
    return normalized


@kernel
def _norm_gradient(
    upstream: tl.tensor,
    values: tl.tensor,
    weights: tl.tensor,
    statistics: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    size: tl.constexpr,
) -> Any:
    """Compute a row's normalized values, and the input's gradient from that of the LayerNorm."""
    mean, inverse_deviation = tl.load(statistics + row), tl.load(statistics + rows + row)
    normalized = tl.where(channels < size, (values - mean) * inverse_deviation, 0.0)
    scaled = upstream * weights
    along_ones = tl.sum(scaled) / size
    along_normalized = tl.sum(scaled * normalized) / size
    return normalized, (scaled - along_ones - normalized * along_normalized) * inverse_deviation
