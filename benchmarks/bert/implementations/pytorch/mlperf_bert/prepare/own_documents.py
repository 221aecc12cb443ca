"""Documents of a user's text files, raw: where one ends, and how an overlong one is cut.

Three layouts of plain text (`DocumentRule`): `empty-line`, documents apart by an empty line, the
lines of one joined; `line`, each line a document; `file`, each file one, its paragraphs apart by
an empty line. In JSON lines every line is one document, whose text's lines are paragraphs.

A document of more than SECTION_CHARS is cut at the end of a paragraph, or of a line: the sections
become documents of their own, but stay together on one side of the split.
"""

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from mlperf_bert.common.errors import DataError
from mlperf_bert.prepare.own_files import Form, Packing, opened

DocumentRule = Literal["empty-line", "line", "file"]

SECTION_CHARS = 2**16  # about 12,000 words
_MOST_JSON_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Section:
    """Consecutive paragraphs of a document; `opens` says that they are its first."""

    paragraphs: list[str]
    opens: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """A file, or of a plain one the bytes from `start` to `stop`, which documents end before."""

    path: Path
    form: Form
    packing: Packing
    start: int
    stop: int | None


def sections(piece: Piece, rule: DocumentRule, text_field: str) -> Iterator[Section]:
    """All sections of a piece, in order. Raises DataError for what cannot be read as such."""
    with opened(piece.path, piece.packing) as file:
        if piece.start:
            _skip(file, piece.start)
        most = None if piece.stop is None else piece.stop - piece.start
        if piece.form == "json_lines":
            yield from _json_documents(file, most, piece.path, text_field)
        else:
            yield from _sections(_plain_paragraphs(_lines(file, most), rule))


def next_document(path: Path, form: Form, rule: DocumentRule, position: int) -> int | None:
    """Where the first document begins that is after `position` for sure; None: nowhere."""
    with opened(path, "plain") as file:
        _skip(file, position)
        at = position + _skip_line(file)  # the rest of a line that may be any
        was_empty = rule == "line" or form == "json_lines"
        while True:
            line = file.readline(SECTION_CHARS)
            if not line:
                return None
            if was_empty and line.strip():
                return at
            at += len(line)
            if not line.endswith(b"\n"):
                was_empty = False
                at += _skip_line(file)
            else:
                was_empty = rule == "line" or form == "json_lines" or not line.strip()


def _skip(file: BinaryIO, num_bytes: int) -> None:
    while num_bytes > 0:
        num_bytes -= len(file.read(min(num_bytes, 2**20))) or num_bytes


def _skip_line(file: BinaryIO) -> int:
    """Read on to the end of the line; its bytes."""
    skipped = 0
    while line := file.readline(SECTION_CHARS):
        skipped += len(line)
        if line.endswith(b"\n"):
            break
    return skipped


def _lines(file: BinaryIO, most: int | None) -> Iterator[tuple[str, bool]]:
    """Lines, longer ones in pieces, and whether the line ends there.

    What is not UTF-8 becomes U+FFFD.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    read = 0
    while most is None or read < most:
        line = file.readline(SECTION_CHARS)
        if not line:
            break
        read += len(line)
        yield decoder.decode(line), line.endswith(b"\n")
    yield decoder.decode(b"", final=True), True


def _plain_paragraphs(
    lines: Iterator[tuple[str, bool]], rule: DocumentRule
) -> Iterator[tuple[str, bool]]:
    """Paragraphs, or parts of long ones, and whether each opens a document."""
    collected: list[str] = []
    num_chars = 0
    opens, in_line = True, False
    for text, ends in lines:
        is_empty = not in_line and not text.strip()
        in_line = not ends
        collected.append(text)
        num_chars += len(text)
        is_over = is_empty or (rule == "line" and ends)
        if is_over or num_chars >= SECTION_CHARS:
            paragraph = "".join(collected)
            if paragraph.strip():
                yield paragraph, opens
                opens = False
            collected, num_chars = [], 0
            opens = opens or (is_over and rule != "file")
    paragraph = "".join(collected)
    if paragraph.strip():
        yield paragraph, opens


def _sections(paragraphs: Iterator[tuple[str, bool]]) -> Iterator[Section]:
    """Paragraphs of one document together, up to the length of a section; the first opens one."""
    collected: list[str] = []
    num_chars, opens_with = 0, True
    for paragraph, opens in paragraphs:
        if collected and (opens or num_chars + len(paragraph) > SECTION_CHARS):
            yield Section(collected, opens_with)
            collected, num_chars, opens_with = [], 0, opens
        collected.append(paragraph)
        num_chars += len(paragraph)
    if collected:
        yield Section(collected, opens_with)


def _json_documents(
    file: BinaryIO, most: int | None, path: Path, text_field: str
) -> Iterator[Section]:
    number = read = 0
    while most is None or read < most:
        line = file.readline(_MOST_JSON_BYTES + 1)
        number, read = number + 1, read + len(line)
        if not line:
            break
        if len(line) > _MOST_JSON_BYTES:
            problem = f"has more than {_MOST_JSON_BYTES:,} bytes"
            raise DataError(f"{path}: document {number}", problem, "cut it into several")
        if line.strip():
            text = _text_of(line, f"{path}: document {number}", text_field)
            yield from _sections((paragraph, False) for paragraph in _cut(text.split("\n")))


def _text_of(line: bytes, where: str, text_field: str) -> str:
    remedy = "give one JSON object a line, and the name of its text as --text-field"
    try:
        found = json.loads(line.decode("utf-8", "replace").removeprefix("\ufeff"))
    except (ValueError, RecursionError):
        raise DataError(where, "is not JSON", remedy) from None
    text = found.get(text_field) if isinstance(found, dict) else None
    if not isinstance(text, str):
        raise DataError(where, f"has no text {text_field!a}", remedy)
    return text


def _cut(paragraphs: list[str]) -> Iterator[str]:
    for paragraph in paragraphs:
        for start in range(0, len(paragraph), SECTION_CHARS):
            yield paragraph[start : start + SECTION_CHARS]
