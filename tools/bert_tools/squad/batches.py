"""Plan which windows each update trains on, cut them into micro-batches, and build the batches.

All engines use the same plan, which depends only on lengths and settings. Every rank computes the
whole plan before the first update and can build any micro-batch, so a pipeline needs to send only
hidden states between ranks. The presort policy of `data/balance.py` gives all micro-batches the
same number of windows and similar numbers of tokens.

Shape letters: U updates, M micro-batches of an update, B windows of a micro-batch, T tokens of
these windows.
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
WINDOWS_AT_ONCE = 32  # windows per batch of an evaluation
MOST_SAMPLES = 2**27  # maximum samples of a run, because their numbers need 1 GiB of memory


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """The windows of every update: U updates of M micro-batches of B windows."""

    windows: Int64Array  # [U, M, B], numbers of windows
    tokens: Int64Array  # [U, M]

    @classmethod
    def make(cls, lengths: Int64Array, settings: SquadSettings) -> Self:
        """Plan all updates of a run.

        Each epoch trains on all windows in a new random order, and an update may span two epochs.
        If the run measures noise, each half of an update's micro-batches has half of the windows,
        chosen at random.
        `lengths` are the token counts of the windows. Raises ConfigError if the run has more than
        MOST_SAMPLES samples.
        """
        updates, batch = settings.num_updates(len(lengths)), settings.global_batch
        if updates * batch > MOST_SAMPLES:
            problem = f"needs {updates * batch:,} samples, but the limit is {MOST_SAMPLES:,}"
            raise ConfigError("--updates", problem, "lower --updates or --epochs")
        key = derive_seed(settings.seed, "squad order")
        in_epoch = np.arange(len(lengths), dtype=np.int64)
        epochs = range(-(-updates * batch // len(lengths)))
        order = np.concatenate([permute(in_epoch, len(lengths), (key, each)) for each in epochs])
        drawn = order[: updates * batch].reshape(updates, batch)
        # Sorting by length would make two halves differ by more than noise, so cut each by itself.
        halves = drawn.reshape(updates, 2 if settings.noise_every else 1, -1)
        count = settings.microbatches // halves.shape[1]
        windows = np.stack(
            [np.concatenate([_cut(half, lengths, count) for half in each]) for each in halves]
        )
        return cls(windows, lengths[windows].sum(axis=2))


def _cut(drawn: Int64Array, lengths: Int64Array, microbatches: int) -> Int64Array:
    """Divide the windows of an update into micro-batches [M, B] with similar token counts.

    `drawn` has the numbers of the windows, and `lengths` the token counts of all windows.
    """
    tokens = lengths[drawn].astype(np.float64)
    assignment = _BY_TOKENS(tokens.reshape(microbatches, 1, -1))
    return drawn[assignment.indices].reshape(microbatches, -1)


def evaluation_batches(lengths: Int64Array) -> list[Int64Array]:
    """Return batches of at most WINDOWS_AT_ONCE window numbers, longest windows first."""
    order = np.argsort(-lengths, kind="stable")
    return [
        order[first : first + WINDOWS_AT_ONCE] for first in range(0, len(order), WINDOWS_AT_ONCE)
    ]


@dataclass(frozen=True, slots=True)
class SpanBatch:
    """A micro-batch of B windows, concatenated without padding, and their answers."""

    tokens: UnpaddedBatch
    starts: Tensor  # int64 [B], the answer's first token within each window
    ends: Tensor  # int64 [B], the answer's last token within each window

    @property
    def num_tokens(self) -> int:
        """Return the total number of tokens, T."""
        return sum(self.tokens.lengths)

    def per_token(self, of_windows: Tensor) -> Tensor:
        """Expand one value per window [B] to one value per token [T]."""
        lengths = self.tokens.cu_seqlens.diff()
        return of_windows.repeat_interleave(lengths, output_size=self.num_tokens)

    def to(self, device: torch.device) -> Self:
        """Return a copy of the batch on a device, or the batch itself if it is already there."""
        if device == self.starts.device:
            return self
        starts, ends = (each.to(device, non_blocking=True) for each in (self.starts, self.ends))
        return replace(self, tokens=self.tokens.to(device), starts=starts, ends=ends)


class WindowReader:
    """A builder of micro-batches from given windows of a question set."""

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        self._first_tokens = np.cumsum(windows.lengths) - windows.lengths

    def batch(self, numbers: Sequence[int] | Int64Array) -> SpanBatch:
        """Build a batch on the host from the windows with these numbers, in this order."""
        chosen = np.asarray(numbers, dtype=np.int64)
        windows = self._windows
        lengths = windows.lengths[chosen]
        batch = empty_batch(tuple(lengths.tolist()), (0,) * len(chosen), num_pairs=0)
        of_all = self.positions(chosen)
        within = of_all - np.repeat(self._first_tokens[chosen], lengths)
        batch.input_ids.numpy()[:] = windows.input_ids[of_all]
        batch.position_ids.numpy()[:] = within
        is_context = within >= np.repeat(windows.segment_b_start[chosen], lengths)
        batch.token_type_ids.numpy()[:] = is_context
        batch.cu_seqlens[0] = 0
        batch.cu_seqlens.numpy()[1:] = np.cumsum(lengths)
        batch.sample_ids.numpy()[:] = chosen
        batch.mlm_denominator.fill_(1.0)
        batch.nsp_denominator.fill_(1.0)
        answers = (torch.from_numpy(each[chosen]) for each in (windows.starts, windows.ends))
        return SpanBatch(batch, *answers)

    def positions(self, numbers: Int64Array) -> Int64Array:
        """Return the indices into `Windows.input_ids` of the tokens of these windows, int64 [T]."""
        lengths = self._windows.lengths[numbers]
        ends = np.cumsum(lengths)
        within: Int64Array = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        return within + np.repeat(self._first_tokens[numbers], lengths)


def span_loss_sum(scores: Tensor, batch: SpanBatch) -> Tensor:
    """Return the sum of the windows' losses, in nats.

    The loss of a window is the mean of two cross-entropies over its tokens, one for the answer's
    first token and one for its last token (BERT, arXiv 1810.04805, section 4.2). In the published
    code and in `transformers`, the cross-entropies also cover the padding after a window, but this
    batch has no padding. `scores` [T, 2] are each token's scores as the answer's first and last
    token.
    """
    tokens = batch.tokens
    shape = (2, len(tokens.lengths), tokens.max_seqlen)
    window = batch.per_token(torch.arange(shape[1], device=scores.device))
    padded = precise(scores.new_empty(0)).new_full(shape, float("-inf"))
    padded[:, window, tokens.position_ids] = precise(scores).T
    answers = torch.stack([batch.starts, batch.ends])
    return F.cross_entropy(padded.flatten(0, 1), answers.flatten(), reduction="sum") / 2
