"""Writes tensors of the host as a safetensors file piece by piece, with its digest on the way.

The library's own writer first makes a second copy of every tensor, for which it holds Python's
lock; here a thread writes while another one trains. The format: 8 bytes of header length, a JSON
header padded with blanks to a multiple of 8, then the tensors without gaps.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlperf_bert.checkpoint.manifest import FileEntry

Kind = tuple[torch.dtype, tuple[int, ...]]  # dtype and shape

_PIECE_BYTES = 4 * 2**20
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    wrote: Callable[[int], None] = lambda num_bytes: None,
) -> FileEntry:
    """Write a new file and have it on disk when this returns; its size and digest.

    `tensors` are contiguous, on the CPU and of one of the dtypes above; `wrote` is told of each
    piece. Raises OSError.
    """
    kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return write_one_by_one(path, kinds, tensors.__getitem__, metadata, wrote)


def write_one_by_one(
    path: Path,
    kinds: Mapping[str, Kind],
    make: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
    wrote: Callable[[int], None] = lambda num_bytes: None,
) -> FileEntry:
    """As `write_tensors`, with one tensor at a time in memory: `make` gives the one of a name.

    `kinds` are dtype and shape of each.
    """
    # The format wants the tensors aligned: those with the widest elements first.
    ordered = sorted(kinds.items(), key=lambda item: (-item[1][0].itemsize, item[0]))
    digest, size = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:
        for contents in _contents(ordered, make, metadata):
            for start in range(0, len(contents), _PIECE_BYTES):
                piece = contents[start : start + _PIECE_BYTES]
                written = 0
                while written < len(piece):
                    written += file.write(piece[written:])
                digest.update(piece)
                wrote(len(piece))
            size += len(contents)
        os.fsync(file.fileno())
    return FileEntry(size, digest.hexdigest())


def _contents(
    ordered: list[tuple[str, Kind]],
    make: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None,
) -> Iterator[memoryview]:
    yield _header(ordered, metadata)
    for name, kind in ordered:
        tensor = make(name)
        assert (tensor.dtype, tuple(tensor.shape)) == kind
        yield _bytes_of(tensor)


def _header(ordered: list[tuple[str, Kind]], metadata: Mapping[str, str] | None) -> memoryview:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, (dtype, shape) in ordered:
        stop = start + math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": _DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return memoryview(len(text).to_bytes(8, "little") + text)


def _bytes_of(tensor: Tensor) -> memoryview:
    assert tensor.is_contiguous()
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)
