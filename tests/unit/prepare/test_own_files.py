"""A user's files: which are read, where documents end, what training text repeats of them."""

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest

from mlperf_bert.common.errors import DataError
from mlperf_bert.prepare import own_files
from mlperf_bert.prepare.own_files import (
    DocumentRule,
    Form,
    Packing,
    Piece,
    Section,
    find_files,
    next_document,
    opened,
    sections,
)
from mlperf_bert.prepare.own_parts import (
    WINDOW,
    held_out_windows,
    mark_seen,
    shares,
    windows_of,
)

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


DOCUMENTS = "First line,\nwrapped.\n\n \t\nSecond.\nMore.\n\n\nThird."


def documents(path: Path, rule: DocumentRule, form: Form = "text") -> list[list[str]]:
    """The documents, sections of one together, white space made single."""
    found: list[list[str]] = []
    for section in sections(Piece(path, form, "plain", 0, None), rule, "text"):
        if section.opens:
            found.append([])
        found[-1] += [" ".join(paragraph.split()) for paragraph in section.paragraphs]
    return found


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("empty-line", [["First line, wrapped."], ["Second. More."], ["Third."]]),
        ("line", [["First line,"], ["wrapped."], ["Second."], ["More."], ["Third."]]),
        ("file", [["First line, wrapped.", "Second. More.", "Third."]]),
    ],
)
def test_rules(tmp_path: Path, rule: DocumentRule, expected: list[list[str]]) -> None:
    path = tmp_path / "a.txt"
    path.write_text(DOCUMENTS)
    assert documents(path, rule) == expected


def test_a_line_of_json_is_a_document_and_its_lines_paragraphs(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    texts = ["One.\nTwo.", "", "Three \ud83d\ude00 \ud800."]
    path.write_text("\n".join(json.dumps({"text": text, "id": 1}) for text in texts) + "\n\n")
    found = documents(path, "line", "json_lines")
    assert found == [["One.", "Two."], ["Three \U0001f600 \ud800."]]


def test_another_field_of_json(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "words"}')
    (section,) = sections(Piece(path, "json_lines", "plain", 0, None), "line", "body")
    assert section == Section(["words"], opens=True)


@pytest.mark.parametrize("rule", ["empty-line", "line", "file"])
def test_overlong_documents_are_cut_and_nothing_is_lost(
    tmp_path: Path, rule: DocumentRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_files, "SECTION_CHARS", 100)
    words = [f"wörd{number}" for number in range(200)]
    path = tmp_path / "a.txt"
    path.write_text(" ".join(words) + "\n\nanother", encoding="utf-8")
    found = list(sections(Piece(path, "text", "plain", 0, None), rule, "text"))
    text = "".join(paragraph for section in found for paragraph in section.paragraphs)
    assert text.split() == [*words, "another"]
    assert max(sum(map(len, section.paragraphs)) for section in found) <= 200
    assert sum(section.opens for section in found) == (1 if rule == "file" else 2)


def test_bytes_that_are_no_utf8_are_replaced_across_cuts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_files, "SECTION_CHARS", 5)
    path = tmp_path / "a.txt"
    path.write_bytes("ääää".encode() + b"\xff" + "ä".encode())
    found = sections(Piece(path, "text", "plain", 0, None), "line", "text")
    assert "".join(text for section in found for text in section.paragraphs) == "ääää\ufffdä"


@pytest.mark.parametrize("rule", ["empty-line", "line"])
@pytest.mark.parametrize("seed", range(40))
def test_cut_anywhere_a_file_has_the_same_documents(
    tmp_path: Path, rule: DocumentRule, seed: int
) -> None:
    rng = random.Random(seed)
    pieces = ["word ", "\n", "\n\n", " \n", "x", "\n \n", "ä"]
    path = tmp_path / "a.txt"
    path.write_text("".join(rng.choices(pieces, k=rng.randint(1, 120))), encoding="utf-8")
    starts = [0]
    for position in range(1, path.stat().st_size, rng.randint(1, 30)):
        start = next_document(path, "text", rule, position)
        if start is not None and start > starts[-1]:
            starts.append(start)
    whole = documents(path, rule)
    cut: list[list[str]] = []
    for start, stop in zip(starts, [*starts[1:], None], strict=True):
        found = list(sections(Piece(path, "text", "plain", start, stop), rule, "text"))
        assert not start or found[0].opens
        cut += [[" ".join(text.split()) for text in section.paragraphs] for section in found]
    assert cut == whole
    assert len(starts) > 1 or len(whole) < 20


def made_up(rng: random.Random, num_words: int) -> str:
    letters = "abcdefghijklmnopqrstuvwxyzäß中文"
    return " ".join("".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(num_words))


def windows_as_text(text: str) -> set[str]:
    kept = "".join(char for char in text.casefold() if char.isalnum())
    return {kept[i : i + WINDOW] for i in range(len(kept) - WINDOW + 1)}


def measured(held_out: list[str], train: list[str]) -> list[float]:
    windows = held_out_windows(held_out)
    seen = np.zeros(len(windows.hashes), dtype=bool)
    for text in train:
        mark_seen(text, windows.hashes, seen)
    return shares(windows, seen)


def test_shares_are_those_of_sets_of_windows() -> None:
    rng = random.Random(3)
    held_out = [made_up(rng, num_words) for num_words in (40, 200, 12, 90, 6)]
    words = [text.split() for text in held_out]
    train = [
        made_up(rng, 300),
        " ".join(words[1][30:90]) + " " + made_up(rng, 20),  # a part of one
        held_out[2].upper() + "!",  # all of another, written otherwise
        " ".join([*words[3][:10], "new", *words[3][11:]]),  # one word changed
    ]
    in_train = set().union(*map(windows_as_text, train))
    expected = [
        len(found & in_train) / len(found) if (found := windows_as_text(text)) else 0.0
        for text in held_out
    ]
    assert measured(held_out, train) == expected
    assert expected[0] == 0
    assert 0.2 < expected[1] < 0.4
    assert expected[2] == 1
    assert expected[3] > 0.8


def test_spaces_case_and_punctuation_make_no_difference() -> None:
    text = made_up(random.Random(1), 60)
    other = ", ".join(text.upper().split())
    assert set(windows_of(text).tolist()) == set(windows_of(other).tolist())


def test_short_and_empty_texts_have_no_windows() -> None:
    assert len(windows_of("")) == 0
    assert len(windows_of("a" * (WINDOW - 1) + " . ")) == 0
    assert len(windows_of("a" * WINDOW)) == 1
    assert measured(["too short"], ["too short"]) == [0.0]
    assert measured([], ["anything at all, as long as it may be for a window"]) == []


def test_places_in_a_text_make_no_difference_to_a_hash() -> None:
    rng = random.Random(2)
    inside = made_up(rng, 30)
    whole = windows_of(made_up(rng, 1000) + inside + made_up(rng, 10))
    assert set(windows_of(inside).tolist()) <= set(whole.tolist())
    assert len(set(whole.tolist())) == len(whole)
