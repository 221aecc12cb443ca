"""Layout of one batch's sequences, and the padded slots of groups of sequences.

Shapes use the letters B (sequences), b (sequences of one group), s (padded length of a group), T
(tokens) and R (queries). A slot is one position in a padded group, which has b * s slots. All
indices are computed once for all layers, on the host, which knows all lengths. The host therefore
does not wait for the device.
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
    """The mapping between the rows of a tensor and the slots of padded groups.

    `slot_row`, int64 [slots], is the row in each slot (an arbitrary row in padding slots).
    `row_slot`, int64 [rows], is the slot of each row.
    """

    slot_row: Tensor
    row_slot: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Padded:
    """The padding of a tensor's rows, in groups of b sequences of at most s rows.

    A group has b * s slots. `slots` is None if the slots and the rows are identical.
    """

    lengths: tuple[int, ...]  # s of each group
    slots: Slots | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """All groups of a batch's sequences.

    `sequences` contains the numbers of each group's sequences, int64 [b] on the host. `keys` is the
    padding of the keys. `key_is_real` is bool [b, 1, 1, s] for each group, or None for a group
    without padding.
    """

    sequences: tuple[NDArray[np.int64], ...]
    keys: Padded
    key_is_real: tuple[Tensor | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunks:
    """Groups of chunks of queries, together with the keys within the reach of each chunk.

    `key_rows`, int64 [key slots], is the row in each key slot, group by group. Neighboring chunks
    share rows. `key_lengths` is the number of key slots per chunk in each group. `is_visible` is
    bool [b, 1, query slots, key slots] for each group.
    """

    queries: Padded
    key_rows: Tensor
    key_lengths: tuple[int, ...]
    is_visible: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Queries:
    """The R rows of a batch's T tokens that act as queries, in the order of the sequences."""

    rows: Tensor  # int64 [R], ascending
    cu_seqlens: Tensor  # int32 [B + 1]: cu_seqlens[i] .. cu_seqlens[i + 1] belong to sequence i
    lengths: tuple[int, ...]  # queries of each sequence, on the host
    max_length: int  # upper limit on a sequence's queries in all batches of the same shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """Tables of the cosines and sines of rotary positions (arXiv 2104.09864) for one base.

    Both tables are float32 [longest, H / 2]. Pair c consists of the channels c and c + H / 2. Each
    pair rotates by its own angle.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def of_base(cls, base: float, longest: int, head_size: int) -> Self:
        """Return the tables of cosines and sines for positions below `longest`.

        Pair c rotates by the angle position / base ** (2 c / H). The angles are float32, as in
        `transformers`.
        """
        pairs = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
        angles = torch.outer(torch.arange(longest, dtype=torch.float32), 1.0 / base**pairs)
        return cls(cos=angles.cos(), sin=angles.sin())

    def on(self, device: torch.device) -> Self:
        """Return these tables on the given device, without a copy if they are already there."""
        return (
            self
            if self.cos.device == device
            else type(self)(cos=self.cos.to(device), sin=self.sin.to(device))
        )


