"""Reads TensorFlow's V2 checkpoints: a table of tensors (`.index`) beside files of their bytes.

Every number in the table is checked against the sizes of the files, and the bytes of a tensor
against its CRC32C when it is read. Source of the format: the messages in
tensorflow/core/protobuf/tensor_bundle.proto.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from bert_tools.convert.protobuf import fields, integer, octets, signed, varint
from bert_tools.convert.tensorflow_errors import damage_of
from bert_tools.convert.tensorflow_parts import (
    ELEMENTS,
    MAX_TENSOR_BYTES,
    Part,
    Place,
    Shape,
    as_numbers,
    dtype_name,
    elements_of,
    parse_part,
    parse_shape,
    part_key,
    place_parts,
)
from bert_tools.convert.tensorflow_table import MAX_INDEX_BYTES, open_table, read_into
from mlperf_bert.common.crc32c import mask, masked_crc32c
from mlperf_bert.common.untrusted import in_brief, open_regular_file

_HEADER_KEY = b""
_NEWEST = 1  # version of the format that a reader must know, at most
_MOST_TEXT_BYTES = 8 * 2**20
_MOST_SHARDS = 100_000  # five digits in a file's name


@dataclass(frozen=True, slots=True)
class BundleTensor:
    """A tensor whose bytes lie in one piece; see `SourceTensor`."""

    path: Path
    name: str
    dtype: str
    shape: Shape
    start: int  # byte of the file
    num_bytes: int
    crc: int  # masked

    def read(self) -> NDArray[Any]:
        """The numbers, bfloat16 as float32.

        Raises CheckpointError where the file is damaged or holds no numbers there.
        """
        with damage_of(self.path, in_brief(self.name)):
            found = np.empty(math.prod(self.shape), elements_of(self.dtype))
            read_into(self.path, self.start, found)
            if masked_crc32c(found) != self.crc:
                raise ValueError("has a wrong checksum")
            return as_numbers(found, self.dtype).reshape(self.shape)

    def read_text(self) -> bytes:
        """The one text, of at most 8 MiB, that a tensor without dimensions is.

        Before it stand its length and a checksum of that. Raises CheckpointError, as `read`.
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
            if mask(before) != int.from_bytes(found[place : place + 4].tobytes(), "little"):
                raise ValueError("has a wrong checksum")
            if mask(google_crc32c.extend(before, found[place:])) != self.crc:
                raise ValueError("has a wrong checksum")
            return found[place + 4 :].tobytes()


@dataclass(frozen=True, slots=True)
class PartedTensor:
    """A tensor that is kept in parts; see `SourceTensor`."""

    dtype: str
    shape: Shape
    parts: tuple[tuple[Place, BundleTensor], ...]

    def read(self) -> NDArray[Any]:
        """The numbers, bfloat16 as float32. Raises CheckpointError, as one part does."""
        first, *others = self.parts
        numbers = first[1].read()
        found = np.empty(self.shape, numbers.dtype)
        found[first[0].ranges] = numbers
        for place, part in others:
            found[place.ranges] = part.read()
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
    """The tensors of `prefix`.index, none of them read, in the order of their names.

    Raises CheckpointError where a file is missing, damaged or not what it says. Of the table at
    most 4 MiB are read, and every tensor lies within its file.
    """
    path = prefix.with_name(f"{prefix.name}.index")
    with damage_of(path):
        entries: dict[bytes, _Entry] = {}
        num_shards = 0
        for key, value in open_table(path).items(MAX_INDEX_BYTES):
            if key == _HEADER_KEY:
                num_shards = _parse_header(value)
            else:
                entries[key] = _parse_entry(value)
        if not 0 < num_shards < _MOST_SHARDS:
            raise ValueError(f"is in {in_brief(num_shards)} files")
        bundle = _Bundle(prefix, num_shards, entries, {})
        # A part's key begins with a zero byte, which no name has.
        names = {key: key.decode() for key in entries if not key.startswith(b"\0")}
        return {name: bundle.tensor(key, name) for key, name in names.items()}


@dataclass(frozen=True, slots=True)
class _Bundle:
    """The parsed table, and sizes of the files as far as they were needed."""

    prefix: Path
    num_shards: int
    entries: Mapping[bytes, _Entry]
    file_bytes: dict[int, int]

    def tensor(self, key: bytes, name: str) -> BundleTensor | PartedTensor:
        """A tensor of the table. Raises ValueError and OSError."""
        entry = self.entries[key]
        if not entry.parts:
            return self._whole(entry, name)
        places = place_parts(entry.shape, entry.parts)
        parts = []
        for part, place in zip(entry.parts, places, strict=True):
            found = self.entries.get(part_key(name, part))
            if found is None:
                raise ValueError(f"has no entry for a part of {in_brief(name)}")
            if (found.shape, found.dtype) != (place.shape, entry.dtype) or found.parts:
                raise ValueError(f"has a part of {in_brief(name)} that does not fit it")
            parts.append((place, self._whole(found, name)))
        return PartedTensor(entry.dtype, entry.shape, tuple(parts))

    def _whole(self, entry: _Entry, name: str) -> BundleTensor:
        path = self._data_path(entry.shard)
        if not 0 <= entry.start <= entry.start + entry.size <= self._size(entry.shard):
            raise ValueError(f"says that {in_brief(name)} lies beyond the end of {path.name}")
        if entry.dtype in ELEMENTS:
            wanted = math.prod(entry.shape) * np.dtype(ELEMENTS[entry.dtype]).itemsize
            if entry.size != wanted or wanted > MAX_TENSOR_BYTES:
                problem = f"of {entry.size:,} bytes, not {wanted:,} as its shape has"
                raise ValueError(f"has a tensor {in_brief(name)} {problem}")
        place = (entry.start, entry.size, entry.crc)
        return BundleTensor(path, name, entry.dtype, entry.shape, *place)

    def _data_path(self, shard: int) -> Path:
        name = f"{self.prefix.name}.data-{shard:05d}-of-{self.num_shards:05d}"
        return self.prefix.with_name(name)

    def _size(self, shard: int) -> int:
        if not 0 <= shard < self.num_shards:
            raise ValueError(f"speaks of file {in_brief(shard)} of {self.num_shards}")
        if shard not in self.file_bytes:
            path = self._data_path(shard)
            with damage_of(path), open_regular_file(path) as file:
                self.file_bytes[shard] = file.seek(0, 2)
        return self.file_bytes[shard]


def _parse_header(message: memoryview) -> int:
    """Number of data files of a `BundleHeaderProto`. Raises ValueError for what we cannot read."""
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
    found = {number: 0 for number in (1, 3, 4, 5, 6)}
    shape: Shape = ()
    parts = []
    for number, value in fields(message):
        if number == 2:
            shape = parse_shape(octets(value))
        elif number == 7:
            parts.append(parse_part(octets(value)))
        elif number in found:
            found[number] = signed(value)
    dtype, shard, start, size, crc = found.values()
    return _Entry(dtype_name(dtype), shape, shard, start, size, crc, tuple(parts))
