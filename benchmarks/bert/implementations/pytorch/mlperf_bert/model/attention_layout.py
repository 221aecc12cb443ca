"""Where the sequences of one batch lie, computed once and shared by all layers.

Shape letters: B sequences, S padded length, T tokens, b sequences of one group, s their padded
length, R rows of packed sequences. A slot is one place of a padded group (b * s of them a group) or
of a row.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlperf_bert.data.packing import best_fit_decreasing

# A group holds sequences no shorter than this share of its longest one: fewer calls against less
# padding. Attention forward + backward in ms, fp32, one core with AVX-512, layout shared by two
# layers (minima of 12, 12 and 5 rounds, interleaved):
#   share                              one call each  1.0  0.95   0.9  0.85   0.8   0.7   0.5  0.01
#   B 32, lengths 10-64, N 4, H 32               5.2  5.2   4.6   4.3   4.2   4.2   4.2   4.7   6.2
#   B 32, lengths 10-64, N 2, H 64               4.8  5.1   4.5   4.3   4.1   4.0   4.2   4.4   5.6
#   B 16, mean 214 of 512, N 4, H 64            55.2 57.1  57.4  58.2  57.3  59.2  67.9 102.0 191.8
MIN_LENGTH_RATIO = 0.85


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """b sequences padded to s tokens; `key_is_real` is bool [b, 1, 1, s], None without padding."""

    num_sequences: int
    padded_length: int
    key_is_real: Tensor | None

    @property
    def num_slots(self) -> int:
        """Tokens and padding of the group: b * s."""
        return self.num_sequences * self.padded_length


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """All groups of a batch. Both indices are None where slots and tokens are the same.

    `slot_token` int64 [sum of b * s]: the token in each slot (any token in padding slots);
    `token_slot` int64 [T]: the slot of each token.
    """

    members: tuple[Group, ...]
    slot_token: Tensor | None
    token_slot: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """A batch packed into R rows of `length` slots.

    `is_visible` bool [R, 1, length, length]: whether a slot (third) sees another one (last), that
    is whether both hold the same sequence. `slot_token` int64 [R * length]: the token in each slot
    (any token in free ones); `token_slot` int64 [T]: the slot of each token.
    """

    length: int
    is_visible: Tensor
    slot_token: Tensor
    token_slot: Tensor


class AttentionLayout:
    """Sequence bounds of one batch; each policy's indices are made on first use, then kept.

    Args:
        lengths: tokens of each of the B sequences, on the host.
        cu_seqlens: int32 [B + 1] on the model's device.
        max_length: tokens of the longest sequence that the model takes: the length of packed
            rows, whatever the batch holds, so that they have one shape.
    """

    def __init__(self, lengths: tuple[int, ...], cu_seqlens: Tensor, max_length: int) -> None:
        self.lengths = lengths
        self.cu_seqlens = cu_seqlens
        self.max_length = max_length
        self.max_seqlen = max(lengths)

    @cached_property
    def padded_slots(self) -> Tensor:
        """int64 [T]: row of each token in the [B * S] rows of the padded batch."""
        # Found on the host: nonzero on a device would wait for it.
        return _to_device(np.flatnonzero(self._real_places), self.cu_seqlens.device)

    @cached_property
    def key_is_real(self) -> Tensor:
        """Bool [B, S]: false on padding."""
        return _to_device(self._real_places, self.cu_seqlens.device)

    @property
    def _real_places(self) -> NDArray[np.bool_]:
        return np.arange(self.max_seqlen) < np.asarray(self.lengths)[:, None]

    @cached_property
    def groups(self) -> Groups:
        """Sequences of similar length together; built on the host, then copied."""
        return build_groups(self.lengths, self.cu_seqlens.device)

    @cached_property
    def rows(self) -> Rows:
        """Several sequences a row; built on the host, then copied."""
        return build_rows(self.lengths, self.max_length, self.cu_seqlens.device)


def build_groups(lengths: tuple[int, ...], device: torch.device) -> Groups:
    """Sort sequences by length, cut them into groups, and index their slots.

    Args:
        lengths: tokens of each of the B sequences.
        device: where the indices and masks go.
    """
    length = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(-length, kind="stable")
    cuts = _cut_by_ratio(length[order])
    first_token = np.cumsum(length) - length
    num_tokens = int(length.sum())
    token_slot = np.empty(num_tokens, dtype=np.int64)
    slot_tokens: list[NDArray[np.int64]] = []
    members = []
    num_slots = 0
    for start, end in pairwise(cuts):
        chosen = order[start:end]
        longest = int(length[chosen[0]])
        place = np.arange(longest)
        is_real = place < length[chosen, None]
        # Padding slots repeat the sequence's first token: finite values, and masked anyway.
        tokens = first_token[chosen, None] + np.where(is_real, place, 0)
        slots = num_slots + np.arange(tokens.size).reshape(tokens.shape)
        token_slot[tokens[is_real]] = slots[is_real]
        slot_tokens.append(tokens.ravel())
        num_slots += tokens.size
        mask = None if is_real.all() else _to_device(is_real[:, None, None, :], device)
        members.append(Group(num_sequences=end - start, padded_length=longest, key_is_real=mask))
    if num_slots == num_tokens and np.array_equal(token_slot, np.arange(num_tokens)):
        return Groups(members=tuple(members), slot_token=None, token_slot=None)
    return Groups(
        members=tuple(members),
        slot_token=_to_device(np.concatenate(slot_tokens), device),
        token_slot=_to_device(token_slot, device),
    )


def build_rows(lengths: tuple[int, ...], row_length: int, device: torch.device) -> Rows:
    """Pack sequences by best-fit decreasing, and index their slots.

    Args:
        lengths: tokens of each of the B sequences, none above `row_length`.
        row_length: slots of a row.
        device: where the indices and the mask go.
    """
    length = np.asarray(lengths, dtype=np.int64)
    row = best_fit_decreasing(length, row_length)
    by_row = np.argsort(row, kind="stable")
    # In a row the sequences lie end to end: before each one are those placed before it, less
    # what earlier rows hold.
    end = np.cumsum(length[by_row])
    row_begin = np.concatenate(([0], end[np.flatnonzero(np.diff(row[by_row]))]))
    begin = np.empty_like(length)
    begin[by_row] = end - length[by_row] - row_begin[row[by_row]]
    num_tokens = int(length.sum())
    place = np.arange(num_tokens) - np.repeat(np.cumsum(length) - length, length)
    token_slot = np.repeat(row * row_length + begin, length) + place
    num_slots = len(row_begin) * row_length
    # Free slots repeat the first token: finite values. They see each other, as a row of the mask
    # without any visible key would have no softmax.
    slot_token = np.zeros(num_slots, dtype=np.int64)
    slot_token[token_slot] = np.arange(num_tokens)
    sequence = np.full(num_slots, -1, dtype=np.int64)
    sequence[token_slot] = np.repeat(np.arange(len(length)), length)
    on_device = _to_device(sequence, device).view(-1, 1, row_length)
    return Rows(
        length=row_length,
        is_visible=on_device[..., None] == on_device[:, :, None, :],
        slot_token=_to_device(slot_token, device),
        token_slot=_to_device(token_slot, device),
    )


def _cut_by_ratio(descending: NDArray[np.int64]) -> list[int]:
    """Bounds of the groups in lengths sorted from long to short."""
    cuts = [0]
    shortest_allowed = descending[0] * MIN_LENGTH_RATIO
    for i, length in enumerate(descending.tolist()):
        if length < shortest_allowed:
            cuts.append(i)
            shortest_allowed = length * MIN_LENGTH_RATIO
    return [*cuts, len(descending)]


def _to_device(array: NDArray[np.int64] | NDArray[np.bool_], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # without which the copy would wait for the device
    return tensor.to(device, non_blocking=True)
