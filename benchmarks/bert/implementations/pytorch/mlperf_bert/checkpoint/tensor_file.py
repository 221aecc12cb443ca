"""Writes tensors of the host as a safetensors file piece by piece, with its digest on the way.

The library's own writer first makes a second copy of every tensor, for which it holds Python's
lock; here a thread writes while another one trains. The format: 8 bytes of header length, a JSON
header padded with blanks to a multiple of 8, then the tensors without gaps.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlperf_bert.checkpoint.manifest import FileEntry

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
    # The format wants the tensors aligned: those with the widest elements first.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header = _header(ordered, metadata)
    digest, size = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:
        for contents in (header, *(_bytes_of(tensor) for _, tensor in ordered)):
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


def _header(ordered: list[tuple[str, Tensor]], metadata: Mapping[str, str] | None) -> memoryview:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, tensor in ordered:
        stop = start + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": shape,
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
