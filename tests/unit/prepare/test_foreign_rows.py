"""Rows of others: every layout and problem; HDF5 leads nowhere, and its child is not trusted."""

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import h5py
import numpy as np
import pytest

from foreign_files import Example, write_fixed, write_packed, write_ragged
from import_cases import as_dicts
from mlperf_bert.common.errors import DataError
from mlperf_bert.prepare import foreign_rows
from mlperf_bert.prepare.foreign_rows import Bounds, Rows, room_for, take_rows
from mlperf_bert.prepare.hdf5_reader import ABSENT, FEATURES, MOST_ROWS, MOST_VALUES, NUM_ROWS
from mlperf_bert.prepare.import_examples import READING, ROWS_READER, read_hdf5
from mlperf_bert.prepare.sandbox import Sandbox, sandbox

WIDTH, ROOM = 16, 4


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with sandbox(ROWS_READER, READING) as running:
        yield running


def make_examples(count: int) -> list[Example]:
    """Examples of 6 .. 15 tokens, which need not be right."""
    rng = np.random.default_rng(7)
    lengths = rng.integers(6, WIDTH, count).tolist()
    return [
        {
            "input_ids": rng.integers(1, 30_000, length).tolist(),
            "segment_ids": [0] * 3 + [1] * (length - 3),
            "masked_lm_positions": [1, length - 2],
            "masked_lm_ids": rng.integers(1, 30_000, 2).tolist(),
            "next_sentence_labels": [number % 2],
        }
        for number, length in enumerate(lengths)
    ]


def as_lists(lots: Iterator[Rows]) -> list[Example]:
    """All rows, every feature that is there by its name."""
    return [row for rows in lots for row in as_dicts(rows)]


def refusal(path: Path, box: Sandbox) -> str:
    with pytest.raises(DataError) as raised:
        list(read_hdf5(path, box))
    line = str(raised.value)
    assert line.startswith(f"{path}") and line.isprintable() and len(line) < 600
    return line


@pytest.mark.parametrize("options", [{}, {"chunks": True, "compression": "gzip"}])
def test_rows_of_one_length(box: Sandbox, tmp_path: Path, options: dict[str, object]) -> None:
    examples = make_examples(MOST_ROWS + 9)
    write_fixed(tmp_path / "a.hdf5", examples, WIDTH, ROOM, **options)
    lots = list(read_hdf5(tmp_path / "a.hdf5", box))
    assert len(lots) > 1
    found = as_lists(iter(lots))
    for row, example in zip(found, examples, strict=True):
        length = len(example["input_ids"])
        assert row["input_mask"] == [1] * length + [0] * (WIDTH - length)
        assert row["input_ids"] == example["input_ids"] + [0] * (WIDTH - length)
        assert row["masked_lm_positions"] == example["masked_lm_positions"] + [0] * (ROOM - 2)
        assert row["next_sentence_labels"] == example["next_sentence_labels"]


def test_rows_of_their_own_lengths(box: Sandbox, tmp_path: Path) -> None:
    examples = make_examples(1100)
    write_ragged(tmp_path / "a.hdf5", examples, WIDTH, ROOM)
    lots = list(read_hdf5(tmp_path / "a.hdf5", box))
    assert len(lots) > 1
    assert as_lists(iter(lots)) == examples
    write_packed(tmp_path / "b.hdf5", examples, WIDTH, ROOM)
    rows = as_lists(read_hdf5(tmp_path / "b.hdf5", box))
    for name in ("input_ids", "masked_lm_ids", "next_sentence_labels"):
        assert end_to_end(rows, name) == end_to_end(examples, name)
    lengths = [len(one["input_ids"]) for one in examples]
    assert end_to_end(rows, "packed_input_len") == lengths


def end_to_end(rows: list[Example], name: str) -> list[int]:
    return [value for row in rows for value in row[name]]


