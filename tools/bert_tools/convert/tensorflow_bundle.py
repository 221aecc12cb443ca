"""Reader of TensorFlow's V2 checkpoints: a table of tensors (`.index`) beside files of their bytes.

Every number in the table is checked against the sizes of the files, and the bytes of a tensor
against its CRC32C when it is read. Source of the format: the messages in
tensorflow/core/protobuf/tensor_bundle.proto.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from bert_tools.convert.protobuf import fields, integer, octets, signed, varint
from bert_tools.convert.tensorflow_table import MAX_INDEX_BYTES, open_table, read_into
from mlperf_bert.common.crc32c import mask, masked_crc32c
from mlperf_bert.common.errors import CheckpointError
from mlperf_bert.common.untrusted import in_brief, open_regular_file

MAX_TENSOR_BYTES = 2**32  # a word embedding of a million words and 1,024 channels
_NEWEST = 1  # version of the format that a reader must know, at most
_MOST_TEXT_BYTES = 8 * 2**20
_MOST_SHARDS = 100_000  # five digits in a file's name
_MOST_DIMENSIONS = 8
_MOST_PARTS = 10_000
_ALL = -1  # length of a part in a dimension that it covers
_NOT_ALL = "has a tensor whose parts are not all of it"
_BITS_PER_BYTE = 7  # bits of a signed integer in a key; one of them is the sign
# Numbers of the dtypes in tensorflow/core/framework/types.proto.
_DTYPES = MappingProxyType(
    {
        1: "float32",
        2: "float64",
        3: "int32",
        4: "uint8",
        5: "int16",
        6: "int8",
        7: "string",
        8: "complex64",
        9: "int64",
        10: "bool",
        14: "bfloat16",
        17: "uint16",
        18: "complex128",
        19: "float16",
        22: "uint32",
        23: "uint64",
    }
)
_READ = ("float16", "bfloat16", "float32", "float64", "int32", "int64")

Part = tuple[tuple[int, int], ...]
"""(start, length) in each dimension; in a file a length may be -1, for all of it."""
Shape = tuple[int, ...]


@contextmanager
def damage_of(path: Path, name: str = "") -> Iterator[None]:
    """Turn ValueError and OSError into CheckpointError about a file, or a tensor in it.

    The readers of formats raise these two, as they know the fault but not the file.
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
    except ValueError as error:
        raise CheckpointError(where, str(error), remedy) from None


@dataclass(frozen=True, slots=True)
class BundleTensor:
    """A tensor stored in one piece; see `SourceTensor`."""

    path: Path
    name: str
    dtype: str
    shape: Shape
    start: int  # byte of the file
    num_bytes: int
    crc: int  # masked

    def read(self) -> NDArray[Any]:
        """The numbers, bfloat16 as float32.

        Raises CheckpointError if the file is damaged or holds no numbers there.
        """
        with damage_of(self.path, in_brief(self.name)):
            if self.dtype not in _READ:
                raise ValueError(f"holds {self.dtype}, where weights are floating-point numbers")
            found = np.empty(math.prod(self.shape), _elements(self.dtype))
            read_into(self.path, self.start, found)
            if masked_crc32c(found) != self.crc:
                raise ValueError("has a wrong checksum")
            if self.dtype == "bfloat16":  # the upper half of a float32
                found = (found.astype(np.uint32) << 16).view(np.float32)
            return found.reshape(self.shape)

    def read_text(self) -> bytes:
        """The text, at most 8 MiB, of a tensor without dimensions.

        Its length and a checksum of the length stand before it. Raises CheckpointError, as `read`.
        """
        with damage_of(self.path, in_brief(self.name)):
            if self.dtype != "string" or self.shape or self.num_bytes > _MOST_TEXT_BYTES:
                raise ValueError(f"is no text of at most {_MOST_TEXT_BYTES:,} bytes")
            found = np.empty(self.num_bytes, np.uint8)
            read_into(self.path, self.start, found)
            size, place = varint(found.data, 0)
            if size != len(found) - place - 4:
                raise ValueError("has a text of another length than it says")
            # The length is checked as four bytes; its checksum counts as contents.
            before = google_crc32c.value(size.to_bytes(4, "little"))
            is_length = mask(before) == int.from_bytes(found[place : place + 4].tobytes(), "little")
            if not is_length or mask(google_crc32c.extend(before, found[place:])) != self.crc:
                raise ValueError("has a wrong checksum")
            return found[place + 4 :].tobytes()


@dataclass(frozen=True, slots=True)
class PartedTensor:
    """A tensor stored in parts, each with its place; see `SourceTensor`."""

    dtype: str
    shape: Shape
    parts: Sequence[tuple[Part, BundleTensor]]

    def read(self) -> NDArray[Any]:
        """The numbers, bfloat16 as float32. Raises CheckpointError, as one part does."""
        found = None
        for place, part in self.parts:
            numbers = part.read()
            found = np.empty(self.shape, numbers.dtype) if found is None else found
            found[tuple(slice(start, start + length) for start, length in place)] = numbers
        assert found is not None
        return found


