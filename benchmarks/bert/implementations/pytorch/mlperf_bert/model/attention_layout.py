"""Layout of one batch's sequences, and padded places for them in groups.

Shape letters: B sequences, b sequences of one group, s their padded length, T tokens, R queries.
A slot is one place of a group (b * s of them a group). All indices are computed once for all
layers, on the host, which knows all lengths; nothing waits for the device.
"""

from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlperf_bert.data.packing import cut_by_ratio, cut_into_chunks


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """Padded places for the rows of a tensor.

    `slot_row` int64 [slots]: the row in each slot (any row in padding slots); `row_slot` int64
    [rows]: the slot of each row.
    """

    slot_row: Tensor
    row_slot: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Padded:
    """Rows of a tensor padded group by group: b * s slots for b sequences of at most s rows each.

    `slots` is None if slots and rows are the same.
    """

    lengths: tuple[int, ...]  # s of each group
    slots: Slots | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """All groups of a batch: their sequences' numbers, host int64 [b], and the padding of keys.

    `key_is_real` bool [b, 1, 1, s] of each group, None without padding.
    """

    sequences: tuple[NDArray[np.int64], ...]
    keys: Padded
    key_is_real: tuple[Tensor | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunks:
    """Sequences cut into chunks of queries, each with the keys within their reach, in groups.

    `key_rows` int64 [key slots]: the row in each slot, group by group; neighbouring chunks share
    rows. `key_lengths`: key slots of each chunk of a group; `is_visible` bool [b, 1, query slots,
    key slots] of each group.
    """

    queries: Padded
    key_rows: Tensor
    key_lengths: tuple[int, ...]
    is_visible: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Queries:
    """The R rows of a batch's T tokens whose context is wanted, sequence by sequence."""

    rows: Tensor  # int64 [R], ascending
    cu_seqlens: Tensor  # int32 [B + 1]: cu_seqlens[i] .. cu_seqlens[i + 1] are of sequence i
    lengths: tuple[int, ...]  # host copy: queries of each sequence
    max_length: int  # most queries of a sequence, in this and all batches of the same shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """The turns of rotary positions (arXiv 2104.09864) of one base: cosines and sines.

    Float32 [longest, H / 2] each: pair c of channels c and c + H / 2 turns by its own angle.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def of_base(cls, base: float, longest: int, head_size: int) -> Self:
        """Angle position / base ** (2 c / H) of pair c, in float32 as in `transformers`."""
        pairs = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
        angles = torch.outer(torch.arange(longest, dtype=torch.float32), 1.0 / base**pairs)
        return cls(cos=angles.cos(), sin=angles.sin())

    def on(self, device: torch.device) -> Self:
        """The same on a device."""
        return (
            self
            if self.cos.device == device
            else type(self)(cos=self.cos.to(device), sin=self.sin.to(device))
        )


class AttentionLayout:
    """Sequence bounds of one batch; each policy's indices are made on first use, then kept.

    `queries` are the rows that attend (None: all tokens). A query sees the tokens of its sequence
    at most `reach` places away (None: all of them), and queries and keys are turned by `rotary`
    first, if that is set.

    Args:
        lengths: tokens of each of the B sequences, on the host; zeros at the end are allowed.
        cu_seqlens: int32 [B + 1] on the model's device.
        max_length: tokens of the longest possible sequence. CUDA kernels are launched
            for it, whatever the batch holds, so that all batches have one
            shape.
        position_ids: int64 [T], each token's place in its sequence; needed for `reach` and
            `rotary` only.
    """

    def __init__(
        self,
        lengths: tuple[int, ...],
        cu_seqlens: Tensor,
        max_length: int,
        position_ids: Tensor | None = None,
    ) -> None:
        self.lengths = lengths
        self.cu_seqlens = cu_seqlens
        self.max_length = max_length
        self.queries: Queries | None = None
        self.reach: int | None = None
        self.rotary: Rotary | None = None
        self._position_ids = position_ids

    def attending(self, rotary: Rotary, reach: int | None) -> Self:
        """The same sequences and queries with rotary positions, and with another reach."""
        other = copy(self)
        other.rotary, other.reach = rotary, reach
        return other

    def for_queries(self, queries: Queries) -> Self:
        """The same keys and values, with R rows of the tokens as queries in place of all T."""
        other = copy(self)  # keeps the indices of the keys that are already computed
        for of_queries in ("query_groups", "chunks", "query_positions"):
            other.__dict__.pop(of_queries, None)
        other.queries = queries
        return other

    def select(self, x: Tensor) -> Tensor:
        """Rows [R, ...] of `x` [T, ...] that are queries; all of them if every token is a query."""
        return x if self.queries is None else x.index_select(0, self.queries.rows)

    @property
    def position_ids(self) -> Tensor:
        """int64 [T]: each token's place in its sequence."""
        assert self._position_ids is not None
        return self._position_ids

    @cached_property
    def query_positions(self) -> Tensor:
        """int64 [R]: each query's place in its sequence."""
        return self.select(self.position_ids)

    @property
    def query_lengths(self) -> tuple[int, ...]:
        """Queries of each sequence, on the host."""
        return self.lengths if self.queries is None else self.queries.lengths

    @property
    def cu_queries(self) -> Tensor:
        """int32 [B + 1]: query rows cu_queries[i] .. cu_queries[i + 1] are of sequence i."""
        return self.cu_seqlens if self.queries is None else self.queries.cu_seqlens

    @property
    def max_queries(self) -> int:
        """Most queries of one sequence."""
        return self.max_length if self.queries is None else self.queries.max_length

    @cached_property
    def groups(self) -> Groups:
        """Groups of sequences of similar length; built on the host, then copied."""
        return build_groups(self.lengths, self.cu_seqlens.device)

    @cached_property
    def query_groups(self) -> Padded:
        """Padding of the queries, in the groups of the keys."""
        if self.queries is None:
            return self.groups.keys
        return pad_groups(self.groups.sequences, self.query_lengths, self.cu_seqlens.device)[0]

    @cached_property
    def chunks(self) -> Chunks:
        """Chunks for `reach`; a host that waits for the device builds them."""
        assert self.reach is not None
        positions = self.query_positions.cpu().numpy()
        return build_chunks(
            self.lengths, self.query_lengths, positions, self.reach, self.cu_seqlens.device
        )


def build_groups(lengths: tuple[int, ...], device: torch.device) -> Groups:
    """Sort sequences by length, cut them into groups, and pad their keys.

    Args:
        lengths: tokens of each of the B sequences; empty sequences are in no group.
        device: device of the indices and masks.
    """
    length = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(-length, kind="stable")[: np.count_nonzero(length)]
    sequences = tuple(order[start:end] for start, end in pairwise(cut_by_ratio(length[order])))
    keys, is_real = pad_groups(sequences, lengths, device)
    masks = (None if real.all() else _to_device(real[:, None, None, :], device) for real in is_real)
    return Groups(sequences=sequences, keys=keys, key_is_real=tuple(masks))


def pad_groups(
    sequences: tuple[NDArray[np.int64], ...], lengths: tuple[int, ...], device: torch.device
) -> tuple[Padded, list[NDArray[np.bool_]]]:
    """Padding of groups, and for each group which slots hold rows: bool [b, s], on the host.

    `sequences` are the sequence numbers of each group. `lengths` are the rows of each of the B
    sequences, which lie end to end in the tensor to be padded.
    """
    count = np.asarray(lengths, dtype=np.int64)
    first_row = np.cumsum(count) - count
    num_rows = int(count.sum())
    row_slot = np.empty(num_rows, dtype=np.int64)
    slot_rows: list[NDArray[np.int64]] = []
    real: list[NDArray[np.bool_]] = []
    num_slots = 0
    for chosen in sequences:
        place = np.arange(max(count[chosen].max(), 1))  # no shape with a zero in it
        is_real = place < count[chosen, None]
        # Padding slots repeat the sequence's first row: its values are finite and never read.
        rows = np.minimum(first_row[chosen, None] + np.where(is_real, place, 0), num_rows - 1)
        slots = num_slots + np.arange(rows.size).reshape(rows.shape)
        row_slot[rows[is_real]] = slots[is_real]
        slot_rows.append(rows.ravel())
        real.append(is_real)
        num_slots += rows.size
    padded_lengths = tuple(is_real.shape[1] for is_real in real)
    if num_slots == num_rows and np.array_equal(row_slot, np.arange(num_rows)):
        return Padded(lengths=padded_lengths, slots=None), real
    slots_on_device = _slots(np.concatenate(slot_rows), row_slot, device)
    return Padded(lengths=padded_lengths, slots=slots_on_device), real


def build_chunks(
    lengths: tuple[int, ...],
    query_lengths: tuple[int, ...],
    query_positions: NDArray[np.int64],
    reach: int,
    device: torch.device,
) -> Chunks:
    """Cut sequences into chunks of 2 reach places, and group those with a similar number of keys.

    Args:
        lengths: tokens of each of the B sequences.
        query_lengths: queries of each sequence.
        query_positions: int64 [R], ascending in a sequence.
        reach: places that a query sees to each side.
        device: device of the indices and masks.
    """
    length = np.asarray(lengths, dtype=np.int64)
    first_row = np.cumsum(length) - length
    chunks = cut_into_chunks(length, reach)
    sequence, first_key, num_keys = chunks.sequence, chunks.first_key, chunks.num_keys
    first_chunk = np.searchsorted(sequence, np.arange(len(length)))
    of_query = np.repeat(first_chunk, query_lengths) + query_positions // (2 * reach)
    num_queries = np.bincount(of_query, minlength=len(sequence))
    order = np.argsort(-num_keys, kind="stable")
    order = order[num_queries[order] > 0]
    groups = tuple(order[first:last] for first, last in pairwise(cut_by_ratio(num_keys[order])))
    queries, _ = pad_groups(groups, tuple(num_queries.tolist()), device)
    first_query = np.cumsum(num_queries) - num_queries
    key_rows, masks = [], []
    for chosen, num_slots in zip(groups, queries.lengths, strict=True):
        place = np.arange(num_keys[chosen].max())
        key = first_key[chosen, None] + np.minimum(place, num_keys[chosen, None] - 1)
        key_rows.append((first_row[sequence[chosen], None] + key).ravel())
        slot = np.arange(num_slots)  # those without a query repeat the chunk's first
        row = first_query[chosen, None] + np.where(slot < num_queries[chosen, None], slot, 0)
        distance = query_positions[row][:, :, None] - (first_key[chosen, None] + place)[:, None, :]
        is_real = (place < num_keys[chosen, None])[:, None, :]
        masks.append(_to_device(((np.abs(distance) <= reach) & is_real)[:, None], device))
    return Chunks(
        queries=queries,
        key_rows=_to_device(np.concatenate(key_rows), device),
        key_lengths=tuple(mask.shape[3] for mask in masks),
        is_visible=tuple(masks),
    )


def _slots(slot_row: NDArray[np.int64], row_slot: NDArray[np.int64], device: torch.device) -> Slots:
    return Slots(slot_row=_to_device(slot_row, device), row_slot=_to_device(row_slot, device))


def _to_device(array: NDArray[np.int64] | NDArray[np.bool_], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # an unpinned copy would wait for the device
    return tensor.to(device, non_blocking=True)
