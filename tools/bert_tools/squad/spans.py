"""A microbatch of question windows: unpadded tokens, and where each window's answer is.

Shape letters: B windows, T tokens of all of them, S tokens of the longest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mlperf_bert.data.batch import UnpaddedBatch, empty_batch
from mlperf_bert.model.cross_entropy import precise

Int64Array = NDArray[np.int64]


class SpanWindows(Protocol):
    """What training reads of windows (`squad/windows.py`): W of them, laid end to end."""

    @property
    def input_ids(self) -> Int64Array:
        """Token ids [T of all]."""

    @property
    def lengths(self) -> Int64Array:
        """Tokens of each [W]."""

    @property
    def segment_b_start(self) -> Int64Array:
        """First token of each one's context [W]."""

    @property
    def starts(self) -> Int64Array:
        """The answer's first token within each [W]; 0, which is [CLS], where it has none."""

    @property
    def ends(self) -> Int64Array:
        """The answer's last token within each [W]."""


@dataclass(frozen=True, slots=True)
class SpanBatch:
    """B windows laid end to end, without masked positions, and their answers."""

    tokens: UnpaddedBatch
    starts: Tensor  # int64 [B]: within each window
    ends: Tensor  # int64 [B]: within each window, the answer's last token

    @property
    def num_windows(self) -> int:
        """B."""
        return len(self.tokens.lengths)

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(self.tokens.lengths)

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        if device == self.starts.device:
            return self
        starts, ends = (each.to(device, non_blocking=True) for each in (self.starts, self.ends))
        return replace(self, tokens=self.tokens.to(device), starts=starts, ends=ends)


class WindowReader:
    """Makes microbatches of the windows of a set."""

    def __init__(self, windows: SpanWindows) -> None:
        self._windows = windows
        self._first_tokens = np.cumsum(windows.lengths) - windows.lengths

    def batch(self, numbers: Sequence[int] | Int64Array) -> SpanBatch:
        """The windows of these numbers, in their order, on the host."""
        chosen = np.asarray(numbers, dtype=np.int64)
        windows = self._windows
        lengths = windows.lengths[chosen].astype(np.int64)
        batch = empty_batch(tuple(lengths.tolist()), (0,) * len(chosen), num_pairs=0)
        ends = np.cumsum(lengths)
        positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        places = self.places(chosen)
        is_context = positions >= np.repeat(windows.segment_b_start[chosen], lengths)
        batch.input_ids.numpy()[:] = windows.input_ids[places]
        batch.position_ids.numpy()[:] = positions
        batch.token_type_ids.numpy()[:] = is_context
        batch.cu_seqlens[0] = 0
        batch.cu_seqlens.numpy()[1:] = ends
        batch.sample_ids.numpy()[:] = chosen
        batch.mlm_denominator.fill_(1.0)
        batch.nsp_denominator.fill_(1.0)
        return SpanBatch(
            batch,
            torch.from_numpy(windows.starts[chosen].astype(np.int64)),
            torch.from_numpy(windows.ends[chosen].astype(np.int64)),
        )

    def places(self, numbers: Int64Array) -> Int64Array:
        """Where the tokens of these windows stand among those of all: int64 [T]."""
        lengths = self._windows.lengths[numbers]
        ends = np.cumsum(lengths)
        within: Int64Array = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        return within + np.repeat(self._first_tokens[numbers], lengths)


def span_loss_sum(scores: Tensor, batch: SpanBatch) -> Tensor:
    """Sum over windows of (cross-entropy of the start + of the end) / 2, in nats; a scalar.

    Each is over the real tokens of the window (BERT, arXiv 1810.04805, section 4.2). The published
    code and `transformers` also give the padding behind a window a share; here there is none.

    Args:
        scores: [T, 2], of being the first and of being the last token of the answer.
        batch: of the same tokens.
    """
    tokens = batch.tokens
    window = torch.arange(batch.num_windows, device=scores.device).repeat_interleave(
        tokens.cu_seqlens.diff(), output_size=batch.num_tokens
    )
    shape = (2, batch.num_windows, tokens.max_seqlen)
    padded = precise(scores.new_empty(0)).new_full(shape, float("-inf"))
    padded[:, window, tokens.position_ids] = precise(scores).T
    answers = torch.stack([batch.starts, batch.ends])
    return F.cross_entropy(padded.flatten(0, 1), answers.flatten(), reduction="sum") / 2
