"""Reader of protocol buffer messages: field numbers and values, without a schema.

Source: the encoding's specification (https://protobuf.dev/programming-guides/encoding/). The
last value of a non-repeated field counts; unknown fields are ignored.
"""

from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST_VARINT = 10  # bytes: 64 bits, seven in each
_ALL_64 = 2**64 - 1
_MOST_NUMBER = 2**29 - 1  # of a field

Value = int | memoryview


def fields(message: memoryview) -> Iterator[tuple[int, Value]]:
    """Number and value of each field, in order: unsigned integers, or bytes in place.

    Raises ValueError if the message is not well-formed.
    """
    place = 0
    while place < len(message):
        tag, place = varint(message, place)
        number, kind = tag >> 3, tag & 7
        if not 0 < number <= _MOST_NUMBER:
            raise ValueError("has a field of a wrong number")
        value: Value
        if kind == _VARINT:
            value, place = varint(message, place)
        else:
            size, place = _size(message, place, kind)
            if size > len(message) - place:
                raise ValueError("has a field that is cut short")
            value = message[place : place + size]
            place += size
            if kind != _BYTES:
                value = int.from_bytes(value, "little")
        yield number, value


def varint(message: memoryview, place: int) -> tuple[int, int]:
    """An integer of seven bits per byte, low ones first, and the place after it.

    Raises ValueError if there is none, or one of more than 64 bits.
    """
    value = 0
    for count, byte in enumerate(message[place : place + _LONGEST_VARINT]):
        value |= (byte & 0x7F) << 7 * count
        if byte < 0x80:
            if value > _ALL_64:
                break
            return value, place + count + 1
    raise ValueError("has an integer that is cut short or too long")


def signed(value: Value) -> int:
    """A field's integer as its schema's int32 or int64. Raises ValueError for bytes."""
    value = integer(value)
    return value - 2**64 if value >> 63 else value


def integer(value: Value) -> int:
    """A field's integer. Raises ValueError for bytes."""
    if isinstance(value, int):
        return value
    raise ValueError("has bytes where a number belongs")


def octets(value: Value) -> memoryview:
    """A field's bytes. Raises ValueError for an integer."""
    if isinstance(value, int):
        raise ValueError("has a number where bytes belong")
    return value


def text(value: Value) -> str:
    """A field's text. Raises ValueError if it is not UTF-8."""
    try:
        return bytes(octets(value)).decode()
    except UnicodeDecodeError:
        raise ValueError("has a name that is not UTF-8") from None


def _size(message: memoryview, place: int, kind: int) -> tuple[int, int]:
    """Number of bytes of a field's value, and its begin."""
    if kind == _BYTES:
        return varint(message, place)
    if kind == _FIXED64:
        return 8, place
    if kind == _FIXED32:
        return 4, place
    raise ValueError("has a field of a wrong kind")
