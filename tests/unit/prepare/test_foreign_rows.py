"""Rows of others: each problem that one can have is found, in rows of every layout."""

import numpy as np
import pytest

from mlperf_bert.prepare import foreign_rows
from mlperf_bert.prepare.foreign_rows import Bounds, Rows, room_for, take_rows
from mlperf_bert.prepare.hdf5_reader import ABSENT, FEATURES

BOUNDS = Bounds(vocab_size=50, pad_id=1, max_seq_length=8, max_predictions=2)
Row = dict[str, list[int]]

RAGGED: Row = {
    "input_ids": [2, 9, 3, 8, 8, 3],
    "segment_ids": [0, 0, 0, 1, 1, 1],
    "masked_lm_positions": [1, 4],
    "masked_lm_ids": [7, 49],
    "next_sentence_labels": [1],
}
PADDED: Row = {
    "input_ids": [2, 9, 3, 8, 8, 3, 0, 0],
    "input_mask": [1, 1, 1, 1, 1, 1, 0, 0],
    "segment_ids": [0, 0, 0, 1, 1, 1, 0, 0],
    "masked_lm_positions": [1, 0, 0],
    "masked_lm_ids": [7, 0, 0],
    "next_sentence_labels": [0],
}
WEIGHTED: Row = {**PADDED, "masked_lm_weights": [1, 0, 0]}
PACKED: Row = {
    "input_ids": [2, 9, 3, 8, 8, 3, 2, 9, 3, 8, 3],
    "segment_ids": [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1],
    "masked_lm_positions": [1, 4, 7],
    "masked_lm_ids": [7, 49, 0],
    "next_sentence_labels": [1, 0],
    "packed_input_len": [6, 5],
    "packed_masked_lm_len": [2, 1],
}


def rows_of(*rows: Row) -> Rows:
    values: list[int] = []
    starts = np.zeros((len(rows), len(FEATURES)), np.int64)
    counts = np.full_like(starts, ABSENT)
    for number, row in enumerate(rows):
        for name, numbers in row.items():
            starts[number, FEATURES.index(name)] = len(values)
            counts[number, FEATURES.index(name)] = len(numbers)
            values += numbers
    return Rows(np.array(values, np.int32), starts, counts)


def test_examples_of_every_layout() -> None:
    rows = rows_of(RAGGED, PADDED, PACKED, WEIGHTED)
    found = room_for(rows)
    assert take_rows(rows, BOUNDS, found) == (5, foreign_rows.RIGHT, 0)
    short = [2, 9, 3, 8, 3]
    assert found.offsets[:6].tolist() == [0, 6, 12, 18, 23, 29]
    long = RAGGED["input_ids"]
    assert found.input_ids[:29].tolist() == [*long, *long, *long, *short, *long]
    assert found.segment_b_start[:5].tolist() == [3] * 5
    assert found.masked_lm_offsets[:6].tolist() == [0, 2, 3, 5, 6, 7]
    assert found.masked_lm_positions[:7].tolist() == [1, 4, 1, 1, 4, 1, 1]
    assert found.masked_lm_ids[:7].tolist() == [7, 49, 7, 7, 49, 0, 7]
    assert found.next_sentence_label[:5].tolist() == [1, 0, 1, 0, 0]


def test_padding_may_be_the_vocabulary_s() -> None:
    rows = rows_of({**PADDED, "input_ids": [2, 9, 3, 8, 8, 3, 1, 1]})
    assert take_rows(rows, BOUNDS, room_for(rows))[0] == 1


def without(row: Row, name: str) -> Row:
    return {key: values for key, values in row.items() if key != name}


def change(row: Row, name: str, index: int, value: int) -> Row:
    values = list(row[name])
    values[index] = value
    return {**row, name: values}


