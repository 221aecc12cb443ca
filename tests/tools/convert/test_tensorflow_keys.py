"""Keys of parts: those in TensorFlow's own files, and the order that they are made for."""

from hypothesis import given
from hypothesis import strategies as st

from bert_tools.convert.tensorflow_parts import part_key
from tensorflow_cases import PARTITIONED, V2_SHARDS, partitioned_values
from tensorflow_tables import entries_of

INTEGERS = st.integers(-(2**63), 2**63 - 1) | st.integers(-200, 200)
PARTS = st.lists(st.tuples(INTEGERS, INTEGERS), max_size=2)


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


@given(st.text(max_size=4), PARTS, st.text(max_size=4), PARTS)
def test_keys_sort_as_what_they_stand_for(
    name: str, part: list[tuple[int, int]], other: str, other_part: list[tuple[int, int]]
) -> None:
    first = (name.encode(), len(part), part)
    second = (other.encode(), len(other_part), other_part)
    assert (part_key(name, part) < part_key(other, other_part)) == (first < second)
    assert (part_key(name, part) == part_key(other, other_part)) == (first == second)


@given(INTEGERS, INTEGERS)
def test_numbers_sort_by_their_size(one: int, other: int) -> None:
    keys = part_key("a", [(one, -1)]), part_key("a", [(other, -1)])
    assert (keys[0] < keys[1]) == (one < other)
