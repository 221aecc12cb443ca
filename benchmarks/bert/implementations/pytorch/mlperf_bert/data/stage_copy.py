"""Copying one shard of a prepared set: whole, or sparse with the pages of some samples only."""

import hashlib
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.common.atomic import replaced_file
from mlperf_bert.common.errors import DataError
from mlperf_bert.common.untrusted import open_regular_file
from mlperf_bert.data.file_checks import file_digest
from mlperf_bert.data.shards import IntArray, Shard
from mlperf_bert.data.sidecar import DatasetPlace
from mlperf_bert.data.stage_record import NOT_STAGED

PAGE_BYTES = 4096  # what a file system stores or leaves out of a sparse file
CHUNK_BYTES = 2**23
SOURCE_REMEDY = "check the source with `mlperf_bert verify --full`"
COPY_REMEDY = "delete it and stage the data again"

# Flat arrays, by far the most of a shard -> the array of where each sample starts in them.
FLAT_ARRAYS = {
    "input_ids": "offsets",
    "masked_lm_positions": "masked_lm_offsets",
    "masked_lm_ids": "masked_lm_offsets",
}


def copy_file(source_path: Path, target: Path) -> None:
    """Copy a small file. Raises DataError where one cannot be read or the other not written."""
    with (
        _opened(source_path) as source,
        replaced_file(target) as temporary,
        temporary.open("wb") as copy,
    ):
        for chunk in _chunks(source, source_path, 0, source_path.stat().st_size):
            copy.write(chunk)


def copy_whole(shard: Shard, target: Path) -> None:
    """Copy a shard, unless `target` is it already.

    Raises DataError where the source is damaged or cannot be read, or the target not written.
    """
    wanted = shard.sidecar.shard_sha256
    if target.exists() and file_digest(target, COPY_REMEDY) == wanted:
        return
    digest = hashlib.sha256()
    with _opened(shard.path) as source, replaced_file(target) as temporary:
        with temporary.open("wb") as copy:
            for chunk in _chunks(source, shard.path, 0, shard.sidecar.shard_bytes):
                digest.update(chunk)
                copy.write(chunk)
        if digest.hexdigest() != wanted:
            problem = "is not the shard of its sidecar (its sha256 differs)"
            raise DataError(str(shard.path), problem, SOURCE_REMEDY)


def copy_samples(shard: Shard, is_wanted: NDArray[np.bool_], target: Path) -> None:
    """Copy some samples of a shard to a sparse file of its layout, unless `target` exists.

    Everything but the flat arrays is copied; there, the pages of the samples are. Samples that
    are not wanted get a next sentence label out of range, so that whoever reads one is refused.

    Args:
        shard: the source.
        is_wanted: bool [n], which of its samples.
        target: the file to make.

    Raises:
        DataError: as `copy_whole`; whether the copied bytes are right is not known here.
    """
    if target.exists():
        return  # renamed to this name when it was complete
    size = shard.sidecar.shard_bytes
    with _opened(shard.path) as source, replaced_file(target) as temporary:
        ranges = _byte_ranges(shard, source, np.flatnonzero(is_wanted))
        with temporary.open("wb") as copy:
            copy.truncate(size)
            for start, stop in ranges:
                copy.seek(start)
                for chunk in _chunks(source, shard.path, start, stop):
                    copy.write(chunk)
            place = shard.sidecar.datasets["next_sentence_label"]
            labels = _array(source, shard.path, place).copy()
            labels[~is_wanted] = NOT_STAGED
            copy.seek(place.offset)
            copy.write(labels.tobytes())


def _byte_ranges(shard: Shard, source: FileIO, rows: IntArray) -> list[tuple[int, int]]:
    """Start and stop of the bytes to copy, ascending; whole pages where a range ends in data."""
    places = shard.sidecar.datasets
    num_pages = -(-shard.sidecar.shard_bytes // PAGE_BYTES)
    is_copied = np.zeros(num_pages + 2, dtype=np.bool_)  # none before the first and after the last
    is_copied[1:-1] = True
    for name in FLAT_ARRAYS:
        first, stop = -(-places[name].offset // PAGE_BYTES), places[name].end // PAGE_BYTES
        is_copied[first + 1 : max(first, stop) + 1] = False  # pages with nothing else in them
    for name, table in FLAT_ARRAYS.items():
        offsets = _array(source, shard.path, places[table])
        starts, stops = offsets[rows], offsets[rows + 1]
        if ((starts < 0) | (stops <= starts) | (stops > places[name].count)).any():
            raise DataError(f"{shard.path}: {table}", "does not ascend", SOURCE_REMEDY)
        itemsize = np.dtype(places[name].dtype).itemsize
        first_pages = (places[name].offset + starts * itemsize) // PAGE_BYTES
        last_pages = (places[name].offset + stops * itemsize - 1) // PAGE_BYTES
        for page in range(int((last_pages - first_pages).max(initial=0)) + 1):
            is_copied[np.minimum(first_pages + page, last_pages) + 1] = True
    edges = np.flatnonzero(is_copied[1:] != is_copied[:-1]) * PAGE_BYTES
    ends = np.minimum(edges, shard.sidecar.shard_bytes).tolist()
    return list(zip(ends[::2], ends[1::2], strict=True))


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(str(path), error.strerror or "cannot be read", SOURCE_REMEDY)


def _opened(path: Path) -> FileIO:
    try:
        return open_regular_file(path)
    except OSError as error:
        raise _unreadable(path, error) from None


def _array(source: FileIO, path: Path, place: DatasetPlace) -> NDArray[Any]:
    contents = b"".join(_chunks(source, path, place.offset, place.end))
    return np.frombuffer(contents, dtype=place.dtype)


def _chunks(source: FileIO, path: Path, start: int, stop: int) -> Iterator[bytes]:
    """The bytes start .. stop - 1 in pieces. Raises DataError where they cannot be read."""
    while start < stop:
        try:
            source.seek(start)
            chunk = source.read(min(CHUNK_BYTES, stop - start))
        except OSError as error:
            raise _unreadable(path, error) from None
        if not chunk:
            raise DataError(str(path), f"ends at byte {start}", SOURCE_REMEDY)
        start += len(chunk)
        yield chunk
