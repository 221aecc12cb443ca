"""Which rows of the last layer are read: first tokens and masked positions.

Shape letters: B sequences, C sequences whose first token is read, T tokens, P masked positions,
R = C + P rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.model.attention_layout import Queries


@dataclass(frozen=True, kw_only=True, slots=True)
class LastRows:
    """The rows as queries of the last layer, and where in them each head finds its own."""

    queries: Queries
    place: Tensor  # int64 [C + P]: of the first tokens, then of the masked positions


def last_rows(batch: UnpaddedBatch, max_length: int, num_first: int) -> LastRows:
    """The R rows of a batch, in the order of its tokens.

    Shapes follow from the batch's shapes alone and nothing is read from the device, so it can be
    captured. Slots of padding are rows as well: a sequence slot without tokens stands for the
    batch's last token, and an unused masked slot for the token it names.

    Args:
        batch: padded to a capacity or not.
        max_length: tokens of the longest sequence that may come.
        num_first: C, the first of the batch's sequences; none where nothing is pooled.
    """
    num_tokens = batch.input_ids.shape[0]
    bounds = batch.cu_seqlens.long()
    first = bounds[:num_first].clamp(max=num_tokens - 1)
    # Stable: where a first token is masked too, the sequence's first row is that of its slot.
    rows, order = torch.cat((first, batch.masked_token_index)).sort(stable=True)
    place = torch.empty_like(order)
    place.scatter_(0, order, torch.arange(len(order), device=order.device))
    lengths = _query_lengths(batch, num_first)
    most = 1 + (max_length if batch.shape is None else batch.shape.max_masked)
    assert max(lengths) <= most
    queries = Queries(
        rows=rows,
        cu_seqlens=torch.searchsorted(rows, bounds, out_int32=True),
        lengths=lengths,
        max_length=most,
    )
    return LastRows(queries=queries, place=place)


def _query_lengths(batch: UnpaddedBatch, num_first: int) -> tuple[int, ...]:
    """How many rows each sequence has; on the host."""
    counts = list(batch.masked_counts)
    assert len(counts) == len(batch.lengths)
    assert sum(counts) == len(batch.masked_token_index)
    last_with_tokens = max(i for i, length in enumerate(batch.lengths) if length)
    for i in range(num_first):
        counts[min(i, last_with_tokens)] += 1
    return tuple(counts)
