"""Create batches for the model, either with real tokens only or padded to a capacity.

Padding gives the batches of all steps the same shapes. The padding tokens form dummy sequences
after the real ones, so that attention covers every token and no real token attends to a padding
token. Unused masked positions and sentence pairs have the label IGNORED. Padding therefore adds
exactly zero to the loss, the gradients and the accuracy.

Shape letters: B sequences (in a padded batch, B slots for real sequences), T tokens in total, P
masked positions in total.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from mlperf_bert.data.capacity import StaticShape
from mlperf_bert.data.shards import IntArray, Samples

IGNORED = -100  # label of a slot that holds only padding
DUMMY_LENGTH = 128  # one tile of the attention kernels, because shorter sequences cost the same
NO_SAMPLE = -1  # sample id of a dummy sequence
PADDING_WORD = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpaddedBatch:
    """A batch of B sequences, concatenated without padding between them.

    The loss of the batch is the sum of two cross-entropies, each divided by its denominator from
    the step plan (`data/balance.py`). With `global` normalization, this loss, averaged over ranks
    and summed over accumulation steps, is the mean over the whole update.
    """

    input_ids: Tensor  # int64 [T]
    position_ids: Tensor  # int64 [T]
    token_type_ids: Tensor  # int64 [T]
    cu_seqlens: Tensor  # int32 [B + 1]: sequence i is tokens cu_seqlens[i] .. cu_seqlens[i + 1]
    lengths: tuple[int, ...]  # host copy of the B lengths, so that no layer must read the device
    masked_counts: tuple[int, ...]  # host copy: masked positions per sequence
    sample_ids: Tensor  # int64 [B]: sample ids, which are also dropout keys
    masked_token_index: Tensor  # int64 [P]: indices of the masked tokens among all T
    labels: Tensor  # int64 [P], IGNORED in unused slots
    next_sentence_label: Tensor  # int64 [B], or fewer if only the first sequences have one
    mlm_denominator: Tensor  # float32 scalar
    nsp_denominator: Tensor  # float32 scalar
    shape: StaticShape | None = None  # the shape that `pad` padded to, or None

    @property
    def max_seqlen(self) -> int:
        """Length of the longest sequence, in tokens."""
        return max(self.lengths)

    def to(self, device: torch.device) -> Self:
        """Copy the batch to another device. A copy from pinned memory does not block the host."""
        if device == self.input_ids.device:
            return self
        return self.map_blocks(lambda block: block.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        """Copy the batch to page-locked host memory.

        The caller may delete the returned batch as soon as its copy to the device is queued. torch
        reuses page-locked memory only after every copy that was queued from it has finished.
        """
        return self.map_blocks(Tensor.pin_memory)

    @property
    def block(self) -> Tensor:
        """The memory block of all tensors of a batch created by `empty_batch`, uint8 [bytes]."""
        storage = self.input_ids.untyped_storage()
        memory = torch.empty(0, dtype=torch.uint8, device=self.input_ids.device).set_(storage)
        start = self.input_ids.storage_offset() * self.input_ids.element_size()
        last = self.nsp_denominator
        return memory[start : (last.storage_offset() + 1) * last.element_size()]

    def map_blocks(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the batch with each underlying memory block replaced by `change(block)`.

        `change` gets a block as uint8 [bytes] and must return a block with the same contents. All
        tensors of a batch created by `empty_batch` share one block. Copying such a batch therefore
        takes one copy instead of ten.
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
    """Allocate an uninitialized batch of B sequences and P masked positions in one memory block.

    Args:
        lengths: number of tokens of each of the B sequences.
        masked_counts: number of masked positions of each sequence, with the sum P.
        num_pairs: number of sequences with a next-sentence label, which come first in the batch.
            None means that all sequences have one.
        device: device of the block. None means the host.
    """
    num_sequences, num_tokens = len(lengths), sum(lengths)
    num_pairs = num_sequences if num_pairs is None else num_pairs
    words = [num_tokens] * 3 + [sum(masked_counts)] * 2 + [num_pairs, num_sequences]
    words += [num_sequences // 2 + 1, 1]  # 8-byte words for B + 1 int32 and two float32
    # Each tensor starts at a multiple of 16 bytes, because compiled kernels expect that.
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
    """Create a batch in host memory from samples of any integer type, in the given order.

    `sample_ids` is int64 [n]. The denominators divide the masked-LM loss and the next-sentence
    loss.
    """
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
    """Pad a batch in host memory to a shape that it fits into, in one new memory block.

    Sequences and masked positions keep their order. Unused masked positions are inserted between
    the real ones, and each of them points at the last token of its sequence. No sequence gets more
    than `shape.max_masked` positions.
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
    rows = np.arange(num_tokens, shape.tokens)
    padded.position_ids.numpy()[num_tokens:] = rows - np.repeat(starts, lengths)[num_tokens:]
    padded.cu_seqlens[0] = 0
    padded.cu_seqlens.numpy()[1:] = np.cumsum(lengths)
    _copy(batch.sample_ids, padded.sample_ids, NO_SAMPLE)
    _copy(batch.next_sentence_label, padded.next_sentence_label, IGNORED)
    slots = np.arange(batch.labels.shape[0]) + np.repeat(np.cumsum(unused) - unused, real_counts)
    ends = starts + lengths - 1
    padded.masked_token_index.numpy()[:] = np.repeat(ends, real_counts + unused)
    padded.masked_token_index.numpy()[slots] = batch.masked_token_index.numpy()
    padded.labels.fill_(IGNORED)
    padded.labels.numpy()[slots] = batch.labels.numpy()
    padded.mlm_denominator.copy_(batch.mlm_denominator)
    padded.nsp_denominator.copy_(batch.nsp_denominator)
    return replace(padded, shape=shape)


