"""Reads TensorFlow's V1 checkpoints: a table that lists tensors, and holds their numbers as values.

Several files may share the tensors. Source of the format: the messages in
tensorflow/core/util/saved_tensor_slice.proto and tensorflow/core/framework/tensor.proto.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bert_tools.convert.protobuf import fields, octets, signed, text, varints
from bert_tools.convert.tensorflow_errors import damage_of
from bert_tools.convert.tensorflow_keys import part_key
from bert_tools.convert.tensorflow_parts import (
    MAX_TENSOR_BYTES,
    Part,
    Place,
    Shape,
    dtype_name,
    elements_of,
    parse_part,
    parse_shape,
    place_parts,
)
from bert_tools.convert.tensorflow_table import (
    MAX_ENTRIES,
    MAX_INDEX_BYTES,
    SortedTable,
    open_table,
)
from mlperf_bert.common.untrusted import in_brief

_LIST_KEY = b""
# Blocks are ended when they have 256 KiB; names, lengths and such come on top of the numbers.
_MOST_OTHERS_BYTES = 2**20
_WIDEST_VARINT_BYTES = 10
# Where a `TensorProto` keeps numbers of a dtype, and whether each is written as a varint.
_FIELDS = {
    "float32": (5, "fixed"),
    "float64": (6, "fixed"),
    "int32": (7, "varint"),
    "int64": (10, "varint"),
    "float16": (13, "varint"),  # their 16 bits
}


@dataclass(frozen=True, slots=True)
class SlicedTensor:
    """A tensor of one or more values of tables; see `SourceTensor`."""

    name: str
    dtype: str
    shape: Shape
    parts: tuple[tuple[Place, Part, SortedTable], ...]

    def read(self) -> NDArray[Any]:
        """The numbers.

        Raises CheckpointError where a file is damaged or holds no numbers there.
        """
        first, *others = self.parts
        numbers = self._read_part(*first)
        if not others:
            return numbers
        found = np.empty(self.shape, numbers.dtype)
        found[first[0].ranges] = numbers
        for place, part, table in others:
            found[place.ranges] = self._read_part(place, part, table)
        return found

    def _read_part(self, place: Place, part: Part, table: SortedTable) -> NDArray[Any]:
        with damage_of(table.path, in_brief(self.name)):
            elements, count = elements_of(self.dtype), math.prod(place.shape)
            most_bytes = count * _widest_bytes(self.dtype) + _MOST_OTHERS_BYTES
            value = table.get(part_key(self.name, part), most_bytes)
            numbers = _parse_numbers(value, self.name, self.dtype)
            if len(numbers) != count:
                raise ValueError(f"has {len(numbers):,} numbers, not {count:,} as its shape has")
            return numbers.astype(elements, copy=False).reshape(place.shape)


@dataclass(frozen=True, slots=True)
class _Listed:
    """A `SavedSliceMeta`, and the table that lists it."""

    table: SortedTable
    dtype: str
    shape: Shape
    parts: tuple[Part, ...]


def read_slices(paths: Sequence[Path]) -> Mapping[str, SlicedTensor]:
    """The tensors of all files of a checkpoint, none of them read, in the order of the lists.

    Raises CheckpointError where a file is missing, damaged or not what it says. Of lists and index
    of each at most 4 MiB are read.
    """
    listed: dict[str, list[_Listed]] = {}
    for path in paths:
        with damage_of(path):
            table = open_table(path)
            for name, entry in _parse_list(table):
                listed.setdefault(name, []).append(entry)
    found = {}
    for name, entries in listed.items():
        with damage_of(entries[0].table.path, in_brief(name)):
            found[name] = _joined(name, entries)
    return found


def _joined(name: str, entries: Sequence[_Listed]) -> SlicedTensor:
    dtype, shape = entries[0].dtype, entries[0].shape
    if any((entry.dtype, entry.shape) != (dtype, shape) for entry in entries):
        raise ValueError("is listed with different shapes or kinds of numbers")
    parts = [(part, entry.table) for entry in entries for part in entry.parts]
    places = place_parts(shape, [part for part, _ in parts])
    if dtype in _FIELDS and math.prod(shape) * _widest_bytes(dtype) > MAX_TENSOR_BYTES:
        raise ValueError(f"has more than {MAX_TENSOR_BYTES:,} bytes")
    together = zip(places, parts, strict=True)
    return SlicedTensor(name, dtype, shape, tuple((place, *part) for place, part in together))


def _widest_bytes(dtype: str) -> int:
    """At most so many bytes stand for a number. Raises ValueError for what is not read."""
    if dtype not in _FIELDS:
        raise ValueError(f"holds {dtype}, where weights are floating-point numbers")
    elements, (_, way) = np.dtype(elements_of(dtype)), _FIELDS[dtype]
    return elements.itemsize if way == "fixed" else _WIDEST_VARINT_BYTES


def _parse_list(table: SortedTable) -> Iterator[tuple[str, _Listed]]:
    """What a `SavedTensorSlices` under the empty key lists. Raises ValueError and OSError."""
    count = 0
    for number, meta in fields(table.get(_LIST_KEY, MAX_INDEX_BYTES)):
        if number != 1:
            continue
        for kind, entry in fields(octets(meta)):
            if kind == 1:
                count += 1
                yield _parse_listed(table, octets(entry))
            if count > MAX_ENTRIES:
                raise ValueError(f"lists more than {MAX_ENTRIES:,} tensors")


def _parse_listed(table: SortedTable, message: memoryview) -> tuple[str, _Listed]:
    name, dtype = "", 0
    shape: Shape = ()
    parts = []
    for number, value in fields(message):
        if number == 1:
            name = text(value)
        elif number == 2:
            shape = parse_shape(octets(value))
        elif number == 3:
            dtype = signed(value)
        elif number == 4:
            parts.append(parse_part(octets(value)))
    return name, _Listed(table, dtype_name(dtype), shape, tuple(parts))


def _parse_numbers(message: memoryview, name: str, dtype: str) -> NDArray[Any]:
    """The numbers of a `SavedTensorSlices` under a part's key, flat. Raises ValueError."""
    saved = _field_of(message, 2)
    if _field_of(saved, 1) != name.encode():
        raise ValueError("has another tensor under its key")
    number, way = _FIELDS[dtype]
    packed = _field_of(_field_of(saved, 3), number)
    elements = np.dtype(elements_of(dtype))
    if way == "fixed":
        if len(packed) % elements.itemsize:
            raise ValueError("has numbers that are cut short")
        return np.frombuffer(packed, elements)
    bits = varints(packed)
    return bits.astype(f"<u{elements.itemsize}").view(elements)


def _field_of(message: memoryview, wanted: int) -> memoryview:
    """The bytes of a field, empty where there is none. Raises ValueError where there are two."""
    found = [octets(value) for number, value in fields(message) if number == wanted]
    if len(found) > 1:
        raise ValueError("has a field twice")
    return found[0] if found else memoryview(b"")