NAMED = {
    number: name
    for name, number in vars(foreign_rows).items()
    if name.startswith(("LACKS", "OTHER_", "BAD_", "TOO_", "NOT_"))
}
WRONG: list[tuple[Row, int]] = [
    *((without(RAGGED, name), foreign_rows.LACKS) for name in RAGGED),
    ({**RAGGED, "segment_ids": [0, 0, 0, 1, 1]}, foreign_rows.OTHER_LENGTH),
    ({**PADDED, "input_mask": [1] * 7}, foreign_rows.OTHER_LENGTH),
    ({**RAGGED, "masked_lm_ids": [7]}, foreign_rows.OTHER_MASKED),
    ({**WEIGHTED, "masked_lm_weights": [1, 0]}, foreign_rows.OTHER_MASKED),
    ({**RAGGED, "next_sentence_labels": [1, 0]}, foreign_rows.OTHER_NEXT),
    ({**RAGGED, "next_sentence_labels": []}, foreign_rows.OTHER_NEXT),
    ({**PACKED, "next_sentence_labels": [1]}, foreign_rows.OTHER_NEXT),
    (without(PACKED, "packed_masked_lm_len"), foreign_rows.OTHER_PACKED),
    (without(PACKED, "packed_input_len"), foreign_rows.OTHER_PACKED),
    ({**PACKED, "input_mask": [1] * 11}, foreign_rows.OTHER_PACKED),
    ({**PACKED, "masked_lm_weights": [1] * 3}, foreign_rows.OTHER_PACKED),
    (change(PACKED, "packed_input_len", 1, 6), foreign_rows.OTHER_PACKED),
    (change(PACKED, "packed_input_len", 0, -1), foreign_rows.OTHER_PACKED),
    (change(PACKED, "packed_input_len", 0, 2**31 - 1), foreign_rows.OTHER_PACKED),
    (change(PACKED, "packed_masked_lm_len", 1, 2), foreign_rows.OTHER_PACKED),
    (
        {**PACKED, "input_ids": [*PACKED["input_ids"], 3], "segment_ids": [0] * 12},
        foreign_rows.BAD_SEGMENTS,
    ),
    (change(PACKED, "packed_input_len", 1, 4), foreign_rows.TOO_SHORT),
    (change(PADDED, "input_mask", 0, 0), foreign_rows.BAD_MASK),
    (change(PADDED, "input_mask", 1, 2), foreign_rows.BAD_MASK),
    (change(PADDED, "input_mask", 5, 0), foreign_rows.BAD_PADDING),
    (change(PADDED, "input_ids", 7, 1), foreign_rows.BAD_PADDING),
    (change(PADDED, "segment_ids", 7, 1), foreign_rows.BAD_PADDING),
    (change(WEIGHTED, "masked_lm_weights", 2, 1), foreign_rows.BAD_WEIGHTS),
    (change(WEIGHTED, "masked_lm_positions", 2, 1), foreign_rows.BAD_MASKED_PADDING),
    (change(PADDED, "masked_lm_positions", 2, 1), foreign_rows.BAD_MASKED_PADDING),
    (change(PADDED, "masked_lm_ids", 1, 1), foreign_rows.BAD_MASKED_PADDING),
    ({**RAGGED, "input_ids": [2, 9, 3, 3], "segment_ids": [0, 0, 0, 1]}, foreign_rows.TOO_SHORT),
    ({**RAGGED, "input_ids": [2] * 9, "segment_ids": [0] * 8 + [1]}, foreign_rows.TOO_LONG),
    ({**RAGGED, "masked_lm_ids": [], "masked_lm_positions": []}, foreign_rows.NOT_MASKED),
    (
        {
            **WEIGHTED,
            "masked_lm_weights": [0, 0, 0],
            "masked_lm_positions": [0] * 3,
            "masked_lm_ids": [0] * 3,
        },
        foreign_rows.NOT_MASKED,
    ),
    (
        {**RAGGED, "masked_lm_ids": [7] * 3, "masked_lm_positions": [1, 3, 4]},
        foreign_rows.TOO_MANY_MASKED,
    ),
    (change(RAGGED, "segment_ids", 4, 0), foreign_rows.BAD_SEGMENTS),
    (change(RAGGED, "segment_ids", 4, 2), foreign_rows.BAD_SEGMENTS),
    ({**RAGGED, "segment_ids": [0] * 6}, foreign_rows.BAD_SEGMENTS),
    (change(RAGGED, "input_ids", 4, 50), foreign_rows.BAD_TOKEN),
    (change(RAGGED, "input_ids", 4, -1), foreign_rows.BAD_TOKEN),
    (change(RAGGED, "masked_lm_ids", 1, 50), foreign_rows.BAD_LABEL),
    (change(RAGGED, "masked_lm_ids", 1, -(2**31)), foreign_rows.BAD_LABEL),
    (change(RAGGED, "masked_lm_positions", 1, 6), foreign_rows.BAD_POSITION),
    (change(RAGGED, "masked_lm_positions", 1, -1), foreign_rows.BAD_POSITION),
    (change(PACKED, "masked_lm_positions", 2, 5), foreign_rows.BAD_POSITION),
    (change(PACKED, "masked_lm_positions", 2, -(2**31)), foreign_rows.BAD_POSITION),
    (change(RAGGED, "next_sentence_labels", 0, 2), foreign_rows.BAD_NEXT),
    (change(PACKED, "next_sentence_labels", 1, -1), foreign_rows.BAD_NEXT),
]


@pytest.mark.parametrize(("wrong", "problem"), WRONG, ids=[NAMED[number] for _, number in WRONG])
def test_every_problem_is_found(wrong: Row, problem: int) -> None:
    rows = rows_of(RAGGED, PACKED, wrong, PADDED)
    found = room_for(rows)
    assert take_rows(rows, BOUNDS, found)[1:] == (problem, 2)


def test_no_problem_is_left_out() -> None:
    assert sorted(NAMED) == list(range(1, len(foreign_rows.PROBLEMS)))
    assert {number for _, number in WRONG} == set(NAMED)
