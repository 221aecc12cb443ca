"""The fused blocks: matrix products, with one Triton kernel around each in each direction.

A block's product stands outside its autograd function, so that autocast casts its factors. The
kernels take tensors of mixed dtypes and compute in float32 (float64 for float64), which in 16 bits
rounds less often than the reference. With FP8 products they write FP8 themselves; tensors without
an FP8 copy (embeddings, chosen rows, attention's context and gradients) are cast by a kernel of
their own. Imported on CUDA only, or in Triton's interpreter.

Shape letters: T tokens, R rows, D hidden, P masked positions, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mlperf_bert.model.blocks import Blocks, Three, side_by_side
from mlperf_bert.model.dropout import keep_bits
from mlperf_bert.model.dropout_keys import DropoutSite, scale_of
from mlperf_bert.model.fp8 import (
    GRADIENT,
    INPUT,
    Fp8Scales,
    ProductScales,
    multiply_fp8,
    multiply_inputs,
    pop_fp8_copy,
    product_gradients,
)
from mlperf_bert.model.fp8_cast import Fp8Matrix, Target
from mlperf_bert.model.triton_cross_entropy import cross_entropy, cross_entropy_backward
from mlperf_bert.model.triton_fp8 import beside_transpose
from mlperf_bert.model.triton_gelu import (
    bias_gelu,
    bias_gelu_backward,
    bias_gelu_fp8,
    bias_gelu_fp8_backward,
    gated,
    gated_backward,
    gated_fp8,
    gated_fp8_backward,
)
from mlperf_bert.model.triton_norm import (
    embedding_norm,
    embedding_norm_backward,
    residual_norm,
    residual_norm_backward,
    sum_norm,
    sum_norm_backward,
)

# Scales of the product and of the next one; whether a backward follows.
OfFp8 = tuple[ProductScales, ProductScales | None, bool]


class FusedBlocks(Blocks):
    """See `Blocks`; with `scales`, products in FP8.

    Only the next `residual_output` can read what `intermediate` then returns.
    """

    name = "fused"

    def __init__(self, scales: Fp8Scales | None = None) -> None:
        self.scales = scales

    def multiply(self, x: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
        """See `Blocks`; one product for all layers.

        If the results' gradients are columns of one tensor, as attention's backward may leave them,
        they are multiplied in place; otherwise they are first copied together.
        """
        if self.scales is not None:
            return multiply_fp8(self.scales, x, layers)
        if len(layers) == 1:
            return (layers[0](x),)
        weight = torch.cat([layer.weight for layer in layers])
        has_bias = layers[0].bias is not None
        bias = torch.cat([layer.bias for layer in layers]) if has_bias else None
        return self._split(F.linear(x, weight, bias), [layer.out_features for layer in layers])

    def columns(self, product: Tensor, count: int) -> tuple[Tensor, ...]:
        """See `Blocks`; gradients that lie side by side already are not copied together."""
        return self._split(product, [product.shape[1] // count] * count)

    @staticmethod
    def _split(joined: Tensor, widths: list[int]) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = _Columns.apply(joined, widths)  # type: ignore[no-untyped-call]
        return parts

    def residual_output(
        self,
        x: Tensor,
        residual: Tensor,
        dense: nn.Linear,
        norm: nn.LayerNorm,
        site: DropoutSite | None,
    ) -> Tensor:
        """See `Blocks`."""
        keep, scale = _kept(site, dense.out_features)
        output, again, y8 = _ResidualOutput.apply(
            *(*self._factors(x, dense), _take_again(residual)),
            *(dense.bias, norm.weight, norm.bias, norm.eps, keep, scale),
        )  # type: ignore[no-untyped-call]
        output.again, output.fp8 = again, y8
        return output  # type: ignore[no-any-return]

    def intermediate(self, hidden: Tensor, dense: nn.Linear) -> Tensor:
        """See `Blocks`. In FP8 only the copy has values; the result itself reads NaN."""
        output, y8 = _Intermediate.apply(*self._factors(hidden, dense), dense.bias)  # type: ignore[no-untyped-call]
        output.fp8 = y8
        return output  # type: ignore[no-any-return]

    def sum_norm(
        self,
        x: Tensor,
        residual: Tensor,
        dense: nn.Linear,
        norm: nn.LayerNorm,
        site: DropoutSite | None,
    ) -> tuple[Tensor, Tensor]:
        """See `Blocks`. In FP8 the LayerNorm carries its copy for the next product."""
        keep, scale = _kept(site, dense.out_features)
        total, output, y8 = _SumNorm.apply(
            *(*self._factors(x, dense), residual, norm.weight, norm.eps, keep, scale)
        )  # type: ignore[no-untyped-call]
        output.fp8 = y8
        return total, output

    def gated(self, hidden: Tensor, dense: nn.Linear) -> Tensor:
        """See `Blocks`. In FP8 only the copy has values; the result itself reads NaN."""
        output, y8 = _Gated.apply(*self._factors(hidden, dense))  # type: ignore[no-untyped-call]
        output.fp8 = y8
        return output  # type: ignore[no-any-return]

    def _factors(self, x: Tensor, dense: nn.Linear) -> tuple[Tensor, Tensor | None, Any, Any]:
        """A product, or in FP8 its factors: input, weight, copy, scales.

        The bias of `dense` is added elsewhere.
        """
        if self.scales is None:
            return F.linear(x, dense.weight), None, None, None
        scales = self.scales.of(dense), self.scales.behind(dense), torch.is_grad_enabled()
        return x, dense.weight, pop_fp8_copy(x), scales

    def embed(
        self,
        ids: Three,
        tables: tuple[nn.Embedding, nn.Embedding, nn.Embedding],
        norm: nn.LayerNorm,
        site: DropoutSite | None,
    ) -> Tensor:
        """See `Blocks`."""
        keep, scale = _kept(site, norm.weight.shape[0])
        weights = (*(table.weight for table in tables), norm.weight, norm.bias)
        output: Tensor = _EmbeddingNorm.apply(*ids, *weights, norm.eps, keep, scale)  # type: ignore[no-untyped-call]
        return output

    def embed_words(
        self, ids: Tensor, table: nn.Embedding, norm: nn.LayerNorm, site: DropoutSite | None
    ) -> Tensor:
        """See `Blocks`."""
        keep, scale = _kept(site, norm.weight.shape[0])
        missing = None, None
        weights = (table.weight, *missing, norm.weight, None)
        output: Tensor = _EmbeddingNorm.apply(ids, *missing, *weights, norm.eps, keep, scale)  # type: ignore[no-untyped-call]
        return output

    def masked_lm_loss(
        self, hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor
    ) -> Tensor:
        """See `Blocks`. One [P, V] of logits is kept, in the product's dtype.

        The product adds the bias, whose gradient comes from the kernel that makes the logits'.
        """
        logits = F.linear(hidden, weight, bias.detach())
        total: Tensor = _CrossEntropySum.apply(logits, bias, labels)  # type: ignore[no-untyped-call]
        return total


def _kept(site: DropoutSite | None, channels: int) -> tuple[Tensor | None, float]:
    """Keep bits of a dropout, and the scale of kept elements."""
    if site is None:
        return None, 1.0
    return keep_bits(site, channels), scale_of(site.probability)


def _another(x: Tensor) -> Tensor:
    """The same memory as another tensor, for a function that returns it twice."""
    return x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


def _take_again(x: Tensor) -> Tensor:
    """`x` for the residual sum: the second output of the LayerNorm that made it, if one did.

    Two outputs have two gradients, which the LayerNorm's backward adds as it reads them; with one
    output autograd would add them in a separate pass.
    """
    again: Tensor = x.__dict__.pop("again", x)
    return again


class _Columns(torch.autograd.Function):
    """A tensor split into columns, whose gradients `side_by_side` joins."""

    @staticmethod
    def forward(ctx: Any, joined: Tensor, widths: list[int]) -> tuple[Tensor, ...]:
        return torch.split(joined, widths, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return side_by_side(gradients), None


class _ResidualOutput(torch.autograd.Function):
    """Residual output around an outside product, or with one in FP8: see `FusedBlocks._factors`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        matrix: Tensor | None,
        x8: Fp8Matrix | None,
        of_fp8: OfFp8 | None,
        residual: Tensor,
        bias: Tensor,
        weight: Tensor,
        norm_bias: Tensor,
        epsilon: float,
        keep: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Fp8Matrix | None]:
        product, transposed, target = _product(x, matrix, x8, of_fp8)
        residual = residual.contiguous()
        output, statistics, rows8 = residual_norm(
            product, bias, residual, weight, norm_bias, epsilon, keep, scale, target
        )
        ctx.save_for_backward(product, bias, residual, weight, statistics, keep, *transposed)
        ctx.of_fp8, ctx.scale = of_fp8, scale
        ctx.set_materialize_grads(False)
        return output, _another(output), _copy(rows8, target, of_fp8)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [each.contiguous() for each in gradients if each is not None]
        product, bias, residual, weight, statistics, keep, *transposed = ctx.saved_tensors
        scales = None if ctx.of_fp8 is None else ctx.of_fp8[0]
        target = None if scales is None else scales.target(GRADIENT)
        of_x, of_residual, (of_bias, *of_norm) = residual_norm_backward(
            given, product, bias, residual, weight, statistics, keep, ctx.scale, target
        )
        of_matrix = None
        if scales is not None and target is not None:
            of_x, of_matrix = product_gradients(beside_transpose(of_x, target), transposed, scales)
        return of_x, of_matrix, None, None, of_residual, of_bias, *of_norm, None, None, None


