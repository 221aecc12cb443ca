"""The masked CRC32C: the standard's examples, and memory of any kind."""

import google_crc32c
import numpy as np
import pytest

from bert_tools.convert.tensorflow_bundle import masked_crc32c

# RFC 3720, section B.4, and the check value of every catalogue of CRCs.
STANDARD = (
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(reversed(range(32))), 0x113FDB5C),
    (b"123456789", 0xE3069283),
    (b"", 0),
)


def unmasked(masked: int) -> int:
    rotated = (masked - 0xA282EAD8) % 2**32
    return (rotated << 15 | rotated >> 17) % 2**32


@pytest.mark.parametrize(("contents", "expected"), STANDARD)
def test_examples_of_the_standard(contents: bytes, expected: int) -> None:
    assert unmasked(masked_crc32c(contents)) == expected
    assert google_crc32c.extend(google_crc32c.value(contents[:5]), contents[5:]) == expected


def test_arrays_are_the_bytes_of_their_memory() -> None:
    floats = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert masked_crc32c(floats) == masked_crc32c(floats.tobytes())
    assert masked_crc32c(floats[1:]) == masked_crc32c(floats[1:].tobytes())
    with pytest.raises(ValueError, match="contiguous"):
        masked_crc32c(floats[:, ::2])
