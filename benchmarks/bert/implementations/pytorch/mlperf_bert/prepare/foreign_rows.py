"""Rows of examples from other programs' files: padded, of variable length, or packed.

Readers give unchecked rows. This file turns them into our examples, or returns the problem of the
first wrong row. It is one file because of numba's cache, see compiled.py.

There are n rows and the K features of FEATURES in that order; a missing feature is ABSENT. A row
with `packed_input_len` holds several examples end to end, and masked positions count from the row's
start. A row with `input_mask` is padded with zeros to one length, and so are its masked positions.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.common.compiled import compiled
from mlperf_bert.prepare.examples import Collected
from mlperf_bert.prepare.examples import room_for as room_for_examples
from mlperf_bert.prepare.hdf5_reader import (
    ABSENT,
    IDS,
    LABELS,
    LENGTHS,
    MASK,
    MASKED_LENGTHS,
    NEXT,
    POSITIONS,
    SEGMENTS,
    WEIGHTS,
)
from mlperf_bert.prepare.verify.contents import MIN_LENGTH

RIGHT = 0
# Problems of a row, by the number that the compiled code returns.
PROBLEMS = (
    "nothing",
    "lacks input_ids, segment_ids, masked_lm_positions, masked_lm_ids or next_sentence_labels",
    "has segment_ids or input_mask of another length than input_ids",
    "has masked_lm_ids or masked_lm_weights of another length than masked_lm_positions",
    "has other than one next_sentence_labels for each example",
    "has packed lengths that are not those of its arrays",
    "has an input_mask that is not ones and then zeros",
    "has something else than zeros where input_mask is zero",
    "has masked_lm_weights that are not ones and then zeros",
    "has something else than zeros after its masked positions",
    f"has an example of fewer than {MIN_LENGTH} tokens",
    "has an example of more tokens than --max-seq-length",
    "has an example without masked positions",
    "has an example of more masked positions than --max-predictions",
    "has segment_ids that are not zeros and then ones",
    "has input_ids outside the vocabulary",
    "has masked_lm_ids outside the vocabulary",
    "has masked_lm_positions outside its example",
    "has a next_sentence_labels other than 0 and 1",
)
LACKS, OTHER_LENGTH, OTHER_MASKED, OTHER_NEXT, OTHER_PACKED = range(1, 6)
BAD_MASK, BAD_PADDING, BAD_WEIGHTS, BAD_MASKED_PADDING = range(6, 10)
TOO_SHORT, TOO_LONG, NOT_MASKED, TOO_MANY_MASKED, BAD_SEGMENTS = range(10, 15)
BAD_TOKEN, BAD_LABEL, BAD_POSITION, BAD_NEXT = range(15, 19)


class Rows(NamedTuple):
    """n rows; feature k of row i is `values[starts[i, k] : starts[i, k] + counts[i, k]]`."""

    values: NDArray[np.int32]
    starts: NDArray[np.int64]  # [n, K]
    counts: NDArray[np.int64]  # [n, K], ABSENT where the row has no such feature


class Bounds(NamedTuple):
    """Limits of an example."""

    vocab_size: int
    pad_id: int  # padding may have this id instead of zero
    max_seq_length: int
    max_predictions: int


def room_for(rows: Rows) -> Collected:
    """Arrays with room for every example that `take_rows` can make of these rows.

    Tokens are uint32 for every vocabulary, because code is compiled once for each dtype.
    """
    most = np.maximum(rows.counts, 0).sum(axis=0)
    examples = len(rows.counts) + int(most[LENGTHS])
    return room_for_examples(examples, most[IDS], most[POSITIONS], np.uint32)


@compiled
def take_rows(rows: Rows, bounds: Bounds, found: Collected) -> tuple[int, int, int]:
    """Write the examples of all rows into `found`, made by `room_for`.

    Returns their number, RIGHT or the problem of the first wrong row, and that row's number. `rows`
    may hold any numbers as long as every feature lies within `values`.
    """
    num = 0
    for row in range(len(rows.counts)):
        problem = _shape_problem(rows.counts[row])
        if problem != RIGHT:
            return num, problem, row
        if rows.counts[row, LENGTHS] == ABSENT:
            problem = _take_one(rows, row, bounds, found, num)
            num += 1
        else:
            problem, num = _take_packed(rows, row, bounds, found, num)
        if problem != RIGHT:
            return num, problem, row
    return num, RIGHT, 0


@compiled
def _shape_problem(counts: NDArray[np.int64]) -> int:
    """The problem of missing features or features of unequal length, or RIGHT."""
    if min(counts[IDS], counts[SEGMENTS], counts[POSITIONS], counts[LABELS], counts[NEXT]) < 0:
        return LACKS
    if counts[SEGMENTS] != counts[IDS] or counts[MASK] not in (ABSENT, counts[IDS]):
        return OTHER_LENGTH
    masked = counts[POSITIONS]
    if counts[LABELS] != masked or counts[WEIGHTS] not in (ABSENT, masked):
        return OTHER_MASKED
    if counts[LENGTHS] != counts[MASKED_LENGTHS]:
        return OTHER_PACKED
    if counts[LENGTHS] != ABSENT and max(counts[MASK], counts[WEIGHTS]) != ABSENT:
        return OTHER_PACKED
    if counts[NEXT] != (1 if counts[LENGTHS] == ABSENT else counts[LENGTHS]):
        return OTHER_NEXT
    return RIGHT


@compiled
def _take_one(rows: Rows, row: int, bounds: Bounds, found: Collected, num: int) -> int:
    """Take the only example of a row, padded or not."""
    values, starts, counts = rows.values, rows.starts[row], rows.counts[row]
    width, length = counts[IDS], counts[IDS]
    room, masked = counts[POSITIONS], counts[POSITIONS]
    if counts[MASK] != ABSENT:
        length = _ones(values, starts[MASK], width)
        if length < 0:
            return BAD_MASK
        if not _is_padding(values, starts[IDS] + length, width - length, bounds.pad_id):
            return BAD_PADDING
        if not _is_padding(values, starts[SEGMENTS] + length, width - length, 0):
            return BAD_PADDING
        masked = _leading_others(values, starts[POSITIONS], room)
    if counts[WEIGHTS] != ABSENT:
        masked = _ones(values, starts[WEIGHTS], room)
        if masked < 0:
            return BAD_WEIGHTS
    for feature in (POSITIONS, LABELS):
        if not _is_padding(values, starts[feature] + masked, room - masked, 0):
            return BAD_MASKED_PADDING
    return _take(values, starts, 0, length, masked, bounds, found, num)


@compiled
def _take_packed(
    rows: Rows, row: int, bounds: Bounds, found: Collected, num: int
) -> tuple[int, int]:
    """Take all examples of a row; their lengths must use up its arrays. Returns problem, `num`."""
    values, counts = rows.values, rows.counts[row]
    at = rows.starts[row].copy()
    tokens_left, masked_left = counts[IDS], counts[POSITIONS]
    first = 0
    for number in range(counts[LENGTHS]):
        length = int(values[at[LENGTHS] + number])
        masked = int(values[at[MASKED_LENGTHS] + number])
        if not (0 <= length <= tokens_left and 0 <= masked <= masked_left):
            return OTHER_PACKED, num
        problem = _take(values, at, first, length, masked, bounds, found, num)
        if problem != RIGHT:
            return problem, num
        num += 1
        first += length
        tokens_left -= length
        masked_left -= masked
        at[IDS] += length
        at[SEGMENTS] += length
        at[POSITIONS] += masked
        at[LABELS] += masked
        at[NEXT] += 1
    return (OTHER_PACKED if tokens_left or masked_left else RIGHT), num


@compiled
def _take(
    values: NDArray[np.int32],
    at: NDArray[np.int64],
    first: int,
    length: int,
    masked: int,
    bounds: Bounds,
    found: Collected,
    num: int,
) -> int:
    """Write the example whose features begin at `at` [K]; `first` is its first token in the row."""
    if length < MIN_LENGTH or length > bounds.max_seq_length:
        return TOO_SHORT if length < MIN_LENGTH else TOO_LONG
    if masked < 1 or masked > bounds.max_predictions:
        return NOT_MASKED if masked < 1 else TOO_MANY_MASKED
    token_at, masked_at = found.offsets[num], found.masked_lm_offsets[num]
    start_of_b = _zeros(values, at[SEGMENTS], length)
    if start_of_b < 0:
        return BAD_SEGMENTS
    for i in range(length):
        token = values[at[IDS] + i]
        if token < 0 or token >= bounds.vocab_size:
            return BAD_TOKEN
        found.input_ids[token_at + i] = token
    for i in range(masked):
        label = values[at[LABELS] + i]
        position = int(values[at[POSITIONS] + i]) - first
        if label < 0 or label >= bounds.vocab_size:
            return BAD_LABEL
        if position < 0 or position >= length:
            return BAD_POSITION
        found.masked_lm_ids[masked_at + i] = label
        found.masked_lm_positions[masked_at + i] = position
    next_label = values[at[NEXT]]
    if next_label < 0 or next_label > 1:
        return BAD_NEXT
    found.segment_b_start[num] = start_of_b
    found.next_sentence_label[num] = next_label
    found.offsets[num + 1] = token_at + length
    found.masked_lm_offsets[num + 1] = masked_at + masked
    return RIGHT


@compiled
def _ones(values: NDArray[np.int32], start: int, count: int) -> int:
    """The number of leading ones of `count` values; -1 if anything but zeros follows."""
    ones = 0
    while ones < count and values[start + ones] == 1:
        ones += 1
    for i in range(ones, count):
        if values[start + i] != 0:
            return -1
    return ones


@compiled
def _zeros(values: NDArray[np.int32], start: int, count: int) -> int:
    """The number of leading zeros of `count` values; -1 unless ones, at least one, follow."""
    zeros = 0
    while zeros < count and values[start + zeros] == 0:
        zeros += 1
    for i in range(zeros, count):
        if values[start + i] != 1:
            return -1
    return zeros if zeros < count else -1


@compiled
def _leading_others(values: NDArray[np.int32], start: int, count: int) -> int:
    """The number of leading values other than zero."""
    others = 0
    while others < count and values[start + others] != 0:
        others += 1
    return others


@compiled
def _is_padding(values: NDArray[np.int32], start: int, count: int, pad: int) -> bool:
    """True if `count` values are all zero, or all `pad`."""
    is_zero = is_pad = True
    for i in range(start, start + count):
        is_zero &= values[i] == 0
        is_pad &= values[i] == pad
    return is_zero or is_pad
