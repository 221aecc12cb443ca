"""The lines added to a file, whatever happens to it: half lines, cuts, rotations, floods."""

import os
from pathlib import Path

import pytest

from bert_tools.report.watch_files import CHUNK_BYTES, Tail
from mlperf_bert.common.errors import DataError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lines"


def tail_of(path: Path, first_bytes: int = 2**20) -> Tail:
    return Tail(path, max_line_bytes=10, first_bytes=first_bytes)


def append(path: Path, contents: bytes) -> None:
    with path.open("ab") as file:
        file.write(contents)


def test_each_line_comes_once_and_only_when_it_is_whole(path: Path) -> None:
    tail = tail_of(path)
    found = tail.look()
    assert not found.is_there and found.lines == ()
    path.write_bytes(b"")
    assert tail.look().lines == ()
    append(path, b"a\nb")
    assert tail.look().lines == (b"a",)
    assert tail.look().lines == ()
    append(path, b"c")
    assert tail.look().lines == ()
    append(path, b"\n\nd\n")
    found = tail.look()
    assert found.lines == (b"bc", b"", b"d") and not found.is_anew and not found.has_more


def test_half_a_line_that_is_taken_back_was_never_there(path: Path) -> None:
    tail = tail_of(path)
    path.write_bytes(b"a\nhalf")
    tail.look()
    os.truncate(path, 2)  # as a writer does on a full disk
    found = tail.look()
    assert found.lines == () and not found.is_anew
    append(path, b"b\n")
    assert tail.look().lines == (b"b",)


def cut(path: Path) -> None:
    path.write_bytes(b"new\n")


def replace(path: Path) -> None:
    beside = path.with_name("beside")
    beside.write_bytes(b"new\n" + b"x\n" * 100)
    beside.replace(path)


def write_again(path: Path) -> None:
    with path.open("r+b") as file:  # the same file, and longer than it was
        file.write(b"new\n" + b"x\n" * 100)


def remove_and_write(path: Path) -> None:
    path.unlink()
    path.write_bytes(b"new\n" + b"x\n" * 100)  # which may get the number of the old one


@pytest.mark.parametrize("change", [cut, replace, write_again, remove_and_write])
def test_another_file_is_read_from_its_beginning(path: Path, change: object) -> None:
    tail = tail_of(path)
    path.write_bytes(b"old 1\nold 2\nold 3\n")
    assert len(tail.look().lines) == 3
    assert callable(change)
    change(path)
    found = tail.look()
    assert found.is_anew and found.lines[0] == b"new"


def test_a_file_that_goes_and_comes_back_is_anew(path: Path) -> None:
    tail = tail_of(path)
    path.write_bytes(b"a\n")
    tail.look()
    path.unlink()
    found = tail.look()
    assert not found.is_there and found.is_anew
    assert not tail.look().is_anew  # told once
    path.write_bytes(b"a\n")
    found = tail.look()
    assert found.is_anew and found.lines == (b"a",)


def test_a_long_line_is_cut_and_the_next_one_is_whole(path: Path) -> None:
    tail = tail_of(path)
    path.write_bytes(b"a\n" + b"x" * 30)
    assert tail.look().lines == (b"a", b"x" * 11)
    append(path, b"y" * 30)
    assert tail.look().lines == ()
    append(path, b"y\nb\n")
    assert tail.look().lines == (b"b",)
    append(path, b"z" * 50 + b"\nc\n")
    assert tail.look().lines == (b"z" * 11, b"c")


def test_a_line_without_end_needs_no_memory(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(50 * CHUNK_BYTES)  # zeros
    append(path, b"\nlast\n")
    tail = Tail(path, max_line_bytes=10, first_bytes=100 * CHUNK_BYTES)
    found = tail.look()
    sizes, lines = [sum(map(len, found.lines))], list(found.lines)
    while found.has_more:
        found = tail.look()
        sizes.append(sum(map(len, found.lines)))
        lines += found.lines
    assert lines == [b"\0" * 11, b"last"]
    assert len(sizes) > 40 and max(sizes) < 20


def test_of_a_large_file_the_end_is_read_from_a_whole_line_on(path: Path) -> None:
    path.write_bytes(b"".join(b"%05d\n" % number for number in range(1000)))
    found = tail_of(path, first_bytes=100).look()
    assert found.lines == tuple(b"%05d" % number for number in range(984, 1000))


def test_many_lines_come_in_portions(path: Path) -> None:
    path.write_bytes(b"1234567\n" * (CHUNK_BYTES // 4))
    tail = tail_of(path, first_bytes=100 * CHUNK_BYTES)
    found = tail.look()
    count = len(found.lines)
    assert found.has_more and count < CHUNK_BYTES // 4
    while found.has_more:
        found = tail.look()
        count += len(found.lines)
    assert count == CHUNK_BYTES // 4


@pytest.mark.timeout(60)
def test_what_is_no_file_is_refused_and_may_become_one(path: Path) -> None:
    tail = tail_of(path)
    os.mkfifo(path)
    with pytest.raises(DataError, match="is not a regular file"):
        tail.look()
    path.unlink()
    path.write_bytes(b"a\n")
    assert tail.look().lines == (b"a",)
