"""The one shape in which sequences reach the model: real tokens only, no padding.

Shape letters: B sequences, T tokens of all sequences, P masked positions of all sequences.
"""

from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpaddedBatch:
    """B sequences laid end to end.

    The two denominators are those of the whole update over all ranks and accumulation steps
    (global loss normalisation), so that a sum over this batch can be scaled without a collective.
    """

    input_ids: Tensor  # int64 [T]
    position_ids: Tensor  # int64 [T]
    token_type_ids: Tensor  # int64 [T]
    cu_seqlens: Tensor  # int32 [B + 1]: sequence i is tokens cu_seqlens[i] .. cu_seqlens[i + 1]
    lengths: tuple[int, ...]  # host copy of the B lengths, so that no layer reads the device
    masked_token_index: Tensor  # int64 [P]: rows of the T tokens
    labels: Tensor  # int64 [P]
    next_sentence_label: Tensor  # int64 [B]
    mlm_denominator: Tensor  # float32 scalar
    nsp_denominator: Tensor  # float32 scalar

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)

    def to(self, device: torch.device) -> Self:
        """The same batch on another device; copies from pinned memory do not block the host."""
        moved = {
            field.name: getattr(self, field.name).to(device, non_blocking=True)
            for field in fields(self)
            if field.name != "lengths"
        }
        return replace(self, **moved)

    def pin_memory(self) -> Self:
        """The same batch in page-locked host memory."""
        pinned = {
            field.name: getattr(self, field.name).pin_memory()
            for field in fields(self)
            if field.name != "lengths"
        }
        return replace(self, **pinned)
