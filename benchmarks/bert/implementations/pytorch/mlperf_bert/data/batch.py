"""The batch in which sequences reach the model: real tokens only, or padded to a capacity.

With padding, every step has the same shapes. Padding tokens form dummy sequences after the real
ones, so that attention covers every row and no real token sees a dummy. Unused masked positions and
sentence pairs have the label IGNORED. Padding adds exactly zero to loss, gradients and accuracy.

Shape letters: B sequences (with padding: those that may be real), T tokens of all of them, P masked
positions of all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from mlperf_bert.data.capacity import StaticShape
from mlperf_bert.data.shards import IntArray, Samples

IGNORED = -100  # label of a slot that only padding fills
DUMMY_LENGTH = 128  # a tile of the attention kernels: shorter sequences would cost as much
NO_SAMPLE = -1  # a dummy sequence's sample id
PADDING_WORD = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpaddedBatch:
    """B sequences laid end to end.

    The loss of the batch is its summed cross-entropies over the two denominators, which come from
    the step plan (`data/balance.py`): averaged over ranks and summed over accumulation steps, it
    is the mean over the whole update.
    """

    input_ids: Tensor  # int64 [T]
    position_ids: Tensor  # int64 [T]
    token_type_ids: Tensor  # int64 [T]
    cu_seqlens: Tensor  # int32 [B + 1]: sequence i is tokens cu_seqlens[i] .. cu_seqlens[i + 1]
    lengths: tuple[int, ...]  # host copy of the B lengths, so no layer reads the device
    masked_counts: tuple[int, ...]  # on the host: masked positions of each sequence
    sample_ids: Tensor  # int64 [B]: sample ids; keys of dropout
    masked_token_index: Tensor  # int64 [P]: rows of the T tokens
    labels: Tensor  # int64 [P], IGNORED in unused slots
    next_sentence_label: Tensor  # int64 [B], or of the first sequences only
    mlm_denominator: Tensor  # float32 scalar
    nsp_denominator: Tensor  # float32 scalar
    shape: StaticShape | None = None  # the shape it was padded to (`pad`); None: not padded

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)

    def to(self, device: torch.device) -> Self:
        """The same batch on another device; copies from pinned memory do not block the host."""
        if device == self.input_ids.device:
            return self
        return self.map_blocks(lambda block: block.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        """The same batch in page-locked host memory.

        torch reuses such memory only after every copy queued from it has finished, so the batch may
        be dropped as soon as its copy is queued.
        """
        return self.map_blocks(Tensor.pin_memory)

    @property
    def block(self) -> Tensor:
        """The whole memory of a batch made by `empty_batch`, uint8 [bytes]."""
        storage = self.input_ids.untyped_storage()
        memory = torch.empty(0, dtype=torch.uint8, device=self.input_ids.device).set_(storage)
        start = self.input_ids.storage_offset() * self.input_ids.element_size()
        last = self.nsp_denominator
        return memory[start : (last.storage_offset() + 1) * last.element_size()]

    def map_blocks(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same batch with each memory block under its tensors replaced by `change(block)`.

        `change` gets a block as uint8 [bytes] and returns one of equal contents. A batch of
        `empty_batch` lies in a single block, so it takes one copy instead of ten.
        """
        changed: dict[int, Tensor] = {}
        tensors: dict[str, Any] = {}
        for field in fields(self):
            tensor = getattr(self, field.name)
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in changed:
                block = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                changed[storage.data_ptr()] = change(block)
            start = tensor.storage_offset() * tensor.element_size()
            part = changed[storage.data_ptr()][start : start + tensor.nbytes]
            tensors[field.name] = part.view(tensor.dtype).view(tensor.shape)
        return replace(self, **tensors)


