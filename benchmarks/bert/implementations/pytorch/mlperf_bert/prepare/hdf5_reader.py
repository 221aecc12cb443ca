"""Readers of untrusted HDF5 files: rows of examples as bytes, and a shard's layout as JSON.

Both readers run only in a child of the sandbox. Rows of fixed length are 2-D arrays, padded with
zeros; rows of variable length are a dataset of rows. next_sentence_labels may be 1-D. Other
contents of the file are ignored.

All such files have the same features, by name and number. Rows are sent in pieces: n, then counts,
int32 [n, K], then the values of feature after feature, int32.
"""

import json
import struct
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

FEATURES = (
    "input_ids",
    "input_mask",
    "segment_ids",
    "masked_lm_positions",
    "masked_lm_ids",
    "masked_lm_weights",
    "next_sentence_labels",
    "packed_input_len",
    "packed_masked_lm_len",
)
IDS, MASK, SEGMENTS, POSITIONS, LABELS, WEIGHTS, NEXT, LENGTHS, MASKED_LENGTHS = range(9)
ABSENT = -1  # count of a feature that a row does not have
NUM_ROWS = struct.Struct("<q")
MOST_ROWS = 2**12
MOST_VALUES = 2**22  # of one feature
NEEDED = ("input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids")
UNREAD = ("masked_lm_weights",)  # positions say the same: zero is [CLS], which is never masked
MOST_WIDTH = 65_535
_AT_A_TIME = 2**18  # values of a feature, unless the file's own chunks are larger
_CACHE_BYTES = 32 * 2**20  # a dataset: so that no chunk is unpacked again for every piece
_INT32 = np.iinfo(np.int32)

MAX_ENTRIES = 64  # a shard has seven


class _TooLongError(Exception):
    """A feature has more values than a piece may have; the argument is their number."""


def read_rows(path: str) -> Iterator[bytes | memoryview]:
    """Yield pieces of rows.

    Raises ValueError if it holds no examples, OSError if it is no HDF5 file.
    """
    with h5py.File(path, "r", locking=False, rdcc_nbytes=_CACHE_BYTES) as file:
        datasets = {
            name: _dataset(file, name) for name in FEATURES if name in file and name not in UNREAD
        }
        num_rows = _check(datasets)
        first, step = 0, _rows_at_a_time(datasets)
        while first < num_rows:
            end = min(num_rows, first + step)
            try:
                piece = _piece(datasets, first, end)
            except _TooLongError as error:  # variable length: only known when the rows are read
                if end - first == 1:
                    raise ValueError(f"it has a row of {error} values") from None
                step = (end - first) // 2
                continue
            yield from piece
            first = end


def _dataset(file: h5py.File, name: str) -> h5py.Dataset:
    # Links of other kinds and external data could lead into any file of this machine.
    if not isinstance(file.get(name, getlink=True), h5py.HardLink):
        raise ValueError(f"{name} is a link")
    dataset = file[name]
    if not isinstance(dataset, h5py.Dataset):
        raise ValueError(f"{name} is no dataset")
    creation = dataset.id.get_create_plist()
    if creation.get_layout() == h5py.h5d.VIRTUAL or creation.get_external_count():
        raise ValueError(f"{name} lies in other files")
    kind = h5py.check_vlen_dtype(dataset.dtype) or dataset.dtype
    if np.dtype(kind).kind not in "iu":
        raise ValueError(f"{name} holds no integers")
    shape: tuple[int, ...] = dataset.shape or ()
    if len(shape) not in ((1,) if kind is not dataset.dtype else (1, 2)):
        raise ValueError(f"{name} has {len(shape)} dimensions")
    if len(shape) == 2 and not 1 <= shape[1] <= MOST_WIDTH:
        raise ValueError(f"{name} has rows of {shape[1]} values, not of 1 .. {MOST_WIDTH}")
    return dataset