class _SumNorm(torch.autograd.Function):
    """Sum and LayerNorm around a product, like `_ResidualOutput`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        matrix: Tensor | None,
        x8: Fp8Matrix | None,
        of_fp8: OfFp8 | None,
        residual: Tensor,
        weight: Tensor,
        epsilon: float,
        keep: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Fp8Matrix | None]:
        product, transposed, target = _product(x, matrix, x8, of_fp8)
        total, output, statistics, rows8 = sum_norm(
            product, residual.contiguous(), weight, epsilon, keep, scale, target
        )
        ctx.save_for_backward(total, weight, statistics, keep, *transposed)
        ctx.of_fp8, ctx.scale, ctx.dtype = of_fp8, scale, product.dtype
        ctx.set_materialize_grads(False)
        return total, output, _copy(rows8, target, of_fp8)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_sum: Tensor | None, of_output: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        total, weight, statistics, keep, *transposed = ctx.saved_tensors
        given = (
            None if of_sum is None else of_sum.contiguous(),
            torch.zeros_like(total) if of_output is None else of_output.contiguous(),
        )
        scales = None if ctx.of_fp8 is None else ctx.of_fp8[0]
        target = None if scales is None else scales.target(GRADIENT)
        of_x, of_residual, of_weight = sum_norm_backward(
            given, total, weight, statistics, keep, ctx.scale, ctx.dtype, target
        )
        of_matrix = None
        if scales is not None and target is not None:
            of_x, of_matrix = product_gradients(beside_transpose(of_x, target), transposed, scales)
        return of_x, of_matrix, None, None, of_residual, of_weight, None, None, None


class _Gated(torch.autograd.Function):
    """A gate around a product, like `_Intermediate`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, matrix: Tensor | None, x8: Fp8Matrix | None, of_fp8: OfFp8 | None
    ) -> tuple[Tensor, Fp8Matrix | None]:
        product, transposed, target = _product(x, matrix, x8, of_fp8)
        ctx.save_for_backward(product, *transposed)
        ctx.of_fp8 = of_fp8
        if of_fp8 is None or target is None:
            return gated(product), None
        y8 = gated_fp8(product, target, transpose=of_fp8[2])
        shape = (len(product), product.shape[1] // 2)
        return product.new_full((), float("nan")).expand(shape), y8

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor | None, ...]:
        product, *transposed = ctx.saved_tensors
        gradient = gradient.contiguous()
        if ctx.of_fp8 is None:
            return gated_backward(gradient, product), None, None, None
        scales = ctx.of_fp8[0]
        g8 = gated_fp8_backward(gradient, product, scales.target(GRADIENT))
        return *product_gradients(g8, transposed, scales), None, None


