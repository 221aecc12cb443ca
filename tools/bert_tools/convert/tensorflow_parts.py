"""Shapes, dtypes and parts of tensors, and keys of parts, as TensorFlow's checkpoints have them.

Keys sort as what they stand for. Facts of TensorFlow's ordered code: an integer without a sign is
its number of bytes and these, the high ones first; a text has its zero and 255 bytes escaped and an
end of its own; an integer with a sign has as many leading ones (for a negative one: zeros) as it
has bytes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bert_tools.convert.protobuf import fields, octets, signed

MAX_TENSOR_BYTES = 2**32  # a word embedding of a million words and 1,024 channels
_MOST_DIMENSIONS = 8
_MOST_PARTS = 10_000
_ALL = -1  # length of a part in a dimension that it has all of
_BITS_PER_BYTE = 7  # of an integer with a sign in a key; one bit of all of them is the sign

# Numbers of the dtypes in tensorflow/core/framework/types.proto.
DTYPES = MappingProxyType(
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

# Of those that are read, the elements as numpy reads them.
ELEMENTS = MappingProxyType(
    {
        "float16": "<f2",
        "bfloat16": "<u2",
        "float32": "<f4",
        "float64": "<f8",
        "int32": "<i4",
        "int64": "<i8",
    }
)

Part = tuple[tuple[int, int], ...]  # (start, length) in each dimension; length -1: all of it
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a tensor, with the lengths that it really has."""

    starts: Shape
    shape: Shape

    @property
    def ranges(self) -> tuple[slice, ...]:
        """Where it goes in the whole."""
        pairs = zip(self.starts, self.shape, strict=True)
        return tuple(slice(start, start + length) for start, length in pairs)


def dtype_name(number: int) -> str:
    """The name of a dtype; of one that weights never have, its number."""
    return DTYPES.get(number, f"dtype_{number}")


def elements_of(dtype: str) -> str:
    """The elements of a dtype as numpy reads them. Raises ValueError for what is not read."""
    if dtype not in ELEMENTS:
        raise ValueError(f"holds {dtype}, where weights are floating-point numbers")
    return ELEMENTS[dtype]


def as_numbers(elements: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Elements as they are stored, as the numbers they stand for."""
    if dtype == "bfloat16":  # the upper half of a float32
        return (elements.astype(np.uint32) << 16).view(np.float32)
    return elements


def parse_shape(message: memoryview) -> Shape:
    """A `TensorShapeProto`. Raises ValueError."""
    sizes = []
    for number, value in fields(message):
        if number == 2:
            sizes.append(_field_of(octets(value), 1, 0))
        elif number == 3 and value:
            raise ValueError("has a tensor without a shape")
        if len(sizes) > _MOST_DIMENSIONS:
            raise ValueError(f"has a tensor of more than {_MOST_DIMENSIONS} dimensions")
    if min(sizes, default=0) < 0 or max(sizes, default=0) > MAX_TENSOR_BYTES:
        raise ValueError("has a tensor of an impossible shape")
    if math.prod(sizes) > MAX_TENSOR_BYTES:
        raise ValueError(f"has a tensor of more than {MAX_TENSOR_BYTES:,} numbers")
    return tuple(sizes)


def parse_part(message: memoryview) -> Part:
    """A `TensorSliceProto`. Raises ValueError."""
    part: list[tuple[int, int]] = []
    for number, value in fields(message):
        if number == 1:
            extent = octets(value)
            part.append((_field_of(extent, 1, 0), _field_of(extent, 2, _ALL)))
        if len(part) > _MOST_DIMENSIONS:
            raise ValueError("has a part of too many dimensions")
    return tuple(part)


def place_parts(shape: Shape, parts: Sequence[Part]) -> list[Place]:
    """Where parts lie that are, one after the other along one dimension, all of a tensor.

    TensorFlow divides variables in no other way. Raises ValueError where they are not all of it.
    """
    if not 0 < len(parts) <= _MOST_PARTS:
        raise ValueError(f"has a tensor in {len(parts):,} parts")
    places = [_place(shape, part) for part in parts]
    divided = [axis for axis in range(len(shape)) if places[0].shape[axis] != shape[axis]]
    if not divided and len(places) == 1:
        return places
    if len(divided) != 1:
        raise ValueError("has a tensor whose parts are not all of it")
    axis = divided[0]
    end = 0
    for place in sorted(places, key=lambda each: each.starts[axis]):
        others = [size for number, size in enumerate(place.shape) if number != axis]
        if others != [size for number, size in enumerate(shape) if number != axis]:
            raise ValueError("has a tensor whose parts are not all of it")
        if place.starts[axis] != end:
            raise ValueError("has a tensor whose parts do not follow one another")
        end += place.shape[axis]
    if end != shape[axis]:
        raise ValueError("has a tensor whose parts are not all of it")
    return places


def part_key(name: str, part: Sequence[tuple[int, int]]) -> bytes:
    """The key of a part of a tensor: (start, length) in each dimension, length -1 for all of it.

    Raises OverflowError for what 64 bits do not hold.
    """
    key = _unsigned(0) + _text(name) + _unsigned(len(part))
    for start, length in part:
        key += _signed(start) + _signed(length)
    return key


def _place(shape: Shape, part: Part) -> Place:
    if len(part) != len(shape):
        raise ValueError("has a part of another number of dimensions than its tensor")
    starts, lengths = [], []
    for size, (start, length) in zip(shape, part, strict=True):
        length = size - start if length == _ALL else length
        if start < 0 or length < 0 or start + length > size:
            raise ValueError("has a part that lies outside its tensor")
        starts.append(start)
        lengths.append(length)
    return Place(tuple(starts), tuple(lengths))


def _field_of(message: memoryview, wanted: int, default: int) -> int:
    """An int64 of a message of such."""
    found = default
    for number, value in fields(message):
        if number == wanted:
            found = signed(value)
    return found


def _unsigned(value: int) -> bytes:
    size = (value.bit_length() + 7) // 8
    return bytes([size]) + value.to_bytes(size, "big")


def _text(text: str) -> bytes:
    escaped = {0: b"\x00\xff", 255: b"\xff\x00"}
    return b"".join(escaped.get(byte, bytes([byte])) for byte in text.encode()) + b"\x00\x01"


def _signed(value: int) -> bytes:
    magnitude = ~value if value < 0 else value
    size = magnitude.bit_length() // _BITS_PER_BYTE + 1
    if size > 10:
        raise OverflowError("has more than 64 bits")
    # Leading ones, as many as bytes, then the number. A negative one has all bits the other way.
    bits = 8 * size
    code = ((1 << size) - 1) << (bits - size) | magnitude
    if value < 0:
        code ^= (1 << bits) - 1
    return code.to_bytes(size, "big")