def test_labels_in_a_column_and_weights_beside(box: Sandbox, tmp_path: Path) -> None:
    examples = make_examples(5)
    write_fixed(tmp_path / "a.hdf5", examples, WIDTH, ROOM)
    with h5py.File(tmp_path / "a.hdf5", "r+") as file:
        labels = file["next_sentence_labels"][()]
        del file["next_sentence_labels"]
        file["next_sentence_labels"] = labels.astype(np.int64)[:, None]
        file["masked_lm_weights"] = np.ones((5, ROOM))
        file["else"] = "left alone"
    found = as_lists(read_hdf5(tmp_path / "a.hdf5", box))
    assert [row["next_sentence_labels"] for row in found] == [[0], [1], [0], [1], [0]]


Change = Callable[[h5py.File], object]


def replaced(name: str, value: object) -> Change:
    def change(file: h5py.File) -> None:
        del file[name]
        file[name] = value

    return change


def leads_elsewhere(file: h5py.File) -> None:
    del file["input_ids"]
    shape = (5, WIDTH)
    files = [("/etc/passwd", 0, 4 * shape[0] * shape[1])]
    file.create_dataset("input_ids", shape, dtype="i4", external=files)


def is_virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout(shape=(5, WIDTH), dtype="i4")
    layout[:] = h5py.VirtualSource("other.hdf5", "input_ids", shape=(5, WIDTH))
    del file["input_ids"]
    file.create_virtual_dataset("input_ids", layout)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda file: file.pop("segment_ids"), "it has no dataset segment_ids"),
        (lambda file: file.pop("next_sentence_labels"), "no dataset next_sentence_labels"),
        (lambda file: file.pop("input_mask"), "rows of one length and no dataset input_mask"),
        (replaced("input_ids", h5py.SoftLink("/segment_ids")), "input_ids is a link"),
        (replaced("input_ids", h5py.ExternalLink("b.hdf5", "/input_ids")), "input_ids is a link"),
        (leads_elsewhere, "input_ids lies in other files"),
        (is_virtual, "input_ids lies in other files"),
        (lambda file: file.move("input_ids", "input_ids_/x"), "it has no dataset input_ids"),
        (lambda file: (file.pop("input_ids"), file.create_group("input_ids")), "is no dataset"),
        (replaced("input_ids", np.ones((5, WIDTH))), "input_ids holds no integers"),
        (replaced("input_ids", np.ones((5, WIDTH), "S3")), "input_ids holds no integers"),
        (replaced("input_ids", ["a"] * 5), "input_ids holds no integers"),
        (replaced("input_ids", np.zeros((), "i4")), "input_ids has 0 dimensions"),
        (replaced("input_ids", np.zeros((5, 0), "i4")), "not of 1 .. 65535"),
        (replaced("input_ids", np.zeros((1, 65_536), "i1")), "not of 1 .. 65535"),
        (replaced("input_ids", np.zeros((0, WIDTH), "i4")), "has 5 rows, input_ids has 0"),
        (replaced("input_ids", h5py.Empty("i4")), "input_ids has 0 dimensions"),
        (replaced("input_mask", np.full((5, WIDTH), 2**31)), "that 32 bits cannot hold"),
    ],
)
def test_files_that_hold_no_rows(
    box: Sandbox, tmp_path: Path, change: Change, problem: str
) -> None:
    path = tmp_path / "a.hdf5"
    write_fixed(path, make_examples(5), WIDTH, ROOM)
    with h5py.File(path, "r+") as file:
        change(file)
    assert problem in refusal(path, box)


def test_long_rows_of_their_own_lengths(box: Sandbox, tmp_path: Path) -> None:
    path = tmp_path / "a.hdf5"
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, 9, 9_000 + number, np.int8) for number in range(600)]
    assert sum(map(len, rows[:512])) > MOST_VALUES
    with h5py.File(path, "w") as file:
        for name in ("input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids"):
            file.create_dataset(name, (len(rows),), h5py.vlen_dtype(np.int8))
        file["input_ids"][:] = rows
        file["next_sentence_labels"] = np.zeros(len(rows), np.int8)
    found = [row["input_ids"] for row in as_lists(read_hdf5(path, box))]  # in smaller lots
    assert found == [row.tolist() for row in rows]
    with h5py.File(path, "r+") as file:
        file["input_ids"][1] = np.ones(MOST_VALUES + 1, "i1")
    assert f"it has a row of {MOST_VALUES + 1} values" in refusal(path, box)


