"""Which files of a user's text are read, and how what is wrong with one is told."""

import gzip
from pathlib import Path

import pytest

from mlperf_bert.common.errors import DataError
from mlperf_bert.prepare import own_files
from mlperf_bert.prepare.own_files import Form, Packing, Piece, find_files, opened, sections

zstandard = pytest.importorskip("zstandard")
TEXT = "One sentence. Another one.\n\nA second document.\n"


def read(path: Path) -> bytes:
    file = find_files(path)[0]
    with opened(file.path, file.packing) as stream:
        return stream.read()


def test_a_directory_is_read_by_name_at_any_depth(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.jsonl", "a/B.TXT.gz", ".hidden.txt", ".git/x.txt", "c.pdf", "d.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = [(file.name, file.form, file.packing) for file in find_files(tmp_path)]
    assert found == [
        ("a/B.TXT.gz", "text", "gzip"),
        ("a/z.jsonl", "json_lines", "plain"),
        ("b.txt", "text", "plain"),
    ]


def test_a_file_that_is_named_is_text_whatever_it_is_called(tmp_path: Path) -> None:
    path = tmp_path / "corpus.dump"
    path.write_text(TEXT)
    assert find_files(path)[0].form == "text"
    assert read(path) == TEXT.encode()


def test_packed_files_are_what_was_packed(tmp_path: Path) -> None:
    contents = TEXT.encode() * 5000
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(contents) + gzip.compress(b"more"))
    pack = zstandard.ZstdCompressor().compress
    (tmp_path / "a.txt.zst").write_bytes(pack(contents) + pack(b"more"))
    for name in ("a.txt.gz", "a.txt.zst"):
        assert read(tmp_path / name) == contents + b"more"


def test_nothing_to_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no text files; these are read: "):
        find_files(tmp_path)
    with pytest.raises(DataError, match="No such file"):
        find_files(tmp_path / "missing.txt")


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst"])
def test_what_expands_too_much_is_refused_before_it_is_all_there(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_files, "ALWAYS_ALLOWED_BYTES", 0)
    pack = gzip.compress if name.endswith("gz") else zstandard.ZstdCompressor().compress
    (tmp_path / name).write_bytes(pack(bytes(2**22)))
    with pytest.raises(DataError, match="expands to more than 100 times its size"):
        read(tmp_path / name)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst"])
def test_damages_are_one_line(tmp_path: Path, name: str) -> None:
    checked = zstandard.ZstdCompressor(write_checksum=True)
    pack = gzip.compress if name.endswith("gz") else checked.compress
    whole = pack(bytes(range(256)) * 4000)
    for contents in (b"no packed file at all", whole[:-20], whole[:60] + b"\xff" + whole[61:]):
        (tmp_path / name).write_bytes(contents)
        if name.endswith("zst") and contents == whole[:-20]:
            continue  # a stream of frames may end where the file does: no damage is seen
        with pytest.raises(DataError, match=r"is no whole (gzip|zstd) file"):
            read(tmp_path / name)


@pytest.mark.parametrize(
    ("form", "packing", "contents"),
    [
        ("json_lines", "plain", b"\x00\xff garbage"),
        ("json_lines", "plain", b'["a list"]'),
        ("json_lines", "plain", b'{"title": "no text"}'),
        ("json_lines", "plain", b"[" * 100_000),
        ("text", "gzip", b"\x1f\x8b\x08garbage"),
        ("text", "zstd", b"\x28\xb5\x2f\xfdgarbage"),
    ],
)
def test_garbage_is_one_line(tmp_path: Path, form: Form, packing: Packing, contents: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(contents)
    with pytest.raises(DataError) as caught:
        list(sections(Piece(path, form, packing, 0, None), "empty-line", "text"))
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
