"""Fused blocks, in which one Triton kernel per pass computes everything around a matrix product.

A block's matrix product is outside its autograd function, so that autocast casts its factors. The
kernels accept tensors of mixed dtypes and compute in float32, or in float64 for float64 tensors.
With 16-bit tensors they therefore round less often than the reference. If the products are in FP8,
the kernels write FP8 themselves. A separate kernel casts all other inputs of FP8 products, which
are embeddings, selected rows, and attention's context and gradients. This file is imported only on
CUDA or in Triton's interpreter.

Shapes use the letters T (tokens), R (rows), D (hidden size), P (masked positions) and V (vocabulary
size).
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
from mlperf_bert.model.triton_fp8 import with_transpose
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

# The scales of the product, those of the next product, and whether a backward pass follows.
Fp8Plan = tuple[ProductScales, ProductScales | None, bool]


class FusedBlocks(Blocks):
    """Blocks with Triton kernels. If `scales` is set, the encoder's products are in FP8.

    In FP8, only the next product can read the result of `intermediate` or `gated`.
    """

    name = "fused"

    def __init__(self, scales: Fp8Scales | None = None) -> None:
        super().__init__()
        self.scales = scales

    def multiply(self, x: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
        """Apply all linear layers to `x` as one product. See `Blocks.multiply`.

        Attention's backward pass may return the gradients of the results as columns of one tensor.
        Such gradients are multiplied without a copy. Other gradients are concatenated first.
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
        """Split the columns of a joined product into equal parts. See `Blocks.columns`.

        In the backward pass, gradients that are adjacent columns of one tensor are not copied.
        """
        return self._split(product, [product.shape[1] // count] * count)

    @staticmethod
    def _split(joined: Tensor, widths: list[int]) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = _Columns.apply(joined, widths)
        return parts

    def residual_output(
        self,
        x: Tensor,
        residual: Tensor,
        dense: nn.Linear,
        norm: nn.LayerNorm,
        site: DropoutSite | None,
    ) -> Tensor:
        """Compute LayerNorm(dropout(dense(x)) + residual). See `Blocks.residual_output`.

        One kernel computes everything except the matrix product.
        """
        keep, scale = _kept(site, dense.out_features)
        output, alias, y8 = _ResidualOutput.apply(
            *(*self._factors(x, dense), _pop_alias(residual)),
            *(dense.bias, norm.weight, norm.bias, norm.eps, keep, scale),
        )
        output.alias, output.fp8 = alias, y8
        return output  # type: ignore[no-any-return]

    def intermediate(self, hidden: Tensor, dense: nn.Linear) -> Tensor:
        """Compute the GELU of dense(hidden). See `Blocks.intermediate`.

        In FP8, the values are only in the FP8 copy of the result, and the result itself contains
        NaN.
        """
        output, y8 = _Intermediate.apply(*self._factors(hidden, dense), dense.bias)
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
        """Compute residual + dropout(dense(x)) and its LayerNorm. See `Blocks.sum_norm`.

        In FP8, the LayerNorm has an FP8 copy for the next product.
        """
        keep, scale = _kept(site, dense.out_features)
        total, output, y8 = _SumNorm.apply(
            *(*self._factors(x, dense), residual, norm.weight, norm.eps, keep, scale)
        )
        output.fp8 = y8
        return total, output

    def gated(self, hidden: Tensor, dense: nn.Linear) -> Tensor:
        """Compute the gated GELU of dense(hidden). See `Blocks.gated`.

        In FP8, the values are only in the FP8 copy of the result, and the result itself contains
        NaN.
        """
        output, y8 = _Gated.apply(*self._factors(hidden, dense))
        output.fp8 = y8
        return output  # type: ignore[no-any-return]

    def _factors(self, x: Tensor, dense: nn.Linear) -> tuple[Tensor, Tensor | None, Any, Any]:
        """Return a product without its bias, or, in FP8, the tensors and scales to compute it.

        In FP8, the function returns the input, the weight, the input's FP8 copy and the scales.
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
        """Embed words, token types and positions with one kernel. See `Blocks.embed`."""
        keep, scale = _kept(site, norm.weight.shape[0])
        weights = (*(table.weight for table in tables), norm.weight, norm.bias)
        output: Tensor = _EmbeddingNorm.apply(*ids, *weights, norm.eps, keep, scale)
        return output

    def embed_words(
        self, ids: Tensor, table: nn.Embedding, norm: nn.LayerNorm, site: DropoutSite | None
    ) -> Tensor:
        """Embed words with one kernel. See `Blocks.embed_words`."""
        keep, scale = _kept(site, norm.weight.shape[0])
        missing = None, None
        weights = (table.weight, *missing, norm.weight, None)
        output: Tensor = _EmbeddingNorm.apply(ids, *missing, *weights, norm.eps, keep, scale)
        return output

    def masked_lm_loss(
        self, hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor
    ) -> Tensor:
        """Compute the summed masked-LM loss. See `Blocks.masked_lm_loss`.

        Only one tensor [P, V] is allocated, in the dtype of the product. The product adds the bias,
        and the kernel that computes the gradient of the logits also computes that of the bias.
        """
        logits = F.linear(hidden, weight, bias.detach())
        total: Tensor = _CrossEntropySum.apply(logits, bias, labels)
        return total


def _kept(site: DropoutSite | None, channels: int) -> tuple[Tensor | None, float]:
    """Return a dropout site's keep bits (None without dropout) and the scale of kept elements."""
    if site is None:
        return None, 1.0
    return keep_bits(site, channels), scale_of(site.probability)


def _alias(x: Tensor) -> Tensor:
    """Return a tensor on the memory of `x`, so that an autograd function can return `x` twice."""
    return x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


def _pop_alias(x: Tensor) -> Tensor:
    """Return the tensor to use for `x` in a residual sum.

    This tensor is the second output of the LayerNorm that computed `x`, or `x` itself if no
    LayerNorm computed it. Each output has its own gradient, and the LayerNorm's backward pass adds
    both gradients when it reads them. With a single output, autograd would add them in a separate
    pass.
    """
    alias: Tensor = x.__dict__.pop("alias", x)
    return alias


class _Columns(torch.autograd.Function):
    """A split of a tensor into columns. The backward pass joins the gradients (`side_by_side`)."""

    @staticmethod
    def forward(ctx: Any, joined: Tensor, widths: list[int]) -> tuple[Tensor, ...]:
        return torch.split(joined, widths, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return side_by_side(gradients), None


class _ResidualOutput(torch.autograd.Function):
    """The dropout, residual sum and LayerNorm after a matrix product.

    Without FP8, the product is the argument `x`. With FP8, this function computes the product from
    the factors that `FusedBlocks._factors` returns.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        matrix: Tensor | None,
        x8: Fp8Matrix | None,
        plan: Fp8Plan | None,
        residual: Tensor,
        bias: Tensor,
        weight: Tensor,
        norm_bias: Tensor,
        epsilon: float,
        keep: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Fp8Matrix | None]:
        product, transposed, target = _product(x, matrix, x8, plan)
        residual = residual.contiguous()
        output, statistics, rows8 = residual_norm(
            product, bias, residual, weight, norm_bias, epsilon, keep, scale, target
        )
        ctx.save_for_backward(product, bias, residual, weight, statistics, keep, *transposed)
        ctx.plan, ctx.scale = plan, scale
        ctx.set_materialize_grads(False)
        return output, _alias(output), _copy(rows8, target, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        upstream = [each.contiguous() for each in gradients if each is not None]
        product, bias, residual, weight, statistics, keep, *transposed = ctx.saved_tensors
        scales = None if ctx.plan is None else ctx.plan[0]
        target = None if scales is None else scales.target(GRADIENT)
        grad_x, grad_residual, (grad_bias, *grad_norm) = residual_norm_backward(
            upstream, product, bias, residual, weight, statistics, keep, ctx.scale, target
        )
        grad_matrix = None
        if scales is not None and target is not None:
            g8 = with_transpose(grad_x, target)
            grad_x, grad_matrix = product_gradients(g8, transposed, scales)
        others = grad_residual, grad_bias, *grad_norm
        return grad_x, grad_matrix, None, None, *others, None, None, None


class _SumNorm(torch.autograd.Function):
    """The dropout, residual sum and LayerNorm after a product, without biases.

    `_ResidualOutput` describes where the product is computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        matrix: Tensor | None,
        x8: Fp8Matrix | None,
        plan: Fp8Plan | None,
        residual: Tensor,
        weight: Tensor,
        epsilon: float,
        keep: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Fp8Matrix | None]:
        product, transposed, target = _product(x, matrix, x8, plan)
        total, output, statistics, rows8 = sum_norm(
            product, residual.contiguous(), weight, epsilon, keep, scale, target
        )
        ctx.save_for_backward(total, weight, statistics, keep, *transposed)
        ctx.plan, ctx.scale, ctx.dtype = plan, scale, product.dtype
        ctx.set_materialize_grads(False)
        return total, output, _copy(rows8, target, plan)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_sum: Tensor | None, grad_output: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        total, weight, statistics, keep, *transposed = ctx.saved_tensors
        upstream = (
            None if grad_sum is None else grad_sum.contiguous(),
            torch.zeros_like(total) if grad_output is None else grad_output.contiguous(),
        )
        scales = None if ctx.plan is None else ctx.plan[0]
        target = None if scales is None else scales.target(GRADIENT)
        grad_x, grad_residual, grad_weight = sum_norm_backward(
            upstream, total, weight, statistics, keep, ctx.scale, ctx.dtype, target
        )
        grad_matrix = None
        if scales is not None and target is not None:
            g8 = with_transpose(grad_x, target)
            grad_x, grad_matrix = product_gradients(g8, transposed, scales)
        return grad_x, grad_matrix, None, None, grad_residual, grad_weight, None, None, None


class _Gated(torch.autograd.Function):
    """The gated GELU of a product. `_ResidualOutput` describes where the product is computed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, matrix: Tensor | None, x8: Fp8Matrix | None, plan: Fp8Plan | None
    ) -> tuple[Tensor, Fp8Matrix | None]:
        product, transposed, target = _product(x, matrix, x8, plan)
        ctx.save_for_backward(product, *transposed)
        ctx.plan = plan
        if plan is None or target is None:
            return gated(product), None
        y8 = gated_fp8(product, target, transpose=plan[2])
        shape = (len(product), product.shape[1] // 2)
        return product.new_full((), float("nan")).expand(shape), y8

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor | None, ...]:
        product, *transposed = ctx.saved_tensors
        gradient = gradient.contiguous()
        if ctx.plan is None:
            return gated_backward(gradient, product), None, None, None
        scales = ctx.plan[0]
        g8 = gated_fp8_backward(gradient, product, scales.target(GRADIENT))
        return *product_gradients(g8, transposed, scales), None, None


class _Intermediate(torch.autograd.Function):
    """The GELU of a product. `_ResidualOutput` describes where the product is computed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        matrix: Tensor | None,
        x8: Fp8Matrix | None,
        plan: Fp8Plan | None,
        bias: Tensor,
    ) -> tuple[Tensor, Fp8Matrix | None]:
        product, transposed, target = _product(x, matrix, x8, plan)
        ctx.save_for_backward(product, bias, *transposed)
        ctx.plan = plan
        if plan is None or target is None:
            return bias_gelu(product, bias), None
        y8 = bias_gelu_fp8(product, bias, target, transpose=plan[2])
        return product.new_full((), float("nan")).expand_as(product), y8

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor | None, ...]:
        product, bias, *transposed = ctx.saved_tensors
        gradient, grad_matrix = gradient.contiguous(), None
        if ctx.plan is None:
            grad_x, grad_bias = bias_gelu_backward(gradient, product, bias)
        else:
            scales = ctx.plan[0]
            g8, grad_bias = bias_gelu_fp8_backward(gradient, product, bias, scales.target(GRADIENT))
            grad_x, grad_matrix = product_gradients(g8, transposed, scales)
        return grad_x, grad_matrix, None, None, grad_bias


