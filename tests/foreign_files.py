"""Writers of the files in which others keep examples: TFRecord, and HDF5 in three layouts.

Plain on purpose, one example after the other, with nothing of the readers but the checksum.
"""

import gzip
import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mlperf_bert.common.crc32c import masked_crc32c
from mlperf_bert.data.shards import Shard

Example = dict[str, list[int]]  # name of a feature, without padding -> values


def examples_of(shard: Path) -> list[Example]:
    """The examples of one of our shards."""
    arrays = Shard(shard).arrays()
    spans = zip(pairwise(arrays.offsets), pairwise(arrays.masked_lm_offsets), strict=True)
    found = []
    for number, ((first, end), (first_masked, end_masked)) in enumerate(spans):
        start_of_b = int(arrays.segment_b_start[number])
        found.append(
            {
                "input_ids": arrays.input_ids[first:end].tolist(),
                "segment_ids": [0] * start_of_b + [1] * int(end - first - start_of_b),
                "masked_lm_positions": arrays.masked_lm_positions[first_masked:end_masked].tolist(),
                "masked_lm_ids": arrays.masked_lm_ids[first_masked:end_masked].tolist(),
                "next_sentence_labels": [int(arrays.next_sentence_label[number])],
            }
        )
    return found


def padded(example: Example, width: int, room: int) -> Example:
    """An example padded like the reference's, without weights."""
    masked = {"masked_lm_positions": room, "masked_lm_ids": room, "next_sentence_labels": 1}
    mask = {"input_mask": [1] * len(example["input_ids"])}
    return {
        name: values + [0] * (masked.get(name, width) - len(values))
        for name, values in {**example, **mask}.items()
    }


def varint(number: int) -> bytes:
    """An integer of protocol buffers; a negative one has 64 bits."""
    number %= 2**64
    found = bytearray()
    while number >= 128:
        found.append(number % 128 | 128)
        number >>= 7
    return bytes([*found, number])


def field(number: int, contents: bytes) -> bytes:
    """A field of bytes."""
    return varint(8 * number + 2) + varint(len(contents)) + contents


def integers(values: Iterable[int]) -> bytes:
    """A Feature with an Int64List."""
    return field(3, field(1, b"".join(map(varint, values))))


def floats(values: Sequence[float]) -> bytes:
    """A Feature with a FloatList."""
    return field(2, field(1, struct.pack(f"<{len(values)}f", *values)))


def message(features: Iterable[tuple[str, bytes]]) -> bytes:
    """A tf.train.Example."""
    entries = (field(1, name.encode()) + field(2, feature) for name, feature in features)
    return field(1, b"".join(field(1, entry) for entry in entries))


def reference_message(example: Example, width: int, room: int) -> bytes:
    """An example as the reference writes it."""
    features = [(name, integers(values)) for name, values in padded(example, width, room).items()]
    masked = len(example["masked_lm_ids"])
    weights = floats([1.0] * masked + [0.0] * (room - masked))
    return message([*features, ("masked_lm_weights", weights)])


def framed(record: bytes) -> bytes:
    """A record of a TFRecord file."""
    length = struct.pack("<Q", len(record))
    checksums = (struct.pack("<I", masked_crc32c(each)) for each in (length, record))
    return length + next(checksums) + record + next(checksums)


def write_tfrecord(path: Path, examples: Sequence[Example], width: int, room: int) -> None:
    """Write a TFRecord file like the reference."""
    records = (reference_message(example, width, room) for example in examples)
    path.write_bytes(b"".join(map(framed, records)))


def write_tfrecord_gz(path: Path, examples: Sequence[Example], width: int, room: int) -> None:
    """Write a gzip-compressed TFRecord file."""
    write_tfrecord(path, examples, width, room)
    path.write_bytes(gzip.compress(path.read_bytes()))


def write_fixed(
    path: Path, examples: Sequence[Example], width: int, room: int, **options: Any
) -> None:
    """2-D arrays, padded; labels 1-D."""
    rows = [padded(example, width, room) for example in examples]
    with h5py.File(path, "w") as file:
        for name in rows[0]:
            values = np.array([row[name] for row in rows], dtype=np.int32)
            if name == "next_sentence_labels":
                values = values[:, 0].astype(np.int8)
            file.create_dataset(name, data=values, **options)


def write_fixed_gzip(path: Path, examples: Sequence[Example], width: int, room: int) -> None:
    """Write rows of fixed length in compressed chunks."""
    write_fixed(path, examples, width, room, compression="gzip")


def write_ragged(path: Path, examples: Sequence[Example], width: int, room: int) -> None:
    """A row of its own length for every example; `width` and `room` are not needed."""
    with h5py.File(path, "w") as file:
        _write_rows(file, examples)
        labels = [example["next_sentence_labels"][0] for example in examples]
        file["next_sentence_labels"] = np.array(labels, dtype=np.int8)


def write_packed(path: Path, examples: Sequence[Example], width: int, room: int) -> None:
    """One, two or three examples in a row, in turn; masked positions count from the row's start."""
    rows: list[Example] = []
    left = list(examples)
    while left:
        rows.append(_pack(left[: len(rows) % 3 + 1]))
        del left[: len(rows[-1]["packed_input_len"])]
    with h5py.File(path, "w") as file:
        _write_rows(file, rows)
        _write_ragged(file, "next_sentence_labels", rows, "i1")
        _write_ragged(file, "packed_input_len", rows, "i2")
        _write_ragged(file, "packed_masked_lm_len", rows, "i2")


def _pack(examples: Sequence[Example]) -> Example:
    row: Example = {name: [] for name in (*examples[0], "packed_input_len", "packed_masked_lm_len")}
    for example in examples:
        first = len(row["input_ids"])
        moved = [position + first for position in example["masked_lm_positions"]]
        lengths = {
            "packed_input_len": [len(example["input_ids"])],
            "packed_masked_lm_len": [len(moved)],
        }
        for name, values in {**example, "masked_lm_positions": moved, **lengths}.items():
            row[name] += values
    return row


def _write_rows(file: h5py.File, rows: Sequence[Example]) -> None:
    _write_ragged(file, "input_ids", rows, "i2")
    _write_ragged(file, "segment_ids", rows, "i1")
    _write_ragged(file, "masked_lm_positions", rows, "i2")
    _write_ragged(file, "masked_lm_ids", rows, "i2")


def _write_ragged(file: h5py.File, name: str, rows: Sequence[Example], dtype: str) -> None:
    dataset = file.create_dataset(name, (len(rows),), dtype=h5py.vlen_dtype(np.dtype(dtype)))
    for number, row in enumerate(rows):
        dataset[number] = np.array(row[name], dtype=dtype)


Writer = Callable[[Path, Sequence[Example], int, int], None]
# Ending of the file -> what writes it; the first two are read as TFRecord.
WRITERS: dict[str, Writer] = {
    "tfrecord": write_tfrecord,
    "tfrecord.gz": write_tfrecord_gz,
    "fixed.hdf5": write_fixed,
    "fixed_gzip.hdf5": write_fixed_gzip,
    "ragged.hdf5": write_ragged,
    "packed.hdf5": write_packed,
}
