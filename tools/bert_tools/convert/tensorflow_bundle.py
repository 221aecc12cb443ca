"""Reader of TensorFlow's V2 checkpoints: a table of tensors (`.index`) beside files of their bytes.

The table has LevelDB's format (https://github.com/google/leveldb, doc/table_format.md): blocks of
entries whose keys omit the prefix shared with the previous key, each block followed by its kind and
masked CRC32C, an index of the blocks, and a footer of 48 bytes. An entry's value is a protocol
buffer (tensorflow/core/protobuf/tensor_bundle.proto).

Every block of the table and every tensor is checked against its CRC32C, and a tensor's size against
its shape and its file. What the checksums cover is trusted beyond that.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from mlperf_bert.errors import CheckpointError
from mlperf_bert.files import in_brief, open_regular_file, read_regular_file

MAX_INDEX_BYTES = 4 * 2**20  # BERT-large with its optimizer has 0.1 MB
_FOOTER_BYTES = 48
_MAGIC = 0xDB4775248B80FB57
_TRAILER_BYTES = 5  # a block's kind and checksum
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # kinds of a protocol buffer's fields
# Numbers of the dtypes in tensorflow/core/framework/types.proto.
_DTYPES = MappingProxyType(
    {
        1: "float32",
        2: "float64",
        3: "int32",
        7: "string",
        9: "int64",
        14: "bfloat16",
        19: "float16",
    }
)
_READ = ("float16", "bfloat16", "float32", "float64", "int32", "int64")


@contextmanager
def damage_of(path: Path, name: str = "") -> Iterator[None]:
    """Turn ValueError, IndexError and OSError into CheckpointError about a file or its tensor.

    The readers of formats raise these, as they know the fault but not the file.
    """
    where = f"{path}: {name}" if name else str(path)
    remedy = "give a checkpoint that is whole, as TensorFlow wrote it"
    try:
        yield
    except FileNotFoundError:
        remedy = "keep all files of a checkpoint together, as TensorFlow wrote them"
        raise CheckpointError(where, "is missing", remedy) from None
    except OSError as error:
        raise CheckpointError(where, error.strerror or "cannot be read", remedy) from None
    except IndexError:
        raise CheckpointError(where, "is cut short", remedy) from None
    except ValueError as error:
        raise CheckpointError(where, str(error), remedy) from None


@dataclass(frozen=True, slots=True)
class BundleTensor:
    """A tensor of a checkpoint; see `SourceTensor`."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # byte of the file
    num_bytes: int
    crc: int  # masked

    def read(self) -> NDArray[Any]:
        """The numbers, bfloat16 as float32.

        Raises CheckpointError if the file is damaged or holds no numbers there.
        """
        with damage_of(self.path, in_brief(self.name)):
            if self.dtype not in _READ:
                problem = f"holds {self.dtype}, where weights are floating-point numbers"
                raise ValueError(f"{problem} in one piece")
            contents = self._contents()
            if masked_crc32c(contents) != self.crc:
                raise ValueError("has a wrong checksum")
            found = contents.view(_elements(self.dtype))
            if self.dtype == "bfloat16":  # the upper half of a float32
                found = (found.astype(np.uint32) << 16).view(np.float32)
            return found.reshape(self.shape)

    def _contents(self) -> NDArray[np.uint8]:
        with open_regular_file(self.path) as file:
            file.seek(self.start)
            found = np.fromfile(file, np.uint8, self.num_bytes)
        if len(found) < self.num_bytes:
            raise ValueError("is cut short")
        return found


def read_bundle(prefix: Path) -> Mapping[str, BundleTensor]:
    """The tensors of `prefix`.index, unread, in the order of their names.

    A variable that was saved in parts is listed with the dtype "parts", and refused when it is
    read: no published BERT has one.

    Raises CheckpointError if a file is missing or damaged, and if a tensor does not lie within its
    file or has another size than its shape.
    """
    path = prefix.with_name(f"{prefix.name}.index")
    with damage_of(path):
        entries = dict(_table(read_regular_file(path, MAX_INDEX_BYTES)))
        header = dict(fields(entries.pop(b"", memoryview(b""))))
        if header.get(2):
            raise ValueError("was written by a big-endian machine")
        count = header.get(1, 0)
        names = [f"{prefix.name}.data-{shard:05d}-of-{count:05d}" for shard in range(count)]
        paths = [prefix.with_name(name) for name in names]
        # A key with a leading zero byte is of a part of a tensor.
        whole = {key.decode(): entry for key, entry in entries.items() if key[:1] != b"\0"}
        tensors = {name: _tensor(name, entry, paths) for name, entry in whole.items()}
    sizes = {path: _size_of(path) for path in paths}
    with damage_of(path):
        for tensor in tensors.values():
            if tensor.start + tensor.num_bytes > sizes[tensor.path]:
                where = f"beyond the end of {tensor.path.name}"
                raise ValueError(f"says that {in_brief(tensor.name)} lies {where}")
    return tensors


