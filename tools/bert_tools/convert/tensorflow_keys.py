"""The keys under which TensorFlow keeps parts of tensors: bytes that sort as what they stand for.

Facts of its ordered code: an integer without a sign is its number of bytes and these, the high ones
first; a text has its zero and 255 bytes escaped and an end of its own; an integer with a sign has
as many leading ones (for a negative one: zeros) as it has bytes.
"""

from collections.abc import Sequence

_BITS_PER_BYTE = 7  # of an integer with a sign; one bit of all of them is the sign


def part_key(name: str, part: Sequence[tuple[int, int]]) -> bytes:
    """The key of a part of a tensor: (start, length) in each dimension, length -1 for all of it.

    Raises OverflowError for what 64 bits do not hold.
    """
    key = _unsigned(0) + _text(name) + _unsigned(len(part))
    for start, length in part:
        key += _signed(start) + _signed(length)
    return key


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
