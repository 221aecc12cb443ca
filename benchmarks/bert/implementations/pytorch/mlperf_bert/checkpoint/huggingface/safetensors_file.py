"""Reads safetensors files that anybody may have written: a checked header, tensors when asked.

The format: 8 bytes of header length, a JSON header, then the tensors without gaps. Written anew
instead of the library's reader, which takes a pipe for a file, maps the whole file, and raises
errors that are not ours.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.common.errors import CheckpointError, DataError
from mlperf_bert.common.records import Record
from mlperf_bert.common.untrusted import (
    MAX_JSON_BYTES,
    in_brief,
    open_regular_file,
    parse_json_object,
)

REMEDY = "give a file that is whole, as its source has it"

_PREFIX_BYTES = 8
_MOST_DIMENSIONS = 8
_MOST_SIZE = 2**40  # of a dimension, so that products stay within 64 bits of a file's size
# The format's word -> (its elements as numpy reads them, our word for them).
_DTYPES = {
    "F64": ("<f8", "float64"),
    "F32": ("<f4", "float32"),
    "F16": ("<f2", "float16"),
    "BF16": ("<u2", "bfloat16"),
    "I64": ("<i8", "int64"),
    "I32": ("<i4", "int32"),
    "I16": ("<i2", "int16"),
    "I8": ("|i1", "int8"),
    "U64": ("<u8", "uint64"),
    "U32": ("<u4", "uint32"),
    "U16": ("<u2", "uint16"),
    "U8": ("|u1", "uint8"),
    "BOOL": ("|b1", "bool"),
    "F8_E4M3": ("|u1", "float8_e4m3"),
    "F8_E5M2": ("|u1", "float8_e5m2"),
}
# Weights, and the whole numbers among which older files keep positions.
_READABLE = frozenset(("float64", "float32", "float16", "bfloat16", "int64", "int32"))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file; see `SourceTensor`."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: str
    start: int  # byte of the file

    def read(self) -> NDArray[Any]:
        """The numbers, bfloat16 as float32.

        Raises CheckpointError where the file is cut short by now, or holds numbers of
        another kind there.
        """
        if self.dtype not in _READABLE:
            problem = f"{in_brief(self.name)} holds {self.dtype}"
            raise CheckpointError(str(self.path), problem, "give weights of 16, 32 or 64 bits")
        found = np.empty(math.prod(self.shape), self.elements)
        _read_into(self.path, self.start, found)
        if self.dtype == "bfloat16":  # the upper half of a float32
            found = (found.astype(np.uint32) << 16).view(np.float32)
        return found.reshape(self.shape)


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, none of them read, in the order of its header.

    Raises CheckpointError where the file is missing, no regular file or damaged. At most 8 MiB of
    header are read, and every tensor lies within the file.
    """
    try:
        header, first, size = _read_header(path)
    except OSError as error:
        raise CheckpointError(str(path), error.strerror or "cannot be read", REMEDY) from None
    except ValueError as error:
        problem = f"has a header that is not valid JSON ({error})"
        raise CheckpointError(str(path), problem, REMEDY) from None
    header.pop("__metadata__", None)
    try:
        tensors = {name: _entry(path, header, name, first) for name in header}
    except DataError as error:
        raise CheckpointError(*error.args) from None
    _check_places(path, tensors, first, size)
    return tensors


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Header, byte of the first tensor, bytes of the file."""
    with open_regular_file(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(_PREFIX_BYTES) or b"", "little")
        if not 2 <= length <= size - _PREFIX_BYTES:
            raise OSError(0, "is cut short, or no safetensors file")
        if length > MAX_JSON_BYTES:
            raise OSError(0, f"has a header of more than {MAX_JSON_BYTES:,} bytes")
        text = np.empty(length, np.uint8)
    _read_into(path, _PREFIX_BYTES, text)
    return parse_json_object(text.tobytes()), _PREFIX_BYTES + length, size


def _entry(path: Path, header: Mapping[str, Any], name: str, first: int) -> StoredTensor:
    """One tensor of the header; its bytes are as many as its shape has. Raises DataError."""
    record = Record(str(path), header, REMEDY).record(name)
    word, shape, offsets = (
        record.text("dtype"),
        record.integers("shape"),
        record.integers("data_offsets"),
    )
    if word not in _DTYPES:
        raise record.error("dtype", f"is {in_brief(word)}")
    elements, dtype = _DTYPES[word]
    if len(shape) > _MOST_DIMENSIONS or any(size > _MOST_SIZE for size in shape):
        raise record.error("shape", "is larger than any file")
    wanted = math.prod(shape) * np.dtype(elements).itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != wanted:
        raise record.error("data_offsets", f"are not {wanted:,} bytes, as its shape has")
    return StoredTensor(path, name, dtype, shape, elements, first + offsets[0])


def _check_places(
    path: Path, tensors: Mapping[str, StoredTensor], first: int, file_bytes: int
) -> None:
    """One tensor after the other, from the header to the end of the file."""
    place = first
    for tensor in sorted(tensors.values(), key=lambda each: (each.start, math.prod(each.shape))):
        if tensor.start != place:
            problem = f"{in_brief(tensor.name)} does not begin where the tensor before it ends"
            raise CheckpointError(str(path), problem, REMEDY)
        place += math.prod(tensor.shape) * np.dtype(tensor.elements).itemsize
        if place > file_bytes:
            break
    if place != file_bytes:
        problem = f"has {file_bytes:,} bytes, its header speaks of {in_brief(place)}"
        raise CheckpointError(str(path), problem, REMEDY)


def _read_into(path: Path, start: int, found: NDArray[Any]) -> None:
    """Fill an array from a byte on. Raises CheckpointError."""
    flat: Any = found.reshape(-1).view(np.uint8)
    view = memoryview(flat)
    try:
        with open_regular_file(path) as file:
            file.seek(start)
            while len(view):
                count = file.readinto(view)
                if not count:
                    raise OSError(0, "is cut short")
                view = view[count:]
    except OSError as error:
        raise CheckpointError(str(path), error.strerror or "cannot be read", REMEDY) from None
