"""Where documents end in each layout, and that no cut of a file loses or doubles any."""

import json
import random
from pathlib import Path

import pytest

from mlperf_bert.prepare import own_files
from mlperf_bert.prepare.own_files import (
    DocumentRule,
    Form,
    Piece,
    Section,
    next_document,
    sections,
)

TEXT = "First line,\nwrapped.\n\n \t\nSecond.\nMore.\n\n\nThird."


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
    path.write_text(TEXT)
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