class AttentionLayout:
    """The sequence bounds of one batch, and the indices that attention policies need.

    The indices are computed at first use and then cached. `queries` are the rows that attend, or
    None if all tokens attend. A query attends to the tokens of its sequence that are at most
    `reach` positions away, or to all tokens of its sequence if `reach` is None. If `rotary` is set,
    queries and keys are rotated first.

    Args:
        lengths: the number of tokens of each of the B sequences, on the host. Zeros at the end are
            allowed.
        cu_seqlens: int32 [B + 1] on the model's device. Tokens cu_seqlens[i] .. cu_seqlens[i + 1] -
            1 belong to sequence i.
        max_length: the number of tokens of the longest possible sequence. Keep bits always have
            this width on CUDA, so that they have the same shape for every batch.
        position_ids: int64 [T], each token's position in its sequence. The positions are needed
            only for `reach` and `rotary`.
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
        self._blocks: dict[tuple[Tensor, int], Tensor] = {}  # shared by the layouts made from this

    def attending(self, rotary: Rotary, reach: int | None) -> Self:
        """Return a layout of the same sequences and queries with the given `rotary` and `reach`."""
        other = copy(self)
        other.rotary, other.reach = rotary, reach
        return other

    def for_queries(self, queries: Queries) -> Self:
        """Return a layout of the same keys and values in which only the rows `queries` attend."""
        other = copy(self)  # keeps the cached indices of the keys
        for name in ("query_groups", "chunks", "query_positions"):  # cached and depend on queries
            other.__dict__.pop(name, None)
        other.queries = queries
        return other

    def select(self, x: Tensor) -> Tensor:
        """Return the rows of `x` [T, ...] that are queries [R, ...], or `x` if all are queries."""
        return x if self.queries is None else x.index_select(0, self.queries.rows)

    @property
    def position_ids(self) -> Tensor:
        """Each token's position in its sequence, int64 [T]."""
        assert self._position_ids is not None
        return self._position_ids

    @cached_property
    def query_positions(self) -> Tensor:
        """Each query's position in its sequence, int64 [R]."""
        return self.select(self.position_ids)

    @property
    def query_lengths(self) -> tuple[int, ...]:
        """The number of queries of each sequence, on the host."""
        return self.lengths if self.queries is None else self.queries.lengths

    @property
    def cu_queries(self) -> Tensor:
        """The bounds of each sequence's queries, int32 [B + 1].

        Queries cu_queries[i] .. cu_queries[i + 1] - 1 belong to sequence i.
        """
        return self.cu_seqlens if self.queries is None else self.queries.cu_seqlens

    @property
    def max_queries(self) -> int:
        """An upper limit on the number of queries of one sequence."""
        return self.max_length if self.queries is None else self.queries.max_length

    def blocks(self, bounds: Tensor, num_rows: int, size: int) -> Tensor:
        """Return the sequence of each block of `size` rows, int32 [num_rows // size + B].

        Sequence i has the blocks bounds[i] // size + i .. bounds[i + 1] // size + i, which are as
        many as its rows need, or one more. The last sequence also has all blocks after its own, so
        the number of blocks is the same for all batches of the same shape. `bounds` is `cu_seqlens`
        or `cu_queries`. `num_rows` also counts rows after the last sequence.
        """
        key = bounds, size
        if key not in self._blocks:
            block = torch.arange(num_rows // size + len(bounds) - 1, device=bounds.device)
            first = bounds[:-1] // size + block[: len(bounds) - 1]
            self._blocks[key] = torch.searchsorted(first, block, right=True, out_int32=True) - 1
        return self._blocks[key]

    @cached_property
    def groups(self) -> Groups:
        """The groups of sequences of similar length, built on the host and copied to the device."""
        return build_groups(self.lengths, self.cu_seqlens.device)

    @cached_property
    def query_groups(self) -> Padded:
        """The padding of the queries, in the same groups as the keys."""
        if self.queries is None:
            return self.groups.keys
        return pad_groups(self.groups.sequences, self.query_lengths, self.cu_seqlens.device)[0]

    @cached_property
    def chunks(self) -> Chunks:
        """The chunks of queries for `reach`, built on the host.

        The host waits for the device, because it must read the positions.
        """
        assert self.reach is not None
        positions = self.query_positions.cpu().numpy()
        return build_chunks(
            self.lengths, self.query_lengths, positions, self.reach, self.cu_seqlens.device
        )


def build_groups(lengths: tuple[int, ...], device: torch.device) -> Groups:
    """Sort sequences by length, cut them into groups, and pad their keys.

    Args:
        lengths: the number of tokens of each of the B sequences. Empty sequences belong to no
            group.
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
    """Compute the padding of groups of sequences, and which slots of each group contain rows.

    Args:
        sequences: the sequence numbers of each group.
        lengths: the number of rows of each of the B sequences, which are concatenated in the tensor
            to pad.
        device: device of the padding's indices.

    Returns:
        The padding, and for each group a bool [b, s] on the host, which is True for slots with
        rows.
    """
    count = np.asarray(lengths, dtype=np.int64)
    first_row = np.cumsum(count) - count
    num_rows = int(count.sum())
    row_slot = np.empty(num_rows, dtype=np.int64)
    slot_rows: list[NDArray[np.int64]] = []
    real: list[NDArray[np.bool_]] = []
    num_slots = 0
    for chosen in sequences:
        column = np.arange(max(count[chosen].max(), 1))  # at least one, to avoid an empty shape
        is_real = column < count[chosen, None]
        # Padding slots repeat the sequence's first row, whose values are finite and never read.
        rows = np.minimum(first_row[chosen, None] + np.where(is_real, column, 0), num_rows - 1)
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
    """Cut sequences into chunks of 2 * reach positions, and group chunks by their number of keys.

    Args:
        lengths: the number of tokens of each of the B sequences.
        query_lengths: the number of queries of each sequence.
        query_positions: int64 [R], each query's position in its sequence, ascending within a
            sequence.
        reach: the number of positions on each side that a query attends to.
        device: device of the indices and masks.
    """
    length = np.asarray(lengths, dtype=np.int64)
    first_row = np.cumsum(length) - length
    chunks = cut_into_chunks(length, reach)
    sequence, first_key, num_keys = chunks.sequence, chunks.first_key, chunks.num_keys
    first_chunk = np.searchsorted(sequence, np.arange(len(length)))
    chunk_of_query = np.repeat(first_chunk, query_lengths) + query_positions // (2 * reach)
    num_queries = np.bincount(chunk_of_query, minlength=len(sequence))
    order = np.argsort(-num_keys, kind="stable")
    order = order[num_queries[order] > 0]
    groups = tuple(order[first:last] for first, last in pairwise(cut_by_ratio(num_keys[order])))
    queries, _ = pad_groups(groups, tuple(num_queries.tolist()), device)
    first_query = np.cumsum(num_queries) - num_queries
    key_rows, masks = [], []
    for chosen, num_slots in zip(groups, queries.lengths, strict=True):
        column = np.arange(num_keys[chosen].max())
        key = first_key[chosen, None] + np.minimum(column, num_keys[chosen, None] - 1)
        key_rows.append((first_row[sequence[chosen], None] + key).ravel())
        slot = np.arange(num_slots)  # slots without a query repeat the chunk's first one
        row = first_query[chosen, None] + np.where(slot < num_queries[chosen, None], slot, 0)
        distance = query_positions[row][:, :, None] - (first_key[chosen, None] + column)[:, None, :]
        is_real = (column < num_keys[chosen, None])[:, None, :]
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
