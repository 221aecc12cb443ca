"""The fused blocks: torch's matrix products, and around them one Triton kernel in each direction.

A block's product stands outside its autograd function, so that autocast casts what it multiplies;
the kernels take tensors of mixed dtypes and compute in float32 (float64 for float64). In 16 bits
that rounds less often than the reference does. Imported on CUDA only, or in Triton's interpreter.

Shape letters: T tokens, R rows, D hidden, P masked positions, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mlperf_bert.model.blocks import side_by_side
from mlperf_bert.model.dropout import DropoutSite, keep_bits, scale_of
from mlperf_bert.model.triton_cross_entropy import cross_entropy, cross_entropy_backward
from mlperf_bert.model.triton_embedding import embedding_norm, embedding_norm_backward
from mlperf_bert.model.triton_gelu import bias_gelu, bias_gelu_backward
from mlperf_bert.model.triton_norm import residual_norm, residual_norm_backward


class FusedBlocks:
    """See `Blocks`."""

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
        keep, scale = kept(site, product.shape[1])
        output, again = _ResidualNorm.apply(
            product, dense.bias, take_again(residual), norm.weight, norm.bias, norm.eps, keep, scale
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
        ids: tuple[Tensor, Tensor, Tensor],
        tables: tuple[nn.Embedding, nn.Embedding, nn.Embedding],
        norm: nn.LayerNorm,
        site: DropoutSite | None,
    ) -> Tensor:
        """See `Blocks`."""
        keep, scale = kept(site, norm.weight.shape[0])
        output: Tensor = _EmbeddingNorm.apply(
            *ids,
            *(table.weight for table in tables),
            norm.weight,
            norm.bias,
            norm.eps,
            keep,
            scale,
        )  # type: ignore[no-untyped-call]
        return output

    def project_qkv(
        self,
        hidden: Tensor,
        wanted: Tensor,
        query: nn.Linear,
        key: nn.Linear,
        value: nn.Linear,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Blocks`. One product, or two where not all rows are wanted.

        Where the gradients of the results are the columns of one tensor, as attention's backward
        may leave them, they are multiplied where they are; else they are copied together first.
        """
        if wanted is hidden:
            q, k, v = _project(hidden, query, key, value)
        else:
            q, (k, v) = query(wanted), _project(hidden, key, value)
        return q, k, v

    def masked_lm_loss(
        self, hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor
    ) -> Tensor:
        """See `Blocks`. Of logits, [P, V] is kept once, in the product's dtype.

        The product adds the bias, whose gradient comes from the kernel that makes the logits'.
        """
        logits = F.linear(hidden, weight, bias.detach())
        total: Tensor = _CrossEntropySum.apply(logits, bias, labels)  # type: ignore[no-untyped-call]
        return total


def kept(site: DropoutSite | None, channels: int) -> tuple[Tensor | None, float]:
    """Keep bits of a dropout, and the scale of what is kept."""
    if site is None:
        return None, 1.0
    return keep_bits(site, channels), scale_of(site.probability)


def another(x: Tensor) -> Tensor:
    """The same memory as another tensor, for a function that returns it twice."""
    return x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


def take_again(x: Tensor) -> Tensor:
    """`x` for the residual sum: where a LayerNorm made it, its second output.

    Two outputs have two gradients, which the LayerNorm's backward adds as it reads them; those of
    one output autograd would add in a pass of its own.
    """
    again: Tensor = x.__dict__.pop("again", x)
    return again


def _project(hidden: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """[T, D] by every layer, in one product."""
    weight = torch.cat([layer.weight for layer in layers])
    bias = torch.cat([layer.bias for layer in layers])
    widths = [layer.out_features for layer in layers]
    parts: tuple[Tensor, ...] = _Columns.apply(F.linear(hidden, weight, bias), widths)  # type: ignore[no-untyped-call]
    return parts


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
        return output, another(output)

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