def _tensor(name: str, message: memoryview, paths: list[Path]) -> BundleTensor:
    """A tensor by its `BundleEntryProto`. Raises ValueError and IndexError."""
    entry = dict(fields(message))
    shape = tuple(
        dict(fields(size)).get(1, 0)
        for number, size in fields(entry.get(2, memoryview(b"")))
        if number == 2
    )
    number, size = entry.get(1, 0), entry.get(5, 0)
    dtype = "parts" if 7 in entry else _DTYPES.get(number, f"dtype_{number}")
    if dtype in _READ:
        wanted = math.prod(shape) * _elements(dtype).itemsize
        if size != wanted:
            problem = f"of {size:,} bytes, not {wanted:,} as its shape has"
            raise ValueError(f"has a tensor {in_brief(name)} {problem}")
    path, start, crc = paths[entry.get(3, 0)], entry.get(4, 0), entry.get(6, 0)
    return BundleTensor(path, name, dtype, shape, start, size, crc)


def _size_of(path: Path) -> int:
    """Bytes of a data file. Raises CheckpointError."""
    with damage_of(path), open_regular_file(path) as file:
        return file.seek(0, 2)


def _elements(dtype: str) -> np.dtype[Any]:
    """Elements of a dtype in _READ, as stored."""
    return np.dtype("<u2" if dtype == "bfloat16" else dtype).newbyteorder("<")


def _table(contents: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """Entries of a table, with ascending keys. Raises ValueError and IndexError."""
    footer = memoryview(contents)[-_FOOTER_BYTES:]
    if len(footer) < _FOOTER_BYTES or int.from_bytes(footer[-8:], "little") != _MAGIC:
        raise ValueError("is cut short, or no checkpoint of TensorFlow")
    _, place = varint(footer, 0)  # the index of metadata, which is empty
    _, place = varint(footer, place)
    for _, handle in _entries(_block(contents, footer[place:])):
        yield from _entries(_block(contents, handle))


def _block(contents: bytes, handle: memoryview) -> memoryview:
    """A block's contents by its place and size. Raises ValueError."""
    start, place = varint(handle, 0)
    size, _ = varint(handle, place)
    stored = contents[start : start + size + _TRAILER_BYTES]
    if len(stored) < size + _TRAILER_BYTES or (
        masked_crc32c(stored[:-4]) != int.from_bytes(stored[-4:], "little")
    ):
        raise ValueError("has a block that is cut short or has a wrong checksum")
    if stored[size]:
        raise ValueError("has a compressed block, which TensorFlow's V2 checkpoints never have")
    return memoryview(stored)[:size]


def _entries(block: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Full keys and values of a block."""
    # After the entries: the places of full keys, for a search, and their number.
    end = len(block) - 4 - 4 * int.from_bytes(block[-4:], "little")
    key, place = b"", 0
    while place < end:
        shared, place = varint(block, place)
        rest, place = varint(block, place)
        size, place = varint(block, place)
        key = key[:shared] + bytes(block[place : place + rest])
        place += rest
        yield key, block[place : place + size]
        place += size


def fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protocol buffer, in order, without a schema.

    Values are unsigned integers, or bytes in place (https://protobuf.dev/programming-guides/encoding).
    Raises ValueError for an unknown kind of field, IndexError at the end of the message.
    """
    place = 0
    while place < len(message):
        tag, place = varint(message, place)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, place = varint(message, place)
            yield number, value
            continue
        if kind == _BYTES:
            size, place = varint(message, place)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError("has a field of an unknown kind")
        contents = message[place : place + size]
        yield number, contents if kind == _BYTES else int.from_bytes(contents, "little")
        place += size


def masked_crc32c(contents: bytes | NDArray[Any]) -> int:
    """The CRC32C of bytes, or of an array's memory, rotated by 15 bits and with a constant added.

    TensorFlow stores it so, that checksums of data with checksums in them do not cancel out. Raises
    ValueError if that memory has gaps.
    """
    crc: int = google_crc32c.value(contents)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def varint(message: memoryview, place: int) -> tuple[int, int]:
    """An integer of seven bits per byte, low ones first, and the place after it.

    Raises IndexError if the message ends before it does.
    """
    value, shift = 0, 0
    while True:
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