class _Intermediate(torch.autograd.Function):
    """GELU around a product, like `_ResidualOutput`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        matrix: Tensor | None,
        x8: Fp8Matrix | None,
        of_fp8: OfFp8 | None,
        bias: Tensor,
    ) -> tuple[Tensor, Fp8Matrix | None]:
        product, transposed, target = _product(x, matrix, x8, of_fp8)
        ctx.save_for_backward(product, bias, *transposed)
        ctx.of_fp8 = of_fp8
        if of_fp8 is None or target is None:
            return bias_gelu(product, bias), None
        y8 = bias_gelu_fp8(product, bias, target, transpose=of_fp8[2])
        return product.new_full((), float("nan")).expand_as(product), y8

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor | None, ...]:
        product, bias, *transposed = ctx.saved_tensors
        gradient, of_matrix = gradient.contiguous(), None
        if ctx.of_fp8 is None:
            of_x, of_bias = bias_gelu_backward(gradient, product, bias)
        else:
            scales = ctx.of_fp8[0]
            g8, of_bias = bias_gelu_fp8_backward(gradient, product, bias, scales.target(GRADIENT))
            of_x, of_matrix = product_gradients(g8, transposed, scales)
        return of_x, of_matrix, None, None, of_bias


def _product(
    x: Tensor, matrix: Tensor | None, x8: Fp8Matrix | None, of_fp8: OfFp8 | None
) -> tuple[Tensor, list[Tensor | None], Target | None]:
    """The product, tensors for its FP8 backward, and the cast target of the next product."""
    if of_fp8 is None or matrix is None:
        return x.contiguous(), [], None
    scales, behind, records = of_fp8
    product, *transposed = multiply_inputs(x, x8, (matrix,), (), scales, records)
    target = None if behind is None else behind.target(INPUT, records=records)
    return product, transposed, target


def _copy(rows8: Tensor | None, target: Target | None, of_fp8: OfFp8 | None) -> Fp8Matrix | None:
    """A LayerNorm's FP8 copy; its transpose too, if a backward follows."""
    if rows8 is None or target is None or of_fp8 is None:
        return None
    return beside_transpose(rows8, target) if of_fp8[2] else Fp8Matrix(target.unit, rows8, None)