def blank(shape: StaticShape, device: torch.device | None = None) -> UnpaddedBatch:
    """Allocate an uninitialized batch of a padded shape in one memory block.

    If `device` is None, the block is in host memory.
    """
    slots = shape.sequences + shape.dummies
    lengths, masked = ((total, *(0,) * (slots - 1)) for total in (shape.tokens, shape.masked))
    batch = empty_batch(lengths, masked, num_pairs=shape.sequences, device=device)
    return replace(batch, shape=shape)


def _padded_lengths(lengths: tuple[int, ...], shape: StaticShape) -> IntArray:
    """Return the lengths of all B + `dummies` slots of a padded batch, int64.

    The real lengths come first. They are followed by dummy lengths that are nearly equal, and by
    zeros for unused slots.
    """
    padding = shape.tokens - sum(lengths)
    most = shape.sequences - len(lengths) + shape.dummies
    # Dummies are as short as the slots and the kernels' tiles allow, because the cost of attention
    # grows with the square of a length.
    length = max(-(-padding // most), min(DUMMY_LENGTH, shape.max_seqlen))
    count = max(int(shape.least_padding(np.array(len(lengths)))), -(-padding // length))
    padded = _fill_up(np.array(lengths), shape.sequences + shape.dummies)
    if count:
        each, longer = divmod(padding, count)
        padded[len(lengths) : len(lengths) + count] = each
        padded[len(lengths) : len(lengths) + longer] += 1
    return padded


def _unused_masked(real_counts: IntArray, lengths: IntArray, shape: StaticShape) -> IntArray:
    """Return how many unused masked positions each sequence of a padded batch has.

    They belong to the last sequences: to the last one as far as it has room, then to the one
    before it.
    """
    free = np.where(lengths > 0, shape.max_masked - real_counts, 0)
    free[shape.sequences :] = 0
    if empty := int((lengths[: shape.sequences] == 0).sum()):
        # The last non-empty sequence also holds the first tokens of the empty ones.
        free[shape.sequences - empty - 1] -= empty
    left = shape.masked - int(real_counts.sum())
    free_after = np.cumsum(free[::-1])[::-1] - free  # free positions in the sequences after each
    unused: IntArray = np.clip(left - free_after, 0, free)
    return unused


def _fill_up(values: IntArray, size: int) -> IntArray:
    filled = np.zeros(size, dtype=np.int64)
    filled[: len(values)] = values
    return filled


def _copy(source: torch.Tensor, target: torch.Tensor, padding: int) -> None:
    target[: len(source)] = source
    target[len(source) :] = padding
