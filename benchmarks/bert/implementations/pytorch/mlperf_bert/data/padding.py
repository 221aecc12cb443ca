"""A batch padded to a capacity, so that every step has the same shapes.

Padding tokens form dummy sequences behind the real ones, so that attention covers every row and no
real token sees one. Masked positions and sentence pairs that are not used have the label IGNORED.
Padding adds exactly zero to loss, gradients and accuracy.

Shape letters: b real sequences, B sequences that may be real, T tokens, P masked positions.
"""

import numpy as np
import torch

from mlperf_bert.data.batch import IGNORED, UnpaddedBatch, empty_batch
from mlperf_bert.data.capacity import StaticShape
from mlperf_bert.data.permutation import Int64Array

DUMMY_LENGTH = 128  # a tile of the attention kernels: shorter ones would cost as much each
NO_SAMPLE = -1  # a dummy sequence's sample id
PADDING_WORD = 0


def pad(batch: UnpaddedBatch, shape: StaticShape, *, pin_memory: bool = False) -> UnpaddedBatch:
    """An unpadded batch on the host, padded to a shape that holds it, in one block of memory.

    Sequences keep their order; masked positions too, with unused ones between them. An unused
    masked position is the last token of its sequence, of which none has more than
    `shape.max_masked`.
    """
    lengths = _padded_lengths(batch.lengths, shape)
    real_counts = _fill_up(np.array(batch.masked_counts), len(lengths))
    unused = _unused_masked(real_counts, shape)
    padded = empty_batch(
        tuple(lengths.tolist()),
        tuple((real_counts + unused).tolist()),
        num_pairs=shape.sequences,
        pin_memory=pin_memory,
    )
    num_tokens = batch.input_ids.shape[0]
    starts = np.cumsum(lengths) - lengths
    _copy(batch.input_ids, padded.input_ids, PADDING_WORD)
    _copy(batch.token_type_ids, padded.token_type_ids, 0)
    padded.position_ids.numpy()[:num_tokens] = batch.position_ids.numpy()
    places = np.arange(num_tokens, shape.tokens)
    padded.position_ids.numpy()[num_tokens:] = places - np.repeat(starts, lengths)[num_tokens:]
    padded.cu_seqlens[0] = 0
    padded.cu_seqlens.numpy()[1:] = np.cumsum(lengths)
    _copy(batch.sample_ids, padded.sample_ids, NO_SAMPLE)
    _copy(batch.next_sentence_label, padded.next_sentence_label, IGNORED)
    places = np.arange(batch.labels.shape[0]) + np.repeat(np.cumsum(unused) - unused, real_counts)
    ends = starts + lengths - 1
    padded.masked_token_index.numpy()[:] = np.repeat(ends, real_counts + unused)
    padded.masked_token_index.numpy()[places] = batch.masked_token_index.numpy()
    padded.labels.fill_(IGNORED)
    padded.labels.numpy()[places] = batch.labels.numpy()
    padded.mlm_denominator.copy_(batch.mlm_denominator)
    padded.nsp_denominator.copy_(batch.nsp_denominator)
    return padded.padded_to(shape)


def _padded_lengths(lengths: tuple[int, ...], shape: StaticShape) -> Int64Array:
    """The real lengths, those of dummies of about the same length, and zeros: [B + dummies]."""
    padding, free = shape.tokens - sum(lengths), shape.sequences - len(lengths)
    most = free + shape.dummies
    # As short as the slots allow, but for tiles: attention costs the square of a length.
    length = max(-(-padding // most), min(DUMMY_LENGTH, shape.max_seqlen))
    count = max(free, -(-padding // length))
    padded = _fill_up(np.array(lengths), shape.sequences + shape.dummies)
    if count:
        each, longer = divmod(padding, count)
        padded[len(lengths) : len(lengths) + count] = each
        padded[len(lengths) : len(lengths) + longer] += 1
    return padded


def _unused_masked(real_counts: Int64Array, shape: StaticShape) -> Int64Array:
    """How many masked positions are added to each sequence: to the last of B first."""
    room = np.zeros_like(real_counts)
    room[: shape.sequences] = shape.max_masked - real_counts[: shape.sequences]
    left = shape.masked - int(real_counts.sum())
    behind = np.cumsum(room[::-1])[::-1] - room  # room of the sequences after each
    unused: Int64Array = np.clip(left - behind, 0, room)
    return unused


def _fill_up(values: Int64Array, size: int) -> Int64Array:
    filled = np.zeros(size, dtype=np.int64)
    filled[: len(values)] = values
    return filled


def _copy(source: torch.Tensor, target: torch.Tensor, otherwise: int) -> None:
    target[: len(source)] = source
    target[len(source) :] = otherwise
