"""Snappy: what its own library compressed, every kind of element, and damage that stays inside."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_tools.convert.snappy import decompress
from tensorflow_cases import GOLDEN, SNAPPY
from tensorflow_tables import encoded, literal, squeezed

MOST = 2**20


def unpacked(contents: bytes, most: int = MOST) -> bytes:
    return decompress(np.frombuffer(contents, np.uint8), most).tobytes()


def plain(contents: bytes) -> bytes:
    """The format's description, word by word, without a check."""
    place = next(number for number, byte in enumerate(contents) if byte < 0x80) + 1
    found = bytearray()
    while place < len(contents):
        tag = contents[place]
        extra = (0, 1, 2, 4)[tag & 3] or max(0, (tag >> 2) - 59)
        number = int.from_bytes(contents[place + 1 : place + 1 + extra], "little")
        place += 1 + extra
        if tag & 3 == 0:
            count = number + 1 if extra else (tag >> 2) + 1
            found += contents[place : place + count]
            place += count
        else:
            count, back = (tag >> 2) + 1, number
            if tag & 3 == 1:
                count, back = (tag >> 2 & 7) + 4, tag >> 5 << 8 | number
            for _ in range(count):
                found.append(found[-back])
    return bytes(found)


def test_what_the_library_compressed() -> None:
    expected = (GOLDEN / "own_sentences.txt").read_bytes()
    compressed = SNAPPY.read_bytes()
    assert len(compressed) < len(expected)
    assert unpacked(compressed) == plain(compressed) == expected


RUNS = st.lists(st.tuples(st.sampled_from(b"abc"), st.integers(1, 200)), max_size=20)


@settings(deadline=None)
@given(RUNS, st.binary(max_size=300))
def test_round_trip_of_runs_and_literals(runs: list[tuple[int, int]], others: bytes) -> None:
    contents = others + b"".join(bytes([byte]) * count for byte, count in runs) + others
    assert unpacked(squeezed(contents)) == plain(squeezed(contents)) == contents


@pytest.mark.parametrize("size", [59, 60, 61, 256, 257, 65536, 65537, 2**24 + 1])
def test_literals_of_every_size(size: int) -> None:
    contents = np.random.default_rng(1).bytes(size)
    assert unpacked(encoded(size) + literal(contents), 2**25) == contents


@pytest.mark.parametrize(
    ("elements", "expected"),
    [
        (b"\x0cabcd" + b"\x01\x04", b"abcdabcd"),
        (b"\x0cabcd" + b"\x1d\x03", b"abcd" + b"bcdbcdbcdbc"),
        (b"\x0cabcd" + b"\x06\x02\x00", b"abcdcd"),
        (b"\x0cabcd" + b"\x07\x04\x00\x00\x00", b"abcdab"),
        (b"\xf4\x87\x07" + b"x" * 1928 + b"\xe1\x80", b"x" * 1932),
    ],
)
def test_copies_of_every_kind(elements: bytes, expected: bytes) -> None:
    assert unpacked(encoded(len(expected)) + elements) == plain(b"\0" + elements) == expected


@pytest.mark.parametrize(
    "contents",
    [
        b"",
        b"\x80",
        b"\x04",
        b"\x04\x0c",
        b"\x04\x0cabc",
        b"\x03\x0cabcd",
        b"\x05\x0cabcd",
        b"\x08\x0cabcd\x01\x05",
        b"\x08\x0cabcd\x01\x00",
        b"\x08\x0cabcd\x01",
        b"\x08\x0cabcd\x0e\x01",
        b"\x08\x0cabcd\x0f\xff\xff\xff\xff",
        b"\x04\x01\x01",
        b"\x04\xfc\xff\xff\xff\xffabcd",
        b"\x04\xf0",
        b"\x06\x0cabcd\x06\x02\x00\x06\x02\x00",
    ],
    ids=bytes.hex,
)
def test_damage_is_refused(contents: bytes) -> None:
    with pytest.raises(ValueError, match=r"^has "):
        unpacked(contents)


def test_a_size_that_is_too_large_is_refused_before_it_is_made() -> None:
    with pytest.raises(ValueError, match="more than 1,048,576 bytes"):
        unpacked(encoded(2**62) + b"\x0cabcd")


@settings(deadline=None)
@given(st.binary(max_size=60), st.integers(0, 200))
def test_any_bytes_stay_inside(contents: bytes, size: int) -> None:
    try:
        assert len(unpacked(encoded(size) + contents)) == size
    except ValueError as error:
        assert str(error).startswith("has ")
