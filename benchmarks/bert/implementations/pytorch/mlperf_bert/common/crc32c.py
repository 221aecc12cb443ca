"""CRC32C in the masked form in which TensorFlow's files store it."""

from typing import Any

import google_crc32c
from numpy.typing import NDArray


def masked_crc32c(contents: bytes | NDArray[Any]) -> int:
    """The masked checksum of bytes, or of an array's memory.

    Raises ValueError where that has gaps.
    """
    return mask(google_crc32c.value(contents))


def mask(crc: int) -> int:
    """Rotated right by 15 bits, plus a constant.

    So that checksums of data that hold checksums themselves do not cancel out.
    """
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
