"""CRC32C: the standard's examples, the readable division, and any cut into pieces."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlperf_bert.common.crc32c import crc32c, mask, masked_crc32c, reference_crc32c

# RFC 3720, section B.4, and the check value of every catalogue of CRCs.
STANDARD = (
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(reversed(range(32))), 0x113FDB5C),
    (b"123456789", 0xE3069283),
    (b"", 0),
)


@pytest.mark.parametrize(("contents", "expected"), STANDARD)
def test_examples_of_the_standard(contents: bytes, expected: int) -> None:
    assert crc32c(contents) == reference_crc32c(contents) == expected


@settings(deadline=None)
@given(st.binary(max_size=100), st.integers(0, 100))
def test_equal_to_the_division_in_any_two_pieces(contents: bytes, cut: int) -> None:
    before = crc32c(contents[:cut])
    assert crc32c(contents[cut:], before) == crc32c(contents) == reference_crc32c(contents)


def test_memory_of_any_alignment_and_kind() -> None:
    contents = np.random.default_rng(1).bytes(1000)
    for start in range(9):
        expected = reference_crc32c(contents[start:])
        assert crc32c(memoryview(contents)[start:]) == expected
        assert crc32c(bytearray(contents)[start:]) == expected
    floats = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert crc32c(floats) == reference_crc32c(floats.tobytes())
    with pytest.raises((ValueError, BufferError)):
        crc32c(floats[:, ::2])


def test_every_flipped_bit_is_noticed() -> None:
    contents = bytearray(np.random.default_rng(2).bytes(100))
    right = crc32c(contents)
    for bit in range(8 * len(contents)):
        contents[bit // 8] ^= 1 << bit % 8
        assert crc32c(contents) != right
        contents[bit // 8] ^= 1 << bit % 8
    assert crc32c(contents) == right


@given(st.integers(0, 2**32 - 1))
def test_the_mask_keeps_all_bits(crc: int) -> None:
    masked = mask(crc)
    rotated = (masked - 0xA282EAD8) % 2**32
    assert (rotated << 15 | rotated >> 17) % 2**32 == crc


def test_masked_as_stored() -> None:
    assert masked_crc32c(b"123456789") == mask(crc32c(b"123456789"))
