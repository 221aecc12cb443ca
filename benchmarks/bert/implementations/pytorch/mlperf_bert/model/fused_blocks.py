"""The fused blocks: matrix products, and around them one Triton kernel in each direction.

A block's product stands outside its autograd function, so that autocast casts what it multiplies;
the kernels take tensors of mixed dtypes and compute in float32 (float64 for float64). In 16 bits
that rounds less often than the reference does. With products in FP8 they write FP8 themselves; what
comes without an FP8 copy (embeddings, chosen rows, attention's context and gradients) is cast by a
kernel of its own. Imported on CUDA only, or in Triton's interpreter.

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
    Fp8Blocks,
    ProductScales,
    multiply_inputs,
    product_gradients,
    take_copy,
)
from mlperf_bert.model.fp8_cast import Fp8Matrix
from mlperf_bert.model.triton_cross_entropy import cross_entropy, cross_entropy_backward
from mlperf_bert.model.triton_fp8 import beside_transpose
from mlperf_bert.model.triton_gelu import (
    bias_gelu,
    bias_gelu_backward,
    bias_gelu_fp8,
    bias_gelu_fp8_backward,
)
from mlperf_bert.model.triton_norm import (
    embedding_norm,
    embedding_norm_backward,
    residual_norm,
    residual_norm_backward,
)


class FusedBlocks(Blocks):
    """See `Blocks`."""

    def multiply(self, x: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
        """See `Blocks`. In one product.

        Where the gradients of the results are the columns of one tensor, as attention's backward
        may leave them, they are multiplied where they are; else they are copied together first.
        """
        if len(layers) == 1:
            return (layers[0](x),)
        weight = torch.cat([layer.weight for layer in layers])
        bias = torch.cat([layer.bias for layer in layers])
        widths = [layer.out_features for layer in layers]
        parts: tuple[Tensor, ...] = _Columns.apply(F.linear(x, weight, bias), widths)  # type: ignore[no-untyped-call]
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
        product = F.linear(x, dense.weight)
        keep, scale = _kept(site, product.shape[1])
        output, again = _ResidualNorm.apply(
            product,
            dense.bias,
            _take_again(residual),
            norm.weight,
            norm.bias,
            norm.eps,
            keep,
            scale,
        )  # type: ignore[no-untyped-call]
        output.again = again
        return output  # type: ignore[no-any-return]

    def intermediate(self, hidden: Tensor, dense: nn.Linear) -> Tensor:
        """See `Blocks`."""
        product = F.linear(hidden, dense.weight)
        output: Tensor = _BiasGelu.apply(product, dense.bias)  # type: ignore[no-untyped-call]
        return output

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

    def masked_lm_loss(
        self, hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor
    ) -> Tensor:
        """See `Blocks`. Of logits, [P, V] is kept once, in the product's dtype.

        The product adds the bias, whose gradient comes from the kernel that makes the logits'.
        """
        logits = F.linear(hidden, weight, bias.detach())
        total: Tensor = _CrossEntropySum.apply(logits, bias, labels)  # type: ignore[no-untyped-call]
        return total


class FusedFp8Blocks(Fp8Blocks, FusedBlocks):
    """See `Blocks`. What `intermediate` returns is for the `residual_output` behind it alone."""

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
        output, again, y8 = _ResidualOutputFp8.apply(
            *(x, take_copy(x), _take_again(residual)),
            *(dense.weight, dense.bias, norm.weight, norm.bias, norm.eps, keep, scale),
            *(self.scales.of(dense), self.scales.behind(dense), torch.is_grad_enabled()),
        )  # type: ignore[no-untyped-call]
        output.again, output.fp8 = again, y8
        return output  # type: ignore[no-any-return]

    def intermediate(self, hidden: Tensor, dense: nn.Linear) -> Tensor:
        """[R, D] -> [R, F] without values: they are in the FP8 copy alone, all else reads NaN."""
        output, y8 = _IntermediateFp8.apply(
            *(hidden, take_copy(hidden), dense.weight, dense.bias),
            *(self.scales.of(dense), self.scales.behind(dense), torch.is_grad_enabled()),
        )  # type: ignore[no-untyped-call]
        output.fp8 = y8
        return output  # type: ignore[no-any-return]


def _kept(site: DropoutSite | None, channels: int) -> tuple[Tensor | None, float]:
    """Keep bits of a dropout, and the scale of what is kept."""
    if site is None:
        return None, 1.0
    return keep_bits(site, channels), scale_of(site.probability)


def _another(x: Tensor) -> Tensor:
    """The same memory as another tensor, for a function that returns it twice."""
    return x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


def _take_again(x: Tensor) -> Tensor:
    """`x` for the residual sum: where a LayerNorm made it, its second output.

    Two outputs have two gradients, which the LayerNorm's backward adds as it reads them; those of
    one output autograd would add in a pass of its own.
    """
    again: Tensor = x.__dict__.pop("again", x)
    return again


class _Columns(torch.autograd.Function):
    """A tensor's columns as several, whose gradients are put together by `side_by_side`."""

    @staticmethod
    def forward(ctx: Any, joined: Tensor, widths: list[int]) -> tuple[Tensor, ...]:
        return torch.split(joined, widths, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return side_by_side(gradients), None


class _ResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        product: Tensor,
        bias: Tensor,
        residual: Tensor,
        weight: Tensor,
        norm_bias: Tensor,
        epsilon: float,
        keep: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        product, residual = product.contiguous(), residual.contiguous()
        output, statistics, _ = residual_norm(
            product, bias, residual, weight, norm_bias, epsilon, keep, scale
        )
        ctx.save_for_backward(product, bias, residual, weight, statistics, keep)
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        return output, _another(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [each.contiguous() for each in gradients if each is not None]
        product, bias, residual, weight, statistics, keep = ctx.saved_tensors
        of_product, of_residual, (of_bias, of_weight, of_norm_bias) = residual_norm_backward(
            given, product, bias, residual, weight, statistics, keep, ctx.scale
        )
        return of_product, of_bias, of_residual, of_weight, of_norm_bias, None, None, None


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Tensor, bias: Tensor) -> Tensor:
        product = product.contiguous()
        ctx.save_for_backward(product, bias)
        return bias_gelu(product, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return bias_gelu_backward(gradient.contiguous(), *ctx.saved_tensors)


class _EmbeddingNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        word_ids: Tensor,
        type_ids: Tensor,
        position_ids: Tensor,
        words: Tensor,
        types: Tensor,
        positions: Tensor,
        weight: Tensor,
        norm_bias: Tensor,
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
        return None, None, None, *of_tables, *of_norm, None, None, None


class _CrossEntropySum(torch.autograd.Function):
    """Nobody else reads the logits, so the gradient may take their place."""

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
        # torch does not see what a kernel writes; told, it refuses a second backward.
        torch.autograd.graph.increment_version(logits)
        return logits.detach(), of_bias, None


class _IntermediateFp8(torch.autograd.Function):
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


class _ResidualOutputFp8(torch.autograd.Function):
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
        return output, _another(output), y8

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
        of_norm = (of_norm_weight, of_norm_bias)
        return of_x, None, of_residual, of_weight, of_bias, *of_norm, *(None,) * 6
