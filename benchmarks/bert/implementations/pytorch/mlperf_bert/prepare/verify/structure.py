"""Whether a shard is the HDF5 file that its sidecar describes: datasets, dtypes, sizes, places.

Training never opens HDF5, so a file that others cannot read would train all the same.
"""

from pathlib import Path

from mlperf_bert.common.errors import DataError
from mlperf_bert.common.untrusted import in_brief
from mlperf_bert.data.index import Sidecar
from mlperf_bert.data.set_checks import SHARD_REMEDY
from mlperf_bert.prepare.sandbox import Sandbox

LAYOUT_READER = "mlperf_bert.prepare.verify.hdf5_layout:read_layout"


def check_structure(path: Path, sidecar: Sidecar, sandbox: Sandbox) -> tuple[DataError, ...]:
    """What in the file differs from its sidecar; `sandbox` runs LAYOUT_READER."""
    try:
        entries = sandbox.read_record(path, SHARD_REMEDY).record("entries")
        problems = [
            DataError(f"{path}: {in_brief(name)}", "is no dataset of a shard", SHARD_REMEDY)
            for name in entries.values
            if name not in sidecar.datasets
        ]
        for name, place in sidecar.datasets.items():
            if name not in entries.values:
                problems.append(DataError(f"{path}: {name}", "is not in the file", SHARD_REMEDY))
                continue
            expected = {
                "kind": "contiguous",
                "dtype": place.dtype,
                "shape": str(place.count),
                "offset": place.offset,
            }
            found = entries.record(name).values
            problems += [
                DataError(
                    f"{path}: {name}",
                    f"has {key} {in_brief(found.get(key))} where its sidecar says {value!r}",
                    SHARD_REMEDY,
                )
                for key, value in expected.items()
                if found.get(key) != value
            ]
    except DataError as error:
        return (error,)
    return tuple(problems)