class Forger:
    """A child that a file took over: it answers what the file holds."""

    def read_pieces(self, path: Path, remedy: str) -> Iterator[bytearray]:
        contents = path.read_bytes()
        for start in range(0, len(contents), 1000):
            yield bytearray(contents[start : start + 1000])


def forged(path: Path, contents: bytes) -> list[Rows]:
    path.write_bytes(contents)
    return list(read_hdf5(path, Forger()))  # type: ignore[arg-type]


def answer_of(
    rows: list[list[int]], num_rows: int | None = None, values: int | None = None
) -> bytes:
    """Counts of rows, then as many zeros as belong, or as are asked for."""
    counts = np.array(rows, dtype="<i4").reshape(-1, len(FEATURES))
    total = int(np.maximum(counts, 0).sum()) if values is None else values
    head = NUM_ROWS.pack(len(counts) if num_rows is None else num_rows)
    return head + counts.tobytes() + bytes(4 * total)


@pytest.mark.parametrize(
    "contents",
    [
        b"short",
        NUM_ROWS.pack(0),
        NUM_ROWS.pack(-1),
        NUM_ROWS.pack(2**62),
        answer_of([[3] * 9], num_rows=2),
        answer_of([[3] * 9], values=26),
        answer_of([[3] * 9], values=28),
        answer_of([[-2] * 9]),
        answer_of([[-(2**31)] * 9]),
        answer_of([[2**31 - 1] * 9], values=3),
        answer_of([[MOST_VALUES // 2 + 1] * 9] * 2, values=3),
    ],
)
def test_a_forged_answer_is_refused(tmp_path: Path, contents: bytes) -> None:
    with pytest.raises(DataError, match="makes its reader process answer no rows"):
        forged(tmp_path / "a.hdf5", contents)


def test_whatever_is_answered_lies_within_its_values(tmp_path: Path) -> None:
    rng = Random(3)
    whole = answer_of([[6, ABSENT, 6, 2, 2, ABSENT, 1, ABSENT, ABSENT]] * 3) * 2
    accepted = 0
    for _ in range(300):
        changed = bytearray(whole)
        changed[rng.randrange(len(whole))] = rng.choice((0, 1, 3, 255))
        try:
            lots = forged(tmp_path / "a.hdf5", changed)
        except DataError:
            continue
        accepted += 1
        for rows in lots:
            ends = rows.starts + np.maximum(rows.counts, 0)
            assert rows.starts.min() >= 0 and ends.max() <= len(rows.values)
    assert 0 < accepted < 300


BOUNDS = Bounds(vocab_size=50, pad_id=1, max_seq_length=8, max_predictions=2)
RAGGED: Example = {
    "input_ids": [2, 9, 3, 8, 8, 3],
    "segment_ids": [0, 0, 0, 1, 1, 1],
    "masked_lm_positions": [1, 4],
    "masked_lm_ids": [7, 49],
    "next_sentence_labels": [1],
}
PADDED: Example = {
    "input_ids": [2, 9, 3, 8, 8, 3, 0, 0],
    "input_mask": [1, 1, 1, 1, 1, 1, 0, 0],
    "segment_ids": [0, 0, 0, 1, 1, 1, 0, 0],
    "masked_lm_positions": [1, 0, 0],
    "masked_lm_ids": [7, 0, 0],
    "next_sentence_labels": [0],
}
WEIGHTED: Example = {**PADDED, "masked_lm_weights": [1, 0, 0]}
PACKED: Example = {
    "input_ids": [2, 9, 3, 8, 8, 3, 2, 9, 3, 8, 3],
    "segment_ids": [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1],
    "masked_lm_positions": [1, 4, 7],
    "masked_lm_ids": [7, 49, 0],
    "next_sentence_labels": [1, 0],
    "packed_input_len": [6, 5],
    "packed_masked_lm_len": [2, 1],
}


def rows_of(*rows: Example) -> Rows:
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
    rows = rows_of({**PADDED, "input_ids": [*PADDED["input_ids"][:6], *[BOUNDS.pad_id] * 2]})
    assert take_rows(rows, BOUNDS, room_for(rows))[0] == 1


def without(row: Example, name: str) -> Example:
    return {key: values for key, values in row.items() if key != name}


def with_value(row: Example, name: str, index: int, value: int) -> Example:
    values = list(row[name])
    values[index] = value
    return {**row, name: values}


WRONG: list[tuple[Example, int]] = [
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
    (with_value(PACKED, "packed_input_len", 1, 6), foreign_rows.OTHER_PACKED),
    (with_value(PACKED, "packed_input_len", 0, -1), foreign_rows.OTHER_PACKED),
    (with_value(PACKED, "packed_input_len", 0, 2**31 - 1), foreign_rows.OTHER_PACKED),
    (with_value(PACKED, "packed_masked_lm_len", 1, 2), foreign_rows.OTHER_PACKED),
    (
        {**PACKED, "input_ids": [*PACKED["input_ids"], 3], "segment_ids": [0] * 12},
        foreign_rows.BAD_SEGMENTS,
    ),
    (with_value(PACKED, "packed_input_len", 1, 4), foreign_rows.TOO_SHORT),
    (with_value(PADDED, "input_mask", 0, 0), foreign_rows.BAD_MASK),
    (with_value(PADDED, "input_mask", 1, 2), foreign_rows.BAD_MASK),
    (with_value(PADDED, "input_mask", 5, 0), foreign_rows.BAD_PADDING),
    (with_value(PADDED, "input_ids", 7, 1), foreign_rows.BAD_PADDING),
    (with_value(PADDED, "segment_ids", 7, 1), foreign_rows.BAD_PADDING),
    (with_value(WEIGHTED, "masked_lm_weights", 2, 1), foreign_rows.BAD_WEIGHTS),
    (with_value(WEIGHTED, "masked_lm_positions", 2, 1), foreign_rows.BAD_MASKED_PADDING),
    (with_value(PADDED, "masked_lm_positions", 2, 1), foreign_rows.BAD_MASKED_PADDING),
    (with_value(PADDED, "masked_lm_ids", 1, 1), foreign_rows.BAD_MASKED_PADDING),
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
    (with_value(RAGGED, "segment_ids", 4, 0), foreign_rows.BAD_SEGMENTS),
    (with_value(RAGGED, "segment_ids", 4, 2), foreign_rows.BAD_SEGMENTS),
    ({**RAGGED, "segment_ids": [0] * 6}, foreign_rows.BAD_SEGMENTS),
    (with_value(RAGGED, "input_ids", 4, 50), foreign_rows.BAD_TOKEN),
    (with_value(RAGGED, "input_ids", 4, -1), foreign_rows.BAD_TOKEN),
    (with_value(RAGGED, "masked_lm_ids", 1, 50), foreign_rows.BAD_LABEL),
    (with_value(RAGGED, "masked_lm_ids", 1, -(2**31)), foreign_rows.BAD_LABEL),
    (with_value(RAGGED, "masked_lm_positions", 1, 6), foreign_rows.BAD_POSITION),
    (with_value(RAGGED, "masked_lm_positions", 1, -1), foreign_rows.BAD_POSITION),
    (with_value(PACKED, "masked_lm_positions", 2, 5), foreign_rows.BAD_POSITION),
    (with_value(PACKED, "masked_lm_positions", 2, -(2**31)), foreign_rows.BAD_POSITION),
    (with_value(RAGGED, "next_sentence_labels", 0, 2), foreign_rows.BAD_NEXT),
    (with_value(PACKED, "next_sentence_labels", 1, -1), foreign_rows.BAD_NEXT),
]


def test_every_problem_is_found() -> None:
    for wrong, problem in WRONG:
        rows = rows_of(RAGGED, PACKED, wrong, PADDED)
        assert take_rows(rows, BOUNDS, room_for(rows))[1:] == (problem, 2), wrong
    named = [
        number
        for name, number in vars(foreign_rows).items()
        if name.startswith(("LACKS", "OTHER_", "BAD_", "TOO_", "NOT_"))
    ]
    assert sorted(named) == list(range(1, len(foreign_rows.PROBLEMS)))
    assert {number for _, number in WRONG} == set(named)
