"""The windows of each update, cut into microbatches, and the batches made of them.

One plan serves every engine, a function of lengths and settings: every rank makes all of it before
the first update and can build any microbatch, so only hidden states travel. The cut is that of the
presort data plane (`data/balance.py`): equal counts, similar tokens.

Shape letters: U updates, M microbatches of an update, B windows of a microbatch, T tokens of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bert_tools.squad.settings import SquadSettings
from bert_tools.squad.windows import Windows
from mlperf_bert.data.balance import Balance
from mlperf_bert.data.batch import UnpaddedBatch, empty_batch
from mlperf_bert.data.sampler import Int64Array, permute
from mlperf_bert.errors import ConfigError
from mlperf_bert.model.blocks import precise
from mlperf_bert.seeds import derive_seed

_BY_TOKENS = Balance(policy="presort_global")
WINDOWS_AT_ONCE = 32  # windows in a batch of an evaluation


MOST_SAMPLES = 2**27  # of a run: their numbers fill a GB


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """U updates of M microbatches of B windows."""

    windows: Int64Array  # [U, M, B]: numbers of windows
    tokens: Int64Array  # [U, M]

    @classmethod
    def make(cls, lengths: Int64Array, settings: SquadSettings) -> Self:
        """Each epoch is a permutation of all windows; epochs follow each other without a gap.

        `lengths` are the tokens of each window. Raises ConfigError for more than MOST_SAMPLES.
        """
        updates, batch = settings.num_updates(len(lengths)), settings.global_batch
        if updates * batch > MOST_SAMPLES:
            problem = f"is {updates:,} of {batch:,} samples, more than {MOST_SAMPLES:,} in all"
            raise ConfigError("--updates", problem, "lower it")
        key = derive_seed(settings.seed, "squad order")
        in_epoch = np.arange(len(lengths), dtype=np.int64)
        epochs = range(-(-updates * batch // len(lengths)))
        order = np.concatenate([permute(in_epoch, len(lengths), (key, each)) for each in epochs])
        drawn = order[: updates * batch].reshape(updates, batch)
        windows = np.stack([_cut(each, lengths, settings.microbatches) for each in drawn])
        return cls(windows, lengths[windows].sum(axis=2))


def _cut(drawn: Int64Array, lengths: Int64Array, microbatches: int) -> Int64Array:
    """The windows of an update as [M, B], similar tokens in each row."""
    tokens = lengths[drawn].astype(np.float64)
    assignment = _BY_TOKENS(tokens.reshape(microbatches, 1, -1))
    return drawn[assignment.indices].reshape(microbatches, -1)


def evaluation_batches(lengths: Int64Array) -> list[Int64Array]:
    """All windows, the longest first, in batches of WINDOWS_AT_ONCE."""
    order = np.argsort(-lengths, kind="stable")
    return [
        order[first : first + WINDOWS_AT_ONCE] for first in range(0, len(order), WINDOWS_AT_ONCE)
    ]


@dataclass(frozen=True, slots=True)
class SpanBatch:
    """B windows laid end to end, without masked positions, and their answers."""

    tokens: UnpaddedBatch
    starts: Tensor  # int64 [B]: within each window
    ends: Tensor  # int64 [B]: within each window, the answer's last token

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return sum(self.tokens.lengths)

    def per_token(self, of_windows: Tensor) -> Tensor:
        """Repeat a value of each window for its tokens, [B] -> [T]."""
        lengths = self.tokens.cu_seqlens.diff()
        return of_windows.repeat_interleave(lengths, output_size=self.num_tokens)

    def to(self, device: torch.device) -> Self:
        """The same batch on another device."""
        if device == self.starts.device:
            return self
        starts, ends = (each.to(device, non_blocking=True) for each in (self.starts, self.ends))
        return replace(self, tokens=self.tokens.to(device), starts=starts, ends=ends)


class WindowReader:
    """Makes microbatches of the windows of a set."""

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        self._first_tokens = np.cumsum(windows.lengths) - windows.lengths

    def batch(self, numbers: Sequence[int] | Int64Array) -> SpanBatch:
        """The windows of these numbers, in their order, on the host."""
        chosen = np.asarray(numbers, dtype=np.int64)
        windows = self._windows
        lengths = windows.lengths[chosen]
        batch = empty_batch(tuple(lengths.tolist()), (0,) * len(chosen), num_pairs=0)
        places = self.places(chosen)
        positions = places - np.repeat(self._first_tokens[chosen], lengths)
        batch.input_ids.numpy()[:] = windows.input_ids[places]
        batch.position_ids.numpy()[:] = positions
        is_context = positions >= np.repeat(windows.segment_b_start[chosen], lengths)
        batch.token_type_ids.numpy()[:] = is_context
        batch.cu_seqlens[0] = 0
        batch.cu_seqlens.numpy()[1:] = np.cumsum(lengths)
        batch.sample_ids.numpy()[:] = chosen
        batch.mlm_denominator.fill_(1.0)
        batch.nsp_denominator.fill_(1.0)
        answers = (torch.from_numpy(each[chosen]) for each in (windows.starts, windows.ends))
        return SpanBatch(batch, *answers)

    def places(self, numbers: Int64Array) -> Int64Array:
        """Positions of these windows' tokens among those of all windows: int64 [T]."""
        lengths = self._windows.lengths[numbers]
        ends = np.cumsum(lengths)
        within: Int64Array = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        return within + np.repeat(self._first_tokens[numbers], lengths)


def span_loss_sum(scores: Tensor, batch: SpanBatch) -> Tensor:
    """Sum over windows of (cross-entropy of the start + of the end) / 2, in nats; a scalar.

    Each is over the real tokens of the window (BERT, arXiv 1810.04805, section 4.2). The published
    code and `transformers` also give a share to the padding after a window; here there is none.
    `scores` [T, 2] are those of the answer's first and last token.
    """
    tokens = batch.tokens
    shape = (2, len(tokens.lengths), tokens.max_seqlen)
    window = batch.per_token(torch.arange(shape[1], device=scores.device))
    padded = precise(scores.new_empty(0)).new_full(shape, float("-inf"))
    padded[:, window, tokens.position_ids] = precise(scores).T
    answers = torch.stack([batch.starts, batch.ends])
    return F.cross_entropy(padded.flatten(0, 1), answers.flatten(), reduction="sum") / 2
