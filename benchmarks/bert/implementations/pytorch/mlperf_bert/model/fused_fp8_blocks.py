"""The fused blocks with the encoder's products in FP8: kernels around them write FP8 themselves.

A result that the next product reads carries its FP8 copy as the attribute `fp8`; one that has none
(embeddings, chosen rows, attention's context and gradients) is cast by a kernel of its own.
Imported on CUDA only, or in Triton's interpreter.

Shape letters: T tokens, R rows, D hidden, F feed-forward width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mlperf_bert.model.dropout import DropoutSite
from mlperf_bert.model.fp8 import (
    GRADIENT,
    INPUT,
    Fp8Scales,
    ProductScales,
    multiply_inputs,
    product_gradients,
)
from mlperf_bert.model.fp8_blocks import project_qkv_fp8
from mlperf_bert.model.fp8_cast import Fp8Matrix
from mlperf_bert.model.fused_blocks import FusedBlocks, another, kept, take_again
from mlperf_bert.model.triton_fp8 import beside_transpose
from mlperf_bert.model.triton_fp8_gelu import bias_gelu_fp8, bias_gelu_fp8_backward
from mlperf_bert.model.triton_norm import residual_norm, residual_norm_backward


class FusedFp8Blocks(FusedBlocks):
    """See `Blocks`. What `intermediate` returns is for the `residual_output` behind it alone."""

    def __init__(self, scales: Fp8Scales) -> None:
        self._scales = scales

    def residual_output(
        self,
        x: Tensor,
        residual: Tensor,
        dense: nn.Linear,
        norm: nn.LayerNorm,
        site: DropoutSite | None,
    ) -> Tensor:
        """See `Blocks`."""
        keep, scale = kept(site, dense.out_features)
        output, again, y8 = _ResidualOutput.apply(
            x,
            _take_copy(x),
            take_again(residual),
            *(dense.weight, dense.bias, norm.weight, norm.bias),
            norm.eps,
            keep,
            scale,
            self._scales.of(dense),
            self._scales.behind(dense),
            torch.is_grad_enabled(),
        )  # type: ignore[no-untyped-call]
        output.again, output.fp8 = again, y8
        return output  # type: ignore[no-any-return]

    def intermediate(self, hidden: Tensor, dense: nn.Linear) -> Tensor:
        """[R, D] -> [R, F] without values: they are in the FP8 copy alone, all else reads NaN."""
        output, y8 = _Intermediate.apply(
            hidden,
            _take_copy(hidden),
            dense.weight,
            dense.bias,
            self._scales.of(dense),
            self._scales.behind(dense),
            torch.is_grad_enabled(),
        )  # type: ignore[no-untyped-call]
        output.fp8 = y8
        return output  # type: ignore[no-any-return]

    def project_qkv(
        self,
        hidden: Tensor,
        wanted: Tensor,
        query: nn.Linear,
        key: nn.Linear,
        value: nn.Linear,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Blocks`."""
        scales = self._scales.of(query)
        return project_qkv_fp8(scales, hidden, wanted, query, key, value, _take_copy(hidden))


def _take_copy(x: Tensor) -> Fp8Matrix | None:
    """`x` under the scales of the product that reads it, where its kernel has cast it.

    Taken from it: what a backward keeps of `x` would keep the copy's memory, too.
    """
    copy: Fp8Matrix | None = x.__dict__.pop("fp8", None)
    return copy


class _Intermediate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        x8: Fp8Matrix | None,
        weight: Tensor,
        bias: Tensor,
        scales: ProductScales,
        behind: ProductScales,
        records: bool,
    ) -> tuple[Tensor, Fp8Matrix]:
        projected, *transposed = multiply_inputs(hidden, x8, (weight,), (), scales, records)
        target = behind.target(INPUT, records=records)
        y8 = bias_gelu_fp8(projected, bias, target, transpose=records)
        ctx.save_for_backward(*transposed, projected, bias)
        ctx.scales = scales
        return projected.new_full((), float("nan")).expand_as(projected), y8

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor | None, ...]:
        x8_transposed, w8_transposed, projected, bias = ctx.saved_tensors
        g8, of_bias = bias_gelu_fp8_backward(
            gradient.contiguous(), projected, bias, ctx.scales.target(GRADIENT)
        )
        of_hidden, of_weight = product_gradients(g8, x8_transposed, w8_transposed, ctx.scales)
        return of_hidden, None, of_weight, of_bias, None, None, None


class _ResidualOutput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        x8: Fp8Matrix | None,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        epsilon: float,
        keep: Tensor | None,
        scale: float,
        scales: ProductScales,
        behind: ProductScales | None,
        records: bool,
    ) -> tuple[Tensor, Tensor, Fp8Matrix | None]:
        projected, *transposed = multiply_inputs(x, x8, (weight,), (), scales, records)
        residual = residual.contiguous()
        target = None if behind is None else behind.target(INPUT, records=records)
        output, statistics, rows8 = residual_norm(
            projected, bias, residual, norm_weight, norm_bias, epsilon, keep, scale, target
        )
        y8 = None
        if rows8 is not None and target is not None:
            y8 = beside_transpose(rows8, target) if records else Fp8Matrix(target.unit, rows8, None)
        saved = (projected, bias, residual, norm_weight, statistics, keep)
        ctx.save_for_backward(*transposed, *saved)
        ctx.scales, ctx.scale = scales, scale
        ctx.set_materialize_grads(False)
        return output, another(output), y8

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x8_transposed, w8_transposed, *saved = ctx.saved_tensors
        projected, bias, residual, norm_weight, statistics, keep = saved
        given = [each.contiguous() for each in gradients if each is not None]
        target = ctx.scales.target(GRADIENT)
        rows8, of_residual, (of_bias, of_norm_weight, of_norm_bias) = residual_norm_backward(
            given, projected, bias, residual, norm_weight, statistics, keep, ctx.scale, target
        )
        g8 = beside_transpose(rows8, target)
        of_x, of_weight = product_gradients(g8, x8_transposed, w8_transposed, ctx.scales)
        return (
            of_x,
            None,
            of_residual,
            of_weight,
            of_bias,
            of_norm_weight,
            of_norm_bias,
            *(None,) * 6,
        )