class _EmbeddingNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        word_ids: Tensor,
        type_ids: Tensor | None,
        position_ids: Tensor | None,
        words: Tensor,
        types: Tensor | None,
        positions: Tensor | None,
        weight: Tensor,
        norm_bias: Tensor | None,
        epsilon: float,
        keep: Tensor | None,
        scale: float,
    ) -> Tensor:
        ids, tables = (word_ids, type_ids, position_ids), (words, types, positions)
        output, statistics = embedding_norm(ids, tables, weight, norm_bias, epsilon, keep, scale)
        ctx.save_for_backward(*ids, *tables, weight, statistics, keep)
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *first_six, weight, statistics, keep = ctx.saved_tensors
        of_tables, of_norm = embedding_norm_backward(
            gradient.contiguous(),
            tuple(first_six[:3]),
            tuple(first_six[3:]),
            weight,
            statistics,
            keep,
            ctx.scale,
        )
        of_weight, *of_bias = of_norm
        return None, None, None, *of_tables, of_weight, *(of_bias or (None,)), None, None, None


class _CrossEntropySum(torch.autograd.Function):
    """Cross-entropy whose gradient overwrites the logits, which nothing else reads."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        losses, statistics = cross_entropy(logits, labels)
        ctx.save_for_backward(logits, labels, statistics)
        ctx.bias_dtype = bias.dtype
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        logits, labels, statistics = ctx.saved_tensors
        of_bias = cross_entropy_backward(gradient, logits, labels, statistics, ctx.bias_dtype)
        # torch does not see a kernel's writes; once told, it refuses a second backward.
        torch.autograd.graph.increment_version(logits)
        return logits.detach(), of_bias, None