def empty_batch(
    lengths: tuple[int, ...],
    masked_counts: tuple[int, ...],
    *,
    num_pairs: int | None = None,
    device: torch.device | None = None,
) -> UnpaddedBatch:
    """An uninitialised batch of B sequences and P masked positions in one block of memory.

    The first `num_pairs` sequences (None: all) have a next-sentence label. Without a `device` the
    block is on the host.
    """
    num_sequences, num_tokens = len(lengths), sum(lengths)
    num_pairs = num_sequences if num_pairs is None else num_pairs
    words = [num_tokens] * 3 + [sum(masked_counts)] * 2 + [num_pairs, num_sequences]
    words += [num_sequences // 2 + 1, 1]  # 8-byte words of B + 1 int32, of two float32
    # Each begins at a multiple of 16 bytes, which compiled kernels expect.
    padded = [count + count % 2 for count in words]
    block = torch.empty(sum(padded), dtype=torch.int64, device=device)
    tokens, positions, types, index, labels, next_labels, ids, ends, denominators = (
        part[:count] for part, count in zip(block.split_with_sizes(padded), words, strict=True)
    )
    mlm_denominator, nsp_denominator = denominators.view(torch.float32).unbind()
    return UnpaddedBatch(
        input_ids=tokens,
        position_ids=positions,
        token_type_ids=types,
        cu_seqlens=ends.view(torch.int32)[: num_sequences + 1],
        lengths=lengths,
        masked_counts=masked_counts,
        sample_ids=ids,
        masked_token_index=index,
        labels=labels,
        next_sentence_label=next_labels,
        mlm_denominator=mlm_denominator,
        nsp_denominator=nsp_denominator,
    )


def make_batch(
    samples: Samples, sample_ids: IntArray, *, mlm_denominator: float, nsp_denominator: float
) -> UnpaddedBatch:
    """Lay samples of any integer type, with ids int64 [n], end to end, in order, on the host."""
    batch = empty_batch(tuple(samples.lengths.tolist()), tuple(samples.masked_counts.tolist()))
    starts = np.zeros(len(samples.lengths) + 1, dtype=np.int64)
    np.cumsum(samples.lengths, out=starts[1:])
    position_ids = np.arange(starts[-1]) - np.repeat(starts[:-1], samples.lengths)
    segment_b_start = np.repeat(samples.segment_b_start, samples.lengths)
    masked_starts = np.repeat(starts[:-1], samples.masked_counts)
    batch.input_ids.numpy()[:] = samples.input_ids
    batch.position_ids.numpy()[:] = position_ids
    batch.token_type_ids.numpy()[:] = position_ids >= segment_b_start
    batch.cu_seqlens.numpy()[:] = starts
    batch.sample_ids.numpy()[:] = sample_ids
    batch.masked_token_index.numpy()[:] = masked_starts + samples.masked_positions
    batch.labels.numpy()[:] = samples.masked_ids
    batch.next_sentence_label.numpy()[:] = samples.next_sentence_label
    batch.mlm_denominator.fill_(mlm_denominator)
    batch.nsp_denominator.fill_(nsp_denominator)
    return batch


def pad(batch: UnpaddedBatch, shape: StaticShape) -> UnpaddedBatch:
    """A host batch padded to a shape that holds it, in one block of memory.

    Sequences keep their order, and so do masked positions, with unused ones between them. An unused
    masked position is the last token of its sequence; no sequence has more than `shape.max_masked`
    positions.
    """
    lengths = _padded_lengths(batch.lengths, shape)
    real_counts = _fill_up(np.array(batch.masked_counts), len(lengths))
    unused = _unused_masked(real_counts, lengths, shape)
    padded = empty_batch(
        tuple(lengths.tolist()),
        tuple((real_counts + unused).tolist()),
        num_pairs=shape.sequences,
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
    return replace(padded, shape=shape)


def blank(shape: StaticShape, device: torch.device | None = None) -> UnpaddedBatch:
    """An uninitialised batch of a shape in one block of memory; `device` None means the host."""
    slots = shape.sequences + shape.dummies
    lengths, masked = ((total, *(0,) * (slots - 1)) for total in (shape.tokens, shape.masked))
    batch = empty_batch(lengths, masked, num_pairs=shape.sequences, device=device)
    return replace(batch, shape=shape)


def _padded_lengths(lengths: tuple[int, ...], shape: StaticShape) -> IntArray:
    """The real lengths, dummy lengths of about the same size, and zeros: [B + dummies]."""
    padding = shape.tokens - sum(lengths)
    most = shape.sequences - len(lengths) + shape.dummies
    # As short as slots and tiles allow, because attention costs the square of a length.
    length = max(-(-padding // most), min(DUMMY_LENGTH, shape.max_seqlen))
    count = max(int(shape.least_padding(np.array(len(lengths)))), -(-padding // length))
    padded = _fill_up(np.array(lengths), shape.sequences + shape.dummies)
    if count:
        each, longer = divmod(padding, count)
        padded[len(lengths) : len(lengths) + count] = each
        padded[len(lengths) : len(lengths) + longer] += 1
    return padded


def _unused_masked(real_counts: IntArray, lengths: IntArray, shape: StaticShape) -> IntArray:
    """Unused masked positions to add to each sequence, starting with the last of B."""
    room = np.where(lengths > 0, shape.max_masked - real_counts, 0)
    room[shape.sequences :] = 0
    if empty := int((lengths[: shape.sequences] == 0).sum()):
        room[shape.sequences - empty - 1] -= empty  # their first tokens are the last sequence's
    left = shape.masked - int(real_counts.sum())
    behind = np.cumsum(room[::-1])[::-1] - room  # room in the sequences after each
    unused: IntArray = np.clip(left - behind, 0, room)
    return unused


def _fill_up(values: IntArray, size: int) -> IntArray:
    filled = np.zeros(size, dtype=np.int64)
    filled[: len(values)] = values
    return filled


def _copy(source: torch.Tensor, target: torch.Tensor, otherwise: int) -> None:
    target[: len(source)] = source
    target[len(source) :] = otherwise