def _product(
    x: Tensor, matrix: Tensor | None, x8: Fp8Matrix | None, plan: Fp8Plan | None
) -> tuple[Tensor, list[Tensor | None], Target | None]:
    """Return a product, the tensors for its FP8 backward pass, and the next product's cast target.

    The arguments come from `FusedBlocks._factors`. Without FP8 the product is `x`, no tensors are
    needed, and the target is None.
    """
    if plan is None or matrix is None:
        return x.contiguous(), [], None
    scales, behind, records = plan
    product, *transposed = multiply_inputs(x, x8, (matrix,), (), scales, records)
    target = None if behind is None else behind.target(INPUT, records=records)
    return product, transposed, target


def _copy(rows8: Tensor | None, target: Target | None, plan: Fp8Plan | None) -> Fp8Matrix | None:
    """Return the FP8 copy of a LayerNorm's result, or None without FP8.

    The copy has a transpose if a backward pass follows.
    """
    if rows8 is None or target is None or plan is None:
        return None
    return with_transpose(rows8, target) if plan[2] else Fp8Matrix(target.unit, rows8, None)


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
        grad_tables, grad_norm = embedding_norm_backward(
            gradient.contiguous(),
            tuple(first_six[:3]),
            tuple(first_six[3:]),
            weight,
            statistics,
            keep,
            ctx.scale,
        )
        grad_weight, *grad_bias = grad_norm
        no_ids = no_options = (None, None, None)
        return *no_ids, *grad_tables, grad_weight, *(grad_bias or (None,)), *no_options


class _CrossEntropySum(torch.autograd.Function):
    """A summed cross-entropy, whose backward pass overwrites the logits with their gradient.

    Overwriting saves memory, and is possible because nothing else reads the logits.
    """

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
        grad_bias = cross_entropy_backward(gradient, logits, labels, statistics, ctx.bias_dtype)
        # torch does not notice a kernel's writes. With the new version number it raises an error if
        # a second backward pass tries to read the overwritten logits.
        torch.autograd.graph.increment_version(logits)
        return logits.detach(), grad_bias, None
