"""TFRecord files: every record comes back, and nothing that is damaged does."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from foreign_files import framed
from mlperf_bert.common.crc32c import masked_crc32c
from mlperf_bert.common.errors import DataError
from mlperf_bert.prepare import tf_example
from mlperf_bert.prepare.tf_example import BLOCK_BYTES, MOST_RECORD_BYTES, read_records

RECORDS = [b"first", b"", bytes(range(40)), b"last one"]


def records_in(path: Path) -> list[bytes]:
    found: list[bytes] = []
    for block in read_records(path):
        assert block.first == len(found)
        assert block.ends[0] == 0
        assert block.ends[-1] == len(block.contents)
        found += [part.tobytes() for part in np.split(block.contents, block.ends[1:-1])]
    return found


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as raised:
        records_in(path)
    line = str(raised.value)
    assert line.startswith(f"{path}") and line.isprintable()
    return line


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "file"
    file.write_bytes(b"".join(map(framed, RECORDS)))
    return file


def test_records_come_back(path: Path) -> None:
    assert records_in(path) == RECORDS
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert records_in(path) == RECORDS
    for records in ([], [b""]):
        path.write_bytes(b"".join(map(framed, records)))
        assert records_in(path) == records


def test_blocks_are_of_bounded_size(tmp_path: Path) -> None:
    records = [bytes([number]) * (BLOCK_BYTES // 3) for number in range(10)]
    path = tmp_path / "many"
    path.write_bytes(b"".join(map(framed, records)))
    sizes = [len(block.contents) for block in read_records(path)]
    assert 1 < len(sizes) < len(records) and max(sizes) < BLOCK_BYTES + MOST_RECORD_BYTES
    assert records_in(path) == records


def test_every_flipped_bit_is_found(path: Path) -> None:
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        assert "record" in refusal(path)


def test_every_cut_is_found(path: Path) -> None:
    whole = path.read_bytes()
    ends = np.cumsum([len(framed(record)) for record in RECORDS])
    for size in range(1, len(whole)):
        path.write_bytes(whole[:size])
        if size in ends:  # as if the file ended there: nothing in it says how many there are
            assert records_in(path) == RECORDS[: int(np.searchsorted(ends, size)) + 1]
        else:
            assert "is cut short" in refusal(path)


def test_a_cut_or_changed_gzip_file_is_refused(path: Path) -> None:
    whole = gzip.compress(path.read_bytes())
    for size in range(len(tf_example._GZIP), len(whole)):
        path.write_bytes(whole[:size])
        assert "cannot be unpacked as gzip" in refusal(path)
    for place in range(10, len(whole)):  # what is before says when and how it was packed
        changed = bytearray(whole)
        changed[place] ^= 255
        path.write_bytes(changed)
        refusal(path)


@pytest.mark.parametrize("length", [MOST_RECORD_BYTES + 1, 2**31, 2**63, 2**64 - 1])
def test_a_length_is_not_believed(tmp_path: Path, length: int) -> None:
    path = tmp_path / "huge"
    head = struct.pack("<Q", length)
    path.write_bytes(head + struct.pack("<I", masked_crc32c(head)) + b"short")
    assert f"record 0: has {length:,} bytes, at most" in refusal(path)


def test_what_unpacks_to_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(gzip.compress(framed(bytes(1000)) * 1000))
    assert len(records_in(path)) == 1000
    monkeypatch.setattr(tf_example, "MOST_UNPACKED_BYTES", 100_000)
    assert "record 99: begins after 100,000 bytes" in refusal(path)


def test_no_file(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "none")
    assert "not a regular file" in refusal(tmp_path)
