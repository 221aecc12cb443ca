"""The one shape in which sequences reach the model: real tokens only, no padding.

Shape letters: B sequences, T tokens of all sequences, P masked positions of all sequences.
"""

from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from mlperf_bert.data.shards import Samples


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpaddedBatch:
    """B sequences laid end to end.

    The loss of the batch is its summed cross-entropies over the two denominators, which come from
    the step plan (`data/step_plan.py`): averaged over ranks and summed over accumulation steps, it
    is the mean over the whole update.
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


def make_batch(
    samples: Samples, *, mlm_denominator: float, nsp_denominator: float
) -> UnpaddedBatch:
    """Lay samples end to end, in their order, on the host."""
    starts = np.zeros(len(samples.lengths) + 1, dtype=np.int64)
    np.cumsum(samples.lengths, out=starts[1:])
    position_ids = np.arange(starts[-1]) - np.repeat(starts[:-1], samples.lengths)
    segment_b_start = np.repeat(samples.segment_b_start, samples.lengths)
    masked_starts = np.repeat(starts[:-1], samples.masked_counts)
    return UnpaddedBatch(
        input_ids=torch.from_numpy(samples.input_ids),
        position_ids=torch.from_numpy(position_ids),
        token_type_ids=torch.from_numpy((position_ids >= segment_b_start).astype(np.int64)),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        lengths=tuple(samples.lengths.tolist()),
        masked_token_index=torch.from_numpy(masked_starts + samples.masked_positions),
        labels=torch.from_numpy(samples.masked_ids),
        next_sentence_label=torch.from_numpy(samples.next_sentence_label),
        mlm_denominator=torch.tensor(mlm_denominator, dtype=torch.float32),
        nsp_denominator=torch.tensor(nsp_denominator, dtype=torch.float32),
    )
