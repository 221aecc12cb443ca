"""Rows of an HDF5 file of others, read in a child of the sandbox: what is made of its answer here.

The file may have taken the child over, so its answer is as little trusted as the file.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mlperf_bert.common.errors import DataError
from mlperf_bert.prepare.foreign_features import (
    ABSENT,
    FEATURES,
    MOST_ROWS,
    MOST_VALUES,
    NUM_ROWS,
)
from mlperf_bert.prepare.foreign_rows import Rows
from mlperf_bert.prepare.sandbox import Sandbox
from mlperf_bert.prepare.sandbox_server import Limits

REMEDY = "get the file again, or one with examples of BERT's pre-training"
ROWS_READER = "mlperf_bert.prepare.hdf5_examples:read_rows"
# Some hundreds of rows take hundredths of a second, and ten minutes are for millions. Damaged files
# send libhdf5 into loops without end, so no piece may take long. The child also waits for us.
READING = Limits(cpu_seconds=600, piece_cpu_seconds=10, wall_seconds=3600, answer_bytes=2**36)

_VALUE_BYTES = 4


def read_hdf5(path: Path, sandbox: Sandbox) -> Iterator[Rows]:
    """All rows of a file, some hundreds at a time; `sandbox` runs ROWS_READER.

    Raises DataError where the file is no HDF5 file of examples, or breaks its reader.
    """
    answer = _Answer(path, sandbox.read_pieces(path, REMEDY))
    while head := answer.take(NUM_ROWS.size, may_end=True):
        (num_rows,) = NUM_ROWS.unpack(head)
        if not 1 <= num_rows <= MOST_ROWS:
            raise answer.error()
        shape = (num_rows, len(FEATURES))
        counts = np.frombuffer(answer.take(_VALUE_BYTES * num_rows * len(FEATURES)), "<i4")
        counts = counts.reshape(shape).astype(np.int64)
        present = np.maximum(counts, 0)
        if counts.min() < ABSENT or present.sum(axis=0).max() > MOST_VALUES:
            raise answer.error()
        # Feature after feature, each row after row.
        ends = np.cumsum(present.T).reshape(shape[::-1]).T
        values = np.frombuffer(answer.take(_VALUE_BYTES * int(present.sum())), "<i4")
        starts = np.ascontiguousarray(ends - present)
        yield Rows(values.astype(np.int32, copy=False), starts, counts)


class _Answer:
    """The bytes that a child sends, taken in the portions in which they belong together."""

    def __init__(self, path: Path, pieces: Iterator[bytearray]) -> None:
        self._path = path
        self._pieces = pieces
        self._held = bytearray()

    def take(self, size: int, *, may_end: bool = False) -> bytearray:
        """The next `size` bytes; none at all where the answer ends here and may."""
        while len(self._held) < size:
            piece = next(self._pieces, None)
            if piece is None:
                if may_end and not self._held:
                    return bytearray()
                raise self.error()
            self._held += piece
        taken, self._held = self._held[:size], self._held[size:]
        return taken

    def error(self) -> DataError:
        """Of an answer that is none."""
        return DataError(str(self._path), "makes its reader process answer no rows", REMEDY)
