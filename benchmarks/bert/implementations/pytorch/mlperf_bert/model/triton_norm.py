"""Bias, dropout, residual sum and LayerNorm on a GPU: one Triton kernel forward, one backward.

The sum under the LayerNorm is computed again in backward, from the product, the residual and the
keep bits. Saving it would move as many bytes (it is written once and read once; the two that it is
made of are read once more instead) and round it to 16 bits; the memory is the same too, as the
product is kept in its place. Statistics are float32, or float64 for float64.

Shape letters: R rows, D hidden.
"""

from collections.abc import Sequence
from typing import Any

import torch
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
        weight: [D], of the LayerNorm.
        norm_bias: [D].
        epsilon: added to the variance.
        keep: uint8 [R, ceil(D / 8)], see `keep_bits`; None drops nothing.
        scale: of what is kept.
        target: of the result in FP8, where that is wanted beside it.

    Returns:
        [R, D] in the dtype that product and residual promote to; [2, R] mean and one over the
        standard deviation; and the result in FP8 [R, D] where there is a target.
    """
    rows, size = product.shape
    groups = num_groups(size)
    output = torch.empty_like(product, dtype=torch.promote_types(product.dtype, residual.dtype))
    statistics = empty_sums(product, 2, rows)
    output8 = None if target is None else torch.empty_like(product, dtype=target.dtype)
    _norm_forward[(rows,)](
        product,
        bias,
        residual,
        weight,
        norm_bias,
        product if keep is None else keep,
        output,
        statistics,
        *writing_rows(output8, output, target),
        rows,
        size,
        epsilon,
        scale,
        keep is not None,
        computed_in(product, residual),
        groups,
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
    """Gradients of `residual_norm`, whose arguments and statistics these are.

    `gradients` are one or two [R, D], contiguous: their sum is that of the output.

    Returns:
        Those of product and residual [R, D], one tensor where nothing is dropped and their dtypes
        are the same, or the product's in FP8 alone where there is a target; and those of bias,
        weight and norm_bias [D].
    """
    rows, size = product.shape
    groups, programs = num_groups(size), num_programs(rows)
    of_residual = torch.empty_like(residual)
    # Without dropout both are the same, and one is written.
    is_same = target is None and keep is None and product.dtype == residual.dtype
    dtype = product.dtype if target is None else target.dtype
    of_product = of_residual if is_same else torch.empty_like(product, dtype=dtype)
    partials = empty_sums(statistics, programs, 3, size)
    _norm_backward[(programs,)](
        gradients[0],
        gradients[-1],
        product,
        bias,
        residual,
        weight,
        statistics,
        product if keep is None else keep,
        of_product,
        of_residual,
        partials,
        *writing_rows(None if target is None else of_product, of_residual, target),
        rows,
        size,
        scale,
        keep is not None,
        len(gradients) > 1,
        is_same,
        computed_in(product, residual),
        groups,
        num_warps=num_warps(groups),
    )
    return of_product, of_residual, sum_programs(partials, (bias.dtype, weight.dtype, weight.dtype))


@kernel
def _norm_forward(
    product: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    norm_bias: tl.tensor,
    keep: tl.tensor,
    output: tl.tensor,
    statistics: tl.tensor,
    output8: tl.tensor,
    unit: tl.tensor,
    maximum: tl.tensor,
    limit: tl.constexpr,
    notes_maximum: tl.constexpr,
    writes_fp8: tl.constexpr,
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
    biases = load_channels(bias, channels, size, dtype)
    total = _sum_of_row(
        product, biases, residual, keep, row, channels, size, scale, has_keep, dtype, groups
    )
    mean, inverse_deviation = statistics_of(total, channels, size, epsilon)
    tl.store(statistics + row, mean)
    tl.store(statistics + rows + row, inverse_deviation)
    normalised = (total - mean) * inverse_deviation * load_channels(weight, channels, size, dtype)
    normalised += load_channels(norm_bias, channels, size, dtype)
    store_channels(output + row * size, channels, normalised, size)
    if writes_fp8:  # of what was written
        rounded = normalised.to(output.dtype.element_ty).to(tl.float32)
        written = to_fp8(rounded, output8, unit, maximum, limit, notes_maximum, True)
        store_channels(output8 + row * size, channels, written, size)


@kernel
def _norm_backward(
    gradient: tl.tensor,
    other_gradient: tl.tensor,
    product: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    statistics: tl.tensor,
    keep: tl.tensor,
    of_product: tl.tensor,
    of_residual: tl.tensor,
    partials: tl.tensor,
    of_product8: tl.tensor,
    unit: tl.tensor,
    maximum: tl.tensor,
    limit: tl.constexpr,
    notes_maximum: tl.constexpr,
    writes_fp8: tl.constexpr,
    rows: tl.tensor,
    size: tl.constexpr,
    scale: tl.constexpr,
    has_keep: tl.constexpr,
    has_other: tl.constexpr,
    is_same: tl.constexpr,
    dtype: tl.constexpr,
    groups: tl.constexpr,
) -> None:
    channels = channels_of(groups)
    biases = load_channels(bias, channels, size, dtype)
    weights = load_channels(weight, channels, size, dtype)
    of_bias = tl.zeros((groups, 8), dtype)
    of_weight = tl.zeros((groups, 8), dtype)
    of_norm_bias = tl.zeros((groups, 8), dtype)
    row = tl.program_id(0).to(tl.int64)
    while row < rows:
        total = _sum_of_row(
            product, biases, residual, keep, row, channels, size, scale, has_keep, dtype, groups
        )
        given = load_channels(gradient + row * size, channels, size, dtype)
        if has_other:
            given += load_channels(other_gradient + row * size, channels, size, dtype)
        normalised, of_total = norm_gradient(
            given, total, weights, statistics, row, rows, channels, size
        )
        store_channels(of_residual + row * size, channels, of_total, size)
        of_weight += given * normalised
        of_norm_bias += given
        if has_keep:
            of_total = drop(of_total, keep, row, size, scale, groups)
        if writes_fp8:
            written = to_fp8(of_total, of_product8, unit, maximum, limit, notes_maximum, False)
            store_channels(of_product8 + row * size, channels, written, size)
        elif not is_same:
            store_channels(of_product + row * size, channels, of_total, size)
        of_bias += of_total
        row += tl.num_programs(0)
    own = partials + tl.program_id(0) * 3 * size
    store_channels(own, channels, of_bias, size)
    store_channels(own + size, channels, of_weight, size)
    store_channels(own + 2 * size, channels, of_norm_bias, size)


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
    has_keep: tl.constexpr,
    dtype: tl.constexpr,
    groups: tl.constexpr,
) -> Any:
    values = load_channels(product + row * size, channels, size, dtype) + biases
    if has_keep:
        values = drop(values, keep, row, size, scale, groups)
    return values + load_channels(residual + row * size, channels, size, dtype)


@kernel
def statistics_of(
    values: tl.tensor, channels: tl.tensor, size: tl.constexpr, epsilon: tl.constexpr
) -> Any:
    """Mean and one over the standard deviation of a row, zero behind its end."""
    mean = tl.sum(values) / size
    centered = tl.where(channels < size, values - mean, 0.0)
    variance = tl.sum(centered * centered) / size
    return mean, 1 / tl.sqrt(variance + epsilon)


@kernel
def norm_gradient(
    given: tl.tensor,
    values: tl.tensor,
    weights: tl.tensor,
    statistics: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    size: tl.constexpr,
) -> Any:
    """A row's normalised values, and the gradient of the values from that of the LayerNorm."""
    mean, inverse_deviation = tl.load(statistics + row), tl.load(statistics + rows + row)
    normalised = tl.where(channels < size, (values - mean) * inverse_deviation, 0.0)
    scaled = given * weights
    along_ones = tl.sum(scaled) / size
    along_normalised = tl.sum(scaled * normalised) / size
    return normalised, (scaled - along_ones - normalised * along_normalised) * inverse_deviation
