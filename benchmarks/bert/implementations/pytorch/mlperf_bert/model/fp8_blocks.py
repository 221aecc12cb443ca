"""The readable blocks with the encoder's matrix products in FP8, for every device that has it.

Shape letters: T tokens, R rows (some or all of them), D hidden, F feed-forward width.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlperf_bert.config.sections import ModelSection
from mlperf_bert.model.blocks import Blocks, ReferenceBlocks, choose_blocks
from mlperf_bert.model.dropout import DropoutSite, dropout
from mlperf_bert.model.fp8 import Fp8Scales, ProductScales, check_fp8, product
from mlperf_bert.model.fp8_cast import Fp8Matrix

PRODUCTS_PER_LAYER = 4  # query, key and value; attention's output; both of the feed-forward half


class Fp8Blocks(ReferenceBlocks):
    """See `Blocks`. Embeddings, heads and pooler stay as they are."""

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
        normalised: Tensor = norm(
            dropout(_product(self._scales.of(dense), x, (dense,))[0], site) + residual
        )
        return normalised

    def intermediate(self, hidden: Tensor, dense: nn.Linear) -> Tensor:
        """See `Blocks`."""
        return F.gelu(_product(self._scales.of(dense), hidden, (dense,))[0])

    def project_qkv(
        self,
        hidden: Tensor,
        wanted: Tensor,
        query: nn.Linear,
        key: nn.Linear,
        value: nn.Linear,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Blocks`."""
        return project_qkv_fp8(self._scales.of(query), hidden, wanted, query, key, value)


def project_qkv_fp8(
    scales: ProductScales,
    hidden: Tensor,
    wanted: Tensor,
    query: nn.Linear,
    key: nn.Linear,
    value: nn.Linear,
    hidden8: Fp8Matrix | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Blocks`. One product, or two where queries are wanted of some rows only.

    `hidden8` is `hidden` in FP8 where it has been cast under these scales.
    """
    if wanted is hidden:
        q, k, v = _product(scales, hidden, (query, key, value), hidden8)
    else:
        (q,) = _product(scales, wanted, (query,))
        k, v = _product(scales, hidden, (key, value), hidden8)
    return q, k, v


def _product(
    scales: ProductScales, x: Tensor, layers: Sequence[nn.Linear], x8: Fp8Matrix | None = None
) -> tuple[Tensor, ...]:
    """[R, any] by every layer."""
    weights, biases = [each.weight for each in layers], [each.bias for each in layers]
    return product(x, weights, biases, scales, x8)


def choose_fp8_blocks(config: ModelSection, device: torch.device, scales: Fp8Scales) -> Blocks:
    """Those of model.kernels ("auto" as in `choose_blocks`) with products in FP8.

    Raises:
        ConfigError: FP8 products, or fused blocks, cannot run.
    """
    check_fp8(config, device)
    chosen = choose_blocks(config.kernels, device, config.hidden_size)
    if isinstance(chosen, ReferenceBlocks):
        return Fp8Blocks(scales)
    # Imported here, because elsewhere nothing needs triton.
    from mlperf_bert.model.fused_fp8_blocks import FusedFp8Blocks

    return FusedFp8Blocks(scales)


def products_of(layers: Iterable[Any]) -> list[tuple[nn.Linear, ...]]:
    """The layers that each product of the encoder (its `EncoderLayer`s) is made of, in order.

    All queries, keys and values of a layer are one product, as they have one input.
    """
    return [
        linears
        for layer in layers
        for linears in (
            (layer.attention.self.query, layer.attention.self.key, layer.attention.self.value),
            (layer.attention.output.dense,),
            (layer.intermediate.dense,),
            (layer.output.dense,),
        )
    ]
