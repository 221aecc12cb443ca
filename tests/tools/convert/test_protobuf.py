"""Protocol buffers: what is written is read, and what is not well-formed is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_tools.convert.protobuf import fields, integer, octets, signed, text, varint
from tensorflow_tables import encoded, fixed32, message

NUMBERS = st.integers(0, 2**64 - 1)
FIELDS = st.lists(st.tuples(st.integers(1, 2**29 - 1), NUMBERS | st.binary(max_size=300)))


@given(FIELDS)
def test_fields_are_read_as_written(written: list[tuple[int, int | bytes]]) -> None:
    assert list(fields(memoryview(message(*written)))) == written


@given(st.lists(NUMBERS, max_size=50))
def test_integers_are_read_one_by_one(numbers: list[int]) -> None:
    packed = memoryview(b"".join(map(encoded, numbers)))
    place, one_by_one = 0, []
    while place < len(packed):
        value, place = varint(packed, place)
        one_by_one.append(value)
    assert one_by_one == numbers


@given(st.integers(-(2**63), 2**63 - 1))
def test_integers_with_a_sign(value: int) -> None:
    ((_, found),) = fields(memoryview(message((1, value))))
    assert signed(found) == value


def test_fixed_fields() -> None:
    contents = fixed32(6, 0xDEADBEEF) + encoded(7 << 3 | 1) + bytes(range(8))
    assert list(fields(memoryview(contents))) == [(6, 0xDEADBEEF), (7, 0x0706050403020100)]


@pytest.mark.parametrize(
    "contents",
    [
        b"\x80",
        b"\x08",
        b"\x08\x80",
        b"\x08" + b"\x80" * 10 + b"\x01",
        b"\x08" + b"\xff" * 9 + b"\x02",
        b"\x00\x00",
        b"\x0a\x02a",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x0d\x00\x00\x00",
        b"\x09\x00\x00\x00\x00",
        b"\x0b",
        b"\x0f",
    ],
    ids=bytes.hex,
)
def test_what_is_not_well_formed_is_refused(contents: bytes) -> None:
    with pytest.raises(ValueError, match=r"^has "):
        list(fields(memoryview(contents)))


def test_values_of_another_kind_are_refused() -> None:
    assert text(memoryview(b"caf\xc3\xa9")) == "caf\u00e9"
    for read, value in ((integer, memoryview(b"")), (signed, memoryview(b"")), (octets, 1)):
        with pytest.raises(ValueError, match="belong"):
            read(value)
    with pytest.raises(ValueError, match="UTF-8"):
        text(memoryview(b"\xff"))
