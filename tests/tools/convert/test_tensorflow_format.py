"""Protocol buffers and TensorFlow's keys: read as written, in order, and refused otherwise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_tools.convert.protobuf import fields, integer, octets, signed, text, varint
from bert_tools.convert.tensorflow_bundle import part_key
from tensorflow_cases import PARTITIONED, V2_SHARDS, partitioned_values
from tensorflow_tables import encoded, entries_of, fixed32, message

NUMBERS = st.integers(0, 2**64 - 1)
SIGNED = st.integers(-(2**63), 2**63 - 1) | st.integers(-200, 200)
NAMES = st.text("\x00\x01a\xff\u4e2d", max_size=4)
PARTS = st.lists(st.tuples(SIGNED, SIGNED), max_size=2)
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


@given(SIGNED)
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


def parts_of(shape: tuple[int, int], count: int, axis: int) -> list[list[tuple[int, int]]]:
    """As TensorFlow divides: the first parts are one longer where it does not come out even."""
    sizes = [shape[axis] // count + (number < shape[axis] % count) for number in range(count)]
    parts = []
    for number, size in enumerate(sizes):
        part = [(0, length) for length in shape]
        part[axis] = (sum(sizes[:number]), size)
        parts.append(part)
    return parts


def test_keys_in_files_of_tensorflow() -> None:
    keys = [key for key, _ in entries_of(V2_SHARDS.with_name(f"{V2_SHARDS.name}.index"))]
    expected = {
        part_key(name, part)
        for name, value in partitioned_values().items()
        for part in parts_of(value.shape, *PARTITIONED[name])
    }
    assert len(expected) == 5
    assert {key for key in keys if key.startswith(b"\0")} == expected


@given(NAMES, PARTS, NAMES, PARTS)
def test_keys_sort_as_what_they_stand_for(
    name: str, part: list[tuple[int, int]], other: str, other_part: list[tuple[int, int]]
) -> None:
    for second_name in (other, name):
        first = (name.encode(), len(part), part)
        second = (second_name.encode(), len(other_part), other_part)
        keys = part_key(name, part), part_key(second_name, other_part)
        assert (keys[0] < keys[1]) == (first < second)
        assert (keys[0] == keys[1]) == (first == second)