@dataclass(frozen=True, slots=True)
class _Entry:
    """A `BundleEntryProto`."""

    dtype: str
    shape: Shape
    shard: int
    start: int
    size: int
    crc: int
    parts: tuple[Part, ...]


def read_bundle(prefix: Path) -> Mapping[str, BundleTensor | PartedTensor]:
    """The tensors of `prefix`.index, unread, in the order of their names.

    Raises CheckpointError if a file is missing, damaged or inconsistent. At most 4 MiB of the table
    are read, and every tensor lies within its file.
    """
    path = prefix.with_name(f"{prefix.name}.index")
    with damage_of(path):
        entries: dict[bytes, _Entry] = {}
        num_shards = 0
        for key, value in open_table(path).items(MAX_INDEX_BYTES):
            if key:
                entries[key] = _parse_entry(value)
            else:
                num_shards = _parse_header(value)
        if not 0 < num_shards < _MOST_SHARDS:
            raise ValueError(f"is in {in_brief(num_shards)} files")
        bundle = _Bundle(prefix, num_shards, entries, {})
        # A part's key begins with a zero byte, which no name has.
        names = {key: key.decode() for key in entries if not key.startswith(b"\0")}
        return {name: bundle.tensor(key, name) for key, name in names.items()}


@dataclass(frozen=True, slots=True)
class _Bundle:
    """The parsed table, and paths and sizes of the files needed so far."""

    prefix: Path
    num_shards: int
    entries: Mapping[bytes, _Entry]
    files: dict[int, tuple[Path, int]]

    def tensor(self, key: bytes, name: str) -> BundleTensor | PartedTensor:
        """A tensor of the table. Raises ValueError and OSError."""
        entry = self.entries[key]
        if not entry.parts:
            return self._whole(entry, name)
        parts = []
        for part, place in zip(entry.parts, _places(entry.shape, entry.parts), strict=True):
            found = self.entries.get(part_key(name, part))
            if found is None:
                raise ValueError(f"has no entry for a part of {in_brief(name)}")
            shape = tuple(length for _, length in place)
            if (found.shape, found.dtype) != (shape, entry.dtype) or found.parts:
                raise ValueError(f"has a part of {in_brief(name)} that does not fit it")
            parts.append((place, self._whole(found, name)))
        return PartedTensor(entry.dtype, entry.shape, parts)

    def _whole(self, entry: _Entry, name: str) -> BundleTensor:
        path, file_bytes = self._file(entry.shard)
        if not 0 <= entry.start <= entry.start + entry.size <= file_bytes:
            raise ValueError(f"says that {in_brief(name)} lies beyond the end of {path.name}")
        if entry.dtype in _READ:
            wanted = math.prod(entry.shape) * _elements(entry.dtype).itemsize
            if entry.size != wanted or wanted > MAX_TENSOR_BYTES:
                problem = f"of {entry.size:,} bytes, not {wanted:,} as its shape has"
                raise ValueError(f"has a tensor {in_brief(name)} {problem}")
        place = (entry.start, entry.size, entry.crc)
        return BundleTensor(path, name, entry.dtype, entry.shape, *place)

    def _file(self, shard: int) -> tuple[Path, int]:
        if not 0 <= shard < self.num_shards:
            raise ValueError(f"speaks of file {in_brief(shard)} of {self.num_shards}")
        if shard not in self.files:
            name = f"{self.prefix.name}.data-{shard:05d}-of-{self.num_shards:05d}"
            path = self.prefix.with_name(name)
            with damage_of(path), open_regular_file(path) as file:
                self.files[shard] = path, file.seek(0, 2)
        return self.files[shard]


def _elements(dtype: str) -> np.dtype[Any]:
    """Elements of a dtype in _READ, as stored."""
    return np.dtype("<u2" if dtype == "bfloat16" else dtype).newbyteorder("<")


def _parse_header(message: memoryview) -> int:
    """Number of data files of a `BundleHeaderProto`. Raises ValueError if we cannot read it."""
    num_shards = 0
    for number, value in fields(message):
        if number == 1:
            num_shards = signed(value)
        elif number == 2 and integer(value) != 0:
            raise ValueError("was written by a big-endian machine")
        elif number == 3:
            for version, least in fields(octets(value)):
                if version == 2 and integer(least) > _NEWEST:
                    raise ValueError("is in a newer version of the format")
    return num_shards