def _check(datasets: dict[str, h5py.Dataset]) -> int:
    """The number of rows. Raises ValueError if these datasets make no examples."""
    for name in (*NEEDED, "next_sentence_labels"):
        if name not in datasets:
            raise ValueError(f"it has no dataset {name}")
    if not _is_ragged(datasets["input_ids"]) and "input_mask" not in datasets:
        raise ValueError("it has rows of one length and no dataset input_mask")
    rows = {name: int(dataset.shape[0]) for name, dataset in datasets.items()}
    for name, count in rows.items():
        if count != rows["input_ids"]:
            raise ValueError(f"{name} has {count} rows, input_ids has {rows['input_ids']}")
    if rows["input_ids"] == 0:
        raise ValueError("it has no rows")
    return rows["input_ids"]


def _is_ragged(dataset: h5py.Dataset) -> bool:
    return h5py.check_vlen_dtype(dataset.dtype) is not None


def _rows_at_a_time(datasets: dict[str, h5py.Dataset]) -> int:
    """Rows per piece: as many as one chunk of the file has, within bounds."""
    width = max(dataset.shape[1] if dataset.ndim == 2 else 1 for dataset in datasets.values())
    chunk = max(dataset.chunks[0] if dataset.chunks else 1 for dataset in datasets.values())
    usual = max(1, _AT_A_TIME // (512 if width == 1 else width))
    return int(min(max(usual, chunk), MOST_ROWS, max(1, MOST_VALUES // width)))


def _piece(datasets: dict[str, h5py.Dataset], first: int, end: int) -> list[bytes | memoryview]:
    counts = np.full((end - first, len(FEATURES)), ABSENT, np.int32)
    values = []
    for number, name in enumerate(FEATURES):
        if name in datasets:
            counts[:, number], found = _values(datasets[name], first, end)
            values.append(_as_int32(name, found))
    piece: list[bytes | memoryview] = [NUM_ROWS.pack(end - first), counts.data.cast("B")]
    piece += [array.data.cast("B") if array.size else b"" for array in values]
    return piece


def _values(dataset: h5py.Dataset, first: int, end: int) -> tuple[Any, NDArray[Any]]:
    """The number of values of each row, and all values end to end."""
    rows = dataset[first:end]
    if not _is_ragged(dataset):
        return rows.size // len(rows), rows.reshape(-1)
    counts = [len(row) for row in rows]
    if sum(counts) > MOST_VALUES:
        raise _TooLongError(sum(counts))
    return counts, np.concatenate(rows)


def _as_int32(name: str, values: NDArray[Any]) -> NDArray[np.int32]:
    if values.size and (values.min() < _INT32.min or values.max() > _INT32.max):
        raise ValueError(f"{name} holds a number that 32 bits cannot hold")
    return np.ascontiguousarray(values, dtype=np.int32)


def read_layout(path: str) -> Iterator[bytes]:
    """Yield {"entries": {name: {"kind", "dtype", "shape", "offset"}}} of the root group.

    `kind` is "contiguous" for a dataset stored in this file in one piece, else the kind of entry.
    Only a dataset has the other keys: numpy's dtype, "rows x columns", and first byte or null.
    Raises ValueError for more entries than any shard has, OSError if it is no HDF5 file.
    """
    with h5py.File(path, "r", locking=False) as file:
        if len(file) > MAX_ENTRIES:
            raise ValueError(f"it has {len(file)} entries, at most {MAX_ENTRIES} are looked at")
        entries = {name: _describe(file, name) for name in file}
    yield json.dumps({"entries": entries}).encode("ascii")


def _describe(file: h5py.File, name: str) -> dict[str, object]:
    # A link of another kind could lead into any file of this machine.
    if not isinstance(file.get(name, getlink=True), h5py.HardLink):
        return {"kind": "link"}
    dataset = file[name]
    if not isinstance(dataset, h5py.Dataset):
        return {"kind": "group"}
    creation = dataset.id.get_create_plist()
    kinds = {h5py.h5d.CONTIGUOUS: "contiguous", h5py.h5d.CHUNKED: "chunked"}
    kind = kinds.get(creation.get_layout(), "compact or virtual")
    if creation.get_external_count():
        kind = "in other files"
    return {
        "kind": kind,
        "dtype": dataset.dtype.str,
        "shape": " x ".join(map(str, dataset.shape or ())),
        "offset": dataset.id.get_offset(),
    }
