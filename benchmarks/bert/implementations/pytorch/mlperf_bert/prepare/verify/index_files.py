"""Checks of the index files of a set: digests and histogram, and the order by length."""

from pathlib import Path

import numpy as np

from mlperf_bert.common.errors import DataError
from mlperf_bert.data.index import INDEX_ARRAYS, REMEDY, LengthIndex, Manifest
from mlperf_bert.data.set_checks import check_index_file
from mlperf_bert.prepare.verify.report import Check

SAMPLES_AT_A_TIME = 2**22


def check_index(set_dir: Path, manifest: Manifest) -> Check:
    """Each index file has the size and digest of the manifest, and the histogram is right."""
    problems = []
    for file in manifest.index_files:
        try:
            check_index_file(set_dir, file)
        except DataError as error:
            problems.append(error)
    if not problems and _histogram(set_dir, manifest) != manifest.length_histogram:
        path = set_dir / "index" / "dataset.json"
        problem = "does not count the lengths of lengths.u16"
        problems.append(DataError(f"{path}: length_histogram", problem, REMEDY))
    return Check("index files", f"{len(manifest.index_files)}", tuple(problems))


def check_order(set_dir: Path) -> Check:
    """`order_by_length` numbers every sample once, by length, ties by number.

    Neighbours that ascend in (length, number) are all different, so N of them below N are all.
    Call only where `check_index` found nothing.
    """
    index = LengthIndex.open(set_dir)
    lengths, order = index.lengths, index.order_by_length
    path = set_dir / "index" / INDEX_ARRAYS[2][0]
    for first in range(0, len(order), SAMPLES_AT_A_TIME):
        ids = np.asarray(order[first : first + SAMPLES_AT_A_TIME + 1], dtype=np.int64)
        is_wrong = ids >= len(order)
        if not is_wrong.any():
            keys = lengths[ids].astype(np.int64) << 32 | ids
            is_wrong = np.append(False, keys[1:] <= keys[:-1])
        if is_wrong.any():
            problem = f"is not the order by length at element {first + int(is_wrong.argmax())}"
            return Check("order by length", "", (DataError(str(path), problem, REMEDY),))
    return Check("order by length", f"{len(order):,} samples")


def _histogram(set_dir: Path, manifest: Manifest) -> tuple[int, ...]:
    name, dtype = INDEX_ARRAYS[0]
    lengths = np.memmap(set_dir / "index" / name, dtype=dtype, mode="r")
    counts = np.zeros(2**16, dtype=np.int64)
    for first in range(0, len(lengths), SAMPLES_AT_A_TIME):
        counts += np.bincount(lengths[first : first + SAMPLES_AT_A_TIME], minlength=2**16)
    used = max(manifest.max_seq_length + 1, int(np.flatnonzero(counts)[-1]) + 1)
    return tuple(counts[:used].tolist())