def _parse_entry(message: memoryview) -> _Entry:
    dtype, shard, start, size, crc = _int64s(message, {1: 0, 3: 0, 4: 0, 5: 0, 6: 0})
    shape: Shape = ()
    parts = []
    for number, value in fields(message):
        if number == 2:
            shape = _parse_shape(octets(value))
        elif number == 7:
            parts.append(_parse_part(octets(value)))
    name = _DTYPES.get(dtype, f"dtype_{dtype}")  # weights never have another
    return _Entry(name, shape, shard, start, size, crc, tuple(parts))


def _int64s(message: memoryview, defaults: Mapping[int, int]) -> list[int]:
    """Values of the fields with these numbers, in order."""
    found = {number: signed(value) for number, value in fields(message) if number in defaults}
    return [found.get(number, default) for number, default in defaults.items()]


def _parse_shape(message: memoryview) -> Shape:
    """A `TensorShapeProto`. Raises ValueError."""
    sizes: list[int] = []
    for number, value in fields(message):
        if number == 2:
            sizes += _int64s(octets(value), {1: 0})
        elif number == 3 and value:
            raise ValueError("has a tensor without a shape")
        if len(sizes) > _MOST_DIMENSIONS:
            raise ValueError(f"has a tensor of more than {_MOST_DIMENSIONS} dimensions")
    if min(sizes, default=0) < 0 or max(sizes, default=0) > MAX_TENSOR_BYTES:
        raise ValueError("has a tensor of an impossible shape")
    if math.prod(sizes) > MAX_TENSOR_BYTES:
        raise ValueError(f"has a tensor of more than {MAX_TENSOR_BYTES:,} numbers")
    return tuple(sizes)


def _parse_part(message: memoryview) -> Part:
    """A `TensorSliceProto`. Raises ValueError."""
    part: list[tuple[int, int]] = []
    for number, value in fields(message):
        if number == 1:
            start, length = _int64s(octets(value), {1: 0, 2: _ALL})
            part.append((start, length))
        if len(part) > _MOST_DIMENSIONS:
            raise ValueError("has a part of too many dimensions")
    return tuple(part)


def _places(shape: Shape, parts: Sequence[Part]) -> list[Part]:
    """Places of parts that make up a tensor one after the other along one dimension.

    TensorFlow divides variables in no other way. Raises ValueError if they are not the whole.
    """
    if len(parts) > _MOST_PARTS:
        raise ValueError(f"has a tensor in {len(parts):,} parts")
    places = [_place(shape, part) for part in parts]
    divided = [axis for axis, size in enumerate(shape) if places[0][axis][1] != size]
    if not divided and len(places) == 1:
        return places
    if len(divided) != 1:
        raise ValueError(_NOT_ALL)
    axis, end = divided[0], 0
    whole = tuple((0, size) for size in shape)
    for place in sorted(places, key=lambda place: place[axis][0]):
        if place[:axis] + place[axis + 1 :] != whole[:axis] + whole[axis + 1 :]:
            raise ValueError(_NOT_ALL)
        if place[axis][0] != end:
            raise ValueError("has a tensor whose parts do not follow one another")
        end += place[axis][1]
    if end != shape[axis]:
        raise ValueError(_NOT_ALL)
    return places


def _place(shape: Shape, part: Part) -> Part:
    """The part with its real lengths."""
    if len(part) != len(shape):
        raise ValueError("has a part of another number of dimensions than its tensor")
    place = []
    for size, (start, length) in zip(shape, part, strict=True):
        length = size - start if length == _ALL else length
        if start < 0 or length < 0 or start + length > size:
            raise ValueError("has a part that lies outside its tensor")
        place.append((start, length))
    return tuple(place)


def part_key(name: str, part: Sequence[tuple[int, int]]) -> bytes:
    """The key of a part of a tensor: (start, length) in each dimension, length -1 for all of it.

    Keys sort like their values. Facts of TensorFlow's ordered code: an unsigned integer is its
    number of bytes, then the bytes, high ones first; a text has its zero and 255 bytes escaped and
    an end mark; a signed integer has as many leading ones (a negative one: zeros) as bytes.
    """
    key = _unsigned(0) + _text(name) + _unsigned(len(part))
    for start, length in part:
        key += _signed(start) + _signed(length)
    return key


def _unsigned(value: int) -> bytes:
    size = (value.bit_length() + 7) // 8
    return bytes([size]) + value.to_bytes(size, "big")


def _text(text: str) -> bytes:
    return text.encode().replace(b"\x00", b"\x00\xff") + b"\x00\x01"  # UTF-8 has no byte 255


def _signed(value: int) -> bytes:
    """Key of a signed integer of 64 bits, as are all in a file."""
    magnitude = ~value if value < 0 else value
    size = magnitude.bit_length() // _BITS_PER_BYTE + 1
    # Leading ones, as many as bytes, then the number. A negative one has all bits inverted.
    bits = 8 * size
    code = ((1 << size) - 1) << (bits - size) | magnitude
    if value < 0:
        code ^= (1 << bits) - 1
    return code.to_bytes(size, "big")
