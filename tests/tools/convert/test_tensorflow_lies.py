"""Checkpoints whose checksums are right and whose contents are not: refused, and at little cost."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bert_tools.convert.tensorflow_bundle import part_key
from bert_tools.convert.tensorflow_source import open_tensorflow
from bert_tools.convert.tensorflow_table import MAX_ENTRIES, open_table
from mlperf_bert.common.crc32c import masked_crc32c
from mlperf_bert.common.errors import CheckpointError
from tensorflow_tables import (
    Entries,
    Field,
    block_of,
    ended,
    fixed32,
    handle,
    message,
    sealed,
    table,
    table_of,
)

VALUES = np.arange(12, dtype=np.float32)
FLOAT, STRING = 1, 7


def shape_of(*sizes: int) -> list[Field]:
    return [(2, [(1, size)]) for size in sizes]


def part_of(*ranges: tuple[int, int]) -> list[Field]:
    return [(1, [(1, start), (2, length)]) for start, length in ranges]


def entry(
    shape: Sequence[int] = (3, 4),
    *,
    dtype: int = FLOAT,
    shard: int = 0,
    start: int = 0,
    size: int = VALUES.nbytes,
    parts: Sequence[list[Field]] = (),
) -> bytes:
    crc = masked_crc32c(VALUES[start // 4 : (start + size) // 4])
    fields: list[Field] = [(1, dtype), (2, shape_of(*shape)), (3, shard), (4, start), (5, size)]
    return message(*fields) + fixed32(6, crc) + message(*((7, part) for part in parts))


HEADER = message((1, 1), (3, [(1, 1)]))


def write(folder: Path, entries: Entries, header: bytes = HEADER) -> Path:
    """A V2 checkpoint of these entries, with twelve numbers as its data."""
    contents = table([(b"", header), *entries], per_block=3)
    (folder / "model.index").write_bytes(contents)
    (folder / "model.data-00000-of-00001").write_bytes(VALUES.tobytes())
    return folder / "model"


def refusal(source: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        for tensor in open_tensorflow(source).values():
            tensor.read()
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_what_is_right_is_accepted(tmp_path: Path) -> None:
    names = [f"scope/of/tensors/{number:03d}" for number in range(20)]
    source = write(tmp_path, [(name.encode(), entry()) for name in names])
    tensors = open_tensorflow(source)
    assert list(tensors) == names
    for tensor in tensors.values():
        np.testing.assert_array_equal(tensor.read(), VALUES.reshape(3, 4))


WRONG_ENTRIES = {
    "beyond the file": (entry(start=4), "lies beyond the end"),
    "far beyond": (entry((2**40,), size=2**42), "impossible shape"),
    "wrong size": (entry((3, 5)), "of 48 bytes, not 60"),
    "negative": (entry((-3, -4)), "impossible shape"),
    "product": (entry((2**20, 2**20)), "more than"),
    "too many dimensions": (entry((1,) * 9), "dimensions"),
    "negative place": (entry(start=-48), "beyond the end"),
    "negative size": (entry((0,), size=-4), "beyond the end"),
    "no such file": (entry(shard=1), "speaks of file 1 of 1"),
    "negative file": (entry(shard=-1), "speaks of file -1 of 1"),
    "text": (entry(dtype=STRING), "holds string"),
    "unknown": (entry(dtype=1000), "holds dtype_1000"),
    "checksum": (entry((3,), size=12) + fixed32(6, 1), "wrong checksum"),
    "no message": (b"\xff", "cut short"),
    "unknown rank": (message((1, 1), (2, [(3, 1)])), "without a shape"),
}


@pytest.mark.parametrize("name", WRONG_ENTRIES)
def test_wrong_entries_are_refused(tmp_path: Path, name: str) -> None:
    wrong, expected = WRONG_ENTRIES[name]
    assert expected in refusal(write(tmp_path, [(b"a", entry()), (b"b", wrong)]))


WRONG_HEADERS = {
    "missing": b"",
    "no files": message((1, 0)),
    "negative": message((1, -1)),
    "too many": message((1, 2**31 - 1)),
    "big-endian": message((1, 1), (2, 1)),
    "newer": message((1, 1), (3, [(1, 9), (2, 9)])),
}


@pytest.mark.parametrize("name", WRONG_HEADERS)
def test_wrong_headers_are_refused(tmp_path: Path, name: str) -> None:
    assert "model.index" in refusal(write(tmp_path, [(b"a", entry())], WRONG_HEADERS[name]))


def parted(parts: Sequence[list[Field]]) -> Entries:
    """A tensor [3, 4] in parts, each with an entry of the size that it says."""
    found = {b"a": entry(parts=parts)}
    for part in parts:
        ranges = [tuple(number for _, number in extent) for _, extent in part]
        sizes = [length for _, length in ranges]
        start = 16 * ranges[0][0]
        wide = {"start": start, "size": 4 * int(np.prod(sizes))}
        found[part_key("a", ranges)] = entry(sizes, **wide)
    return sorted(found.items())


ROWS = [part_of((0, 1), (0, 4)), part_of((1, 2), (0, 4))]


def test_parts_in_any_order_are_accepted(tmp_path: Path) -> None:
    for parts in (ROWS, ROWS[::-1]):
        tensors = open_tensorflow(write(tmp_path, parted(parts)))
        assert list(tensors) == ["a"]
        np.testing.assert_array_equal(tensors["a"].read(), VALUES.reshape(3, 4))


WRONG_PARTS = {
    "gap": [part_of((0, 1), (0, 4)), part_of((2, 1), (0, 4))],
    "overlap": [part_of((0, 2), (0, 4)), part_of((1, 2), (0, 4))],
    "twice": [ROWS[0], ROWS[0], ROWS[1]],
    "not all": ROWS[:1],
    "outside": [ROWS[0], part_of((1, 3), (0, 4))],
    "negative": [part_of((-1, 2), (0, 4)), ROWS[1]],
    "a corner": [part_of((0, 1), (0, 2)), ROWS[1]],
    "both axes": [part_of((0, 1), (0, 4)), part_of((1, 2), (0, 2)), part_of((1, 2), (2, 2))],
    "other dimensions": [part_of((0, 3))],
}


@pytest.mark.parametrize("name", WRONG_PARTS)
def test_wrong_parts_are_refused(tmp_path: Path, name: str) -> None:
    assert "part" in refusal(write(tmp_path, parted(WRONG_PARTS[name])))


def test_a_part_without_an_entry_or_of_another_shape_is_refused(tmp_path: Path) -> None:
    entries = dict(parted(ROWS))
    second = part_key("a", [(1, 2), (0, 4)])
    wrong = {**entries, second: entry((4, 2), start=16, size=32)}
    assert "does not fit" in refusal(write(tmp_path, sorted(wrong.items())))
    nested = {**entries, second: entry((2, 4), start=16, size=32, parts=ROWS)}
    assert "does not fit" in refusal(write(tmp_path, sorted(nested.items())))
    del entries[second]
    assert "no entry for a part" in refusal(write(tmp_path, sorted(entries.items())))


WRONG_TABLES = {
    "descending": table([(b"b", b""), (b"a", b"")]),
    "twice": table([(b"a", b""), (b"a", b"")]),
    "blocks descend": table([(b"b", b""), (b"a", b"")], per_block=1),
    "no restarts": table_of([(b"a", b"", 0)]),
    "restarts beyond": table_of([(b"a", (2**30).to_bytes(4, "little"), 0)]),
    "key beyond": table_of([(b"a", b"\x05\x01\x00a" + bytes(4), 0)]),
    "key too long": table([(b"k" * 1025, b"")]),
    "value beyond": table_of([(b"a", b"\x00\x01\x7fa" + bytes(4), 0)]),
    "compressed": table_of([(b"a", block_of([(b"a", b"")]), 1)]),
    "too many entries": table(
        [(number.to_bytes(4, "big"), b"") for number in range(MAX_ENTRIES + 1)]
    ),
}


@pytest.mark.parametrize("name", WRONG_TABLES)
def test_wrong_tables_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "table"
    path.write_bytes(WRONG_TABLES[name])
    with pytest.raises(ValueError, match=r"^has "):
        list(open_table(path).items(2**22))


def test_a_block_that_is_indexed_again_is_refused(tmp_path: Path) -> None:
    block = sealed(block_of([(b"a", bytes(1000))]), 0)
    path = tmp_path / "table"
    for count in (1, 2):
        index = [(b"%c" % (97 + number), handle(0, block)) for number in range(count)]
        path.write_bytes(ended(block, index))
        if count == 1:
            assert dict(open_table(path).items(2**22)) == {b"a": bytes(1000)}
    with pytest.raises(ValueError, match="do not follow one another"):
        open_table(path)
