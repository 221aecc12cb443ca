"""CRC32C, the checksum in TensorFlow's files, and the masked form in which they store it.

The polynomial is Castagnoli's, bits reflected (RFC 3720, sections 12.1 and B.4).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.common.compiled import compiled

_POLYNOMIAL = 0x82F63B78
_ALL = 0xFFFFFFFF
_MASK_DELTA = 0xA282EAD8
_WORD_BYTES = 8

Contents = bytes | bytearray | memoryview | NDArray[Any]


def masked_crc32c(contents: Contents) -> int:
    """The checksum as TFRecords and checkpoints store it: 32 bits, `mask` of the CRC32C."""
    return mask(crc32c(contents))


def mask(crc: int) -> int:
    """Rotated right by 15 bits, plus a constant.

    So that checksums of data that hold checksums themselves do not cancel out.
    """
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & _ALL


def crc32c(contents: Contents, before: int = 0) -> int:
    """The checksum of contiguous bytes.

    Args:
        contents: bytes, or an array of any dtype, whose memory is meant.
        before: checksum of the bytes that came before, to go on from: a file may come in pieces.

    Raises ValueError or BufferError where the memory has gaps.
    """
    flat = np.frombuffer(contents, np.uint8)
    in_words = len(flat) - len(flat) % _WORD_BYTES
    words = flat[:in_words].view("<u8")
    return int(_update(words, flat[in_words:], _TABLES, before ^ _ALL)) ^ _ALL


def reference_crc32c(contents: bytes) -> int:
    """The same, bit by bit: the remainder of a division of polynomials over two elements."""
    remainder = _ALL
    for byte in contents:
        remainder ^= byte
        for _ in range(8):
            remainder = remainder >> 1 ^ (_POLYNOMIAL if remainder & 1 else 0)
    return remainder ^ _ALL


def _make_tables() -> NDArray[np.uint32]:
    """[8, 256]: row i has the remainder of each byte that i zero bytes follow."""
    tables = np.empty((_WORD_BYTES, 256), np.uint32)
    row = np.arange(256)
    for number in range(_WORD_BYTES):
        for _ in range(8):
            row = row >> 1 ^ np.where(row & 1, _POLYNOMIAL, 0)
        tables[number] = row
    return tables


_TABLES = _make_tables()


@compiled
def _update(
    words: NDArray[np.uint64], rest: NDArray[np.uint8], tables: NDArray[np.uint32], remainder: int
) -> int:
    """The remainder after eight bytes at a time, one look-up for each, and after the rest.

    ("Slicing by 8": Kounavis and Berry, ISCC 2005.)
    """
    state = np.uint64(remainder)
    for word in words:
        mixed = word ^ state
        state = np.uint64(
            tables[7, np.uint8(mixed)]
            ^ tables[6, np.uint8(mixed >> np.uint64(8))]
            ^ tables[5, np.uint8(mixed >> np.uint64(16))]
            ^ tables[4, np.uint8(mixed >> np.uint64(24))]
            ^ tables[3, np.uint8(mixed >> np.uint64(32))]
            ^ tables[2, np.uint8(mixed >> np.uint64(40))]
            ^ tables[1, np.uint8(mixed >> np.uint64(48))]
            ^ tables[0, np.uint8(mixed >> np.uint64(56))]
        )
    for byte in rest:
        low = np.uint8(state) ^ byte
        state = np.uint64(tables[0, low]) ^ state >> np.uint64(8)
    return int(state)
