"""CRC32C in the masked form in which TensorFlow's files store it."""

from typing import Any

import google_crc32c
from numpy.typing import NDArray


def masked_crc32c(contents: bytes | NDArray[Any]) -> int:
    """The masked checksum of bytes, or of an array's memory.

    Raises ValueError if that memory has gaps.
    """
    return mask(google_crc32c.value(contents))


def mask(crc: int) -> int:
    """Rotate a checksum right by 15 bits and add a constant.

    Checksums of data that contain checksums then do not cancel out.
    """
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
