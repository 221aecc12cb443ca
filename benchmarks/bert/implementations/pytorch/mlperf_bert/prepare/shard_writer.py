"""Writing one shard: an HDF5 file of contiguous arrays, then the sidecar that completes it."""

from dataclasses import fields
from pathlib import Path

import h5py
import numpy as np

from mlperf_bert.data.atomic import replaced_file, write_file
from mlperf_bert.data.sidecar import DatasetPlace, ShardSettings, Sidecar, sidecar_path
from mlperf_bert.errors import DataError
from mlperf_bert.prepare.examples import ExampleArrays
from mlperf_bert.untrusted import file_sha256

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
    )
    write_file(sidecar_path(path), sidecar.to_json())
    return sidecar


def _write_arrays(path: Path, examples: ExampleArrays) -> dict[str, DatasetPlace]:
    places = {}
    with h5py.File(
        path, "w", alignment_threshold=ALIGNMENT_BYTES, alignment_interval=ALIGNMENT_BYTES
    ) as file:
        for field in fields(examples):
            values: np.ndarray = getattr(examples, field.name)
            stored = values.astype(values.dtype.newbyteorder("<"), copy=False)
            # No time stamps: the same examples must give the same bytes.
            dataset = file.create_dataset(field.name, data=stored, track_times=False)
            offset = dataset.id.get_offset()
            if offset is None:
                raise DataError(f"{path}: {field.name}", "has no elements", "give more text")
            places[field.name] = DatasetPlace(stored.dtype.str, stored.size, offset)
    return places
