"""Writing one shard: an HDF5 file of contiguous arrays, then the sidecar that completes it."""

import hashlib
import io
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
from numpy.typing import NDArray

from mlperf_bert.common.atomic import replaced_file, write_file
from mlperf_bert.common.errors import DataError
from mlperf_bert.common.untrusted import file_sha256
from mlperf_bert.data.index import DatasetPlace, ShardSettings, Sidecar, sidecar_path
from mlperf_bert.prepare.examples import ExampleArrays

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# Every array starts at a cache line, so that the mapped int64 tables are aligned.
ALIGNMENT_BYTES = 64


def write_shard(
    path: Path,
    examples: ExampleArrays,
    *,
    source_name: str,
    source_sha256: str,
    settings: ShardSettings,
) -> Sidecar:
    """Write `path` and `<path>.json`, each beside and then renamed, the sidecar last.

    Equal examples give equal bytes. Raises DataError when a file cannot be written.
    """
    # A sidecar of an earlier shard must not stand beside the new file, not even for a moment.
    sidecar_path(path).unlink(missing_ok=True)
    with replaced_file(path) as temporary:
        datasets = _write_arrays(temporary, examples)
        digest = file_sha256(temporary)
        size = temporary.stat().st_size
    sidecar = Sidecar(
        shard_bytes=size,
        shard_sha256=digest,
        num_samples=len(examples),
        source_name=source_name,
        source_sha256=source_sha256,
        settings=settings,
        datasets=datasets,
        examples_sha256=_digest(examples),
    )
    write_file(sidecar_path(path), sidecar.to_json())
    return sidecar


class _PatientFile(io.FileIO):
    """Keeps the error of a full disk from libhdf5 (2.0), which ends the process on it.

    After the first error nothing more is written; `check` raises it.
    """

    error: OSError | None = None

    def write(self, contents: "ReadableBuffer", /) -> int:
        """Write all of it, unless that failed before."""
        left = memoryview(contents).cast("B")
        try:
            while left and self.error is None:
                left = left[super().write(left) :]
        except OSError as error:
            self.error = error
        return memoryview(contents).nbytes

    def truncate(self, size: int | None = None, /) -> int:
        """Set the size, unless something failed before."""
        try:
            if self.error is None:
                return super().truncate(size)
        except OSError as error:
            self.error = error
        return self.tell() if size is None else size

    def check(self) -> None:
        """Raise the first error."""
        if self.error is not None:
            raise self.error


def _write_arrays(path: Path, examples: ExampleArrays) -> dict[str, DatasetPlace]:
    with _PatientFile(path, "w+") as opened:
        places = _write_hdf5(opened, examples)
        opened.check()
    return places


def _write_hdf5(opened: _PatientFile, examples: ExampleArrays) -> dict[str, DatasetPlace]:
    places = {}
    with h5py.File(
        opened, "w", alignment_threshold=ALIGNMENT_BYTES, alignment_interval=ALIGNMENT_BYTES
    ) as file:
        for name, stored in _stored_arrays(examples):
            # No time stamps: the same examples must give the same bytes.
            dataset = file.create_dataset(name, data=stored, track_times=False)
            offset = dataset.id.get_offset()
            if offset is None:
                raise DataError(f"{opened.name!s}: {name}", "has no elements", "give more text")
            places[name] = DatasetPlace(stored.dtype.str, stored.size, offset)
    return places


def _digest(examples: ExampleArrays) -> str:
    digest = hashlib.sha256()
    for name, stored in _stored_arrays(examples):
        digest.update(f"{name} {stored.dtype.str} {stored.size}\n".encode())
        digest.update(np.ascontiguousarray(stored).data)
    return digest.hexdigest()


def _stored_arrays(examples: ExampleArrays) -> Iterator[tuple[str, NDArray[Any]]]:
    """Name and values of each array, little endian."""
    for field in fields(examples):
        values: NDArray[Any] = getattr(examples, field.name)
        yield field.name, values.astype(values.dtype.newbyteorder("<"), copy=False)
