"""What stands around the model's matrix products, as blocks: readable, or fused for a GPU.

A set of blocks is chosen once per model, by `model.kernels`. Every fused block has the signature of
its reference and the same gradients; both drop the elements that `model/dropout.py` says.

Shape letters: T tokens, R rows (some or all of them), D hidden, F feed-forward width, P masked
positions, V vocabulary (padded).
"""

import importlib.util
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.config.sections import KernelsName
from mlperf_bert.model.cross_entropy import cross_entropy_sum
from mlperf_bert.model.dropout import DropoutSite, dropout

MOST_CHANNELS = 4096  # of a row that one program of a GPU normalises in its registers


class Blocks(Protocol):
    """The signatures that all sets of blocks share. Modules are there for their parameters."""

    def residual_output(
        self,
        x: Tensor,
        residual: Tensor,
        dense: nn.Linear,
        norm: nn.LayerNorm,
        site: DropoutSite | None,
    ) -> Tensor:
        """LayerNorm(dropout(dense(x)) + residual): [R, any], [R, D] -> [R, D]."""
        ...

    def intermediate(self, hidden: Tensor, dense: nn.Linear) -> Tensor:
        """GELU (erf, arXiv 1606.08415) of dense(hidden): [R, D] -> [R, F]."""
        ...

    def embed(
        self,
        ids: tuple[Tensor, Tensor, Tensor],
        tables: tuple[nn.Embedding, nn.Embedding, nn.Embedding],
        norm: nn.LayerNorm,
        site: DropoutSite | None,
    ) -> Tensor:
        """dropout(LayerNorm(sum of three embeddings)): int64 [T] each -> [T, D].

        `ids` and `tables` are of words, token types and positions, in this order.
        """
        ...

    def project_qkv(
        self,
        hidden: Tensor,
        wanted: Tensor,
        query: nn.Linear,
        key: nn.Linear,
        value: nn.Linear,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the wanted rows [R, D] of `hidden`, keys and values of all its rows [T, D].

        Where every row is wanted, `wanted` is `hidden` itself. The results [R, D] and [T, D] may be
        columns of one tensor: contiguous along D only.
        """
        ...

    def masked_lm_loss(
        self, hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor
    ) -> Tensor:
        """`cross_entropy_sum` of the logits hidden @ weight.T + bias: a scalar with one backward.

        `hidden` [P, D], `weight` [V, D], `bias` [V], `labels` int64 [P].
        """
        ...


class ReferenceBlocks:
    """Blocks in torch's own operators, for every device and dtype."""

    def residual_output(
        self,
        x: Tensor,
        residual: Tensor,
        dense: nn.Linear,
        norm: nn.LayerNorm,
        site: DropoutSite | None,
    ) -> Tensor:
        """See Blocks."""
        normalised: Tensor = norm(dropout(dense(x), site) + residual)
        return normalised

    def intermediate(self, hidden: Tensor, dense: nn.Linear) -> Tensor:
        """See Blocks."""
        return F.gelu(dense(hidden))

    def embed(
        self,
        ids: tuple[Tensor, Tensor, Tensor],
        tables: tuple[nn.Embedding, nn.Embedding, nn.Embedding],
        norm: nn.LayerNorm,
        site: DropoutSite | None,
    ) -> Tensor:
        """See Blocks."""
        # Summed in the order of `transformers`, so that float32 results are the same to the bit.
        words, types, positions = (table(of) for table, of in zip(tables, ids, strict=True))
        return dropout(norm(words + types + positions), site)

    def project_qkv(
        self,
        hidden: Tensor,
        wanted: Tensor,
        query: nn.Linear,
        key: nn.Linear,
        value: nn.Linear,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Blocks. On a CPU one product of all three weights was no faster."""
        return query(wanted), key(hidden), value(hidden)

    def masked_lm_loss(
        self, hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor
    ) -> Tensor:
        """See Blocks."""
        return cross_entropy_sum(F.linear(hidden, weight, bias), labels)


def choose_blocks(name: KernelsName, device: torch.device, hidden_size: int) -> Blocks:
    """The blocks of that name; "auto" is "fused" where that can run, else "reference".

    Args:
        name: value of model.kernels.
        device: where the model lives.
        hidden_size: D, at most 4,096 for fused blocks.

    Raises:
        ConfigError: "fused" where its kernels cannot run.
    """
    has_triton = importlib.util.find_spec("triton") is not None
    can_run_fused = device.type == "cuda" and has_triton and hidden_size <= MOST_CHANNELS
    if name == "fused" and not can_run_fused:
        raise ConfigError(
            "model.kernels",
            f"'fused' cannot run on {device.type} with hidden size {hidden_size}"
            + ("" if has_triton else " and without triton"),
            f"use 'reference' (or a CUDA device with triton, and at most {MOST_CHANNELS} channels)",
        )
    if name == "reference" or not can_run_fused:
        return ReferenceBlocks()
    # Imported here, because elsewhere nothing needs triton.
    from mlperf_bert.model.fused_blocks import FusedBlocks

    return FusedBlocks()


def side_by_side(parts: tuple[Tensor, ...]) -> Tensor:
    """[R, sum of widths] of parts [R, width]; without a copy where they lie so already."""
    first, width = parts[0], sum(part.shape[1] for part in parts)
    place = first.storage_offset()
    for part in parts:
        is_next = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not is_next or part.storage_offset() != place or part.stride() != (width, 1):
            return torch.cat(parts, dim=1)
        place += part.shape[1]
    return first.as_strided((first.shape[0], width), (width, 1))
