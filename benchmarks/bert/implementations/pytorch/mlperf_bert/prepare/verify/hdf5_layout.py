"""What an HDF5 file says of its datasets, as JSON. Runs in a child of the sandbox, nowhere else."""

import json
from collections.abc import Iterator

import h5py

MAX_ENTRIES = 64  # a shard has seven


def read_layout(path: str) -> Iterator[bytes]:
    """Yield {"entries": {name: {"kind", "dtype", "shape", "offset"}}} of the root group.

    `kind` is "contiguous" for a dataset that lies in this file in one piece, else what it is; the
    other keys are a dataset's only: numpy's dtype, "rows x columns", and first byte or null.
    Raises ValueError for more entries than any shard has, OSError for what is no HDF5 file.
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
