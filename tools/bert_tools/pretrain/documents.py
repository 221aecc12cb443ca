"""Splits the files of a corpus into documents.

In plain text, an empty line ends a paragraph. Either the whole file is one document (the rule
`file`), or each paragraph is one document (the rule `empty-line`). A line of JSON or a row of
Parquet is one document, and each line of its text is a paragraph. Files are read in blocks, so they
may have any size. Only a single line of JSON must fit in memory.

A document of more than SECTION_CHARS characters is cut into sections, at the end of a paragraph or
line. The sections become separate documents, but stay on the same side of the train/held-out
split.
"""

import codecs
import io
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, BinaryIO, Literal

from bert_tools.pretrain.files import SAMPLE_BYTES, TextFile, opened
from mlperf_bert.errors import DataError
from mlperf_bert.files import in_brief

DocumentRule = Literal["file", "empty-line"]
SECTION_CHARS = 2**16  # about 12,000 words
_ONE_OBJECT = "write one JSON object per line"

_PARQUET_ROWS = 16  # rows in memory at a time
_BUFFER_BYTES = 2**20
# Other line ends: NEL, and Unicode's line and paragraph separators.
_LINE_ENDS = {"\x85": "\n", "\u2028": "\n", "\u2029": "\n\n"}


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules for finding documents.

    `documents` determines how documents end in plain text. `text_field` is the field or column that
    has the text in JSON lines and Parquet.
    """

    documents: DocumentRule
    text_field: str


@dataclass(frozen=True, slots=True)
class Section:
    """Consecutive paragraphs of one document.

    `opens` is true if the section is the first one of its document.
    """

    paragraphs: list[str]
    opens: bool


def can_be_cut(file: TextFile, rules: Rules) -> bool:
    """Return whether a file can be cut between its documents with `next_document`.

    The file must be UTF-8 and not packed, and each of its documents must end at the end of a line.
    """
    if file.packing != "plain" or file.encoding != "utf-8":
        return False
    return file.form == "json_lines" or rules.documents == "empty-line"


def next_document(file: TextFile, position: int) -> int | None:
    """Return the start in bytes of the first document that begins after `position`, or None.

    `can_be_cut` must be true for the file. Memory is bounded even if the file is a single line.
    """
    at = position
    at_line_start = opens = False  # `position` may be inside a line
    with opened(file) as stream:
        stream.seek(position)
        while line := stream.readline(SECTION_CHARS):
            if opens and line.strip():
                return at
            is_empty = at_line_start and not line.strip()
            at_line_start = line.endswith(b"\n")
            opens = at_line_start and (file.form == "json_lines" or is_empty)
            at += len(line)
    return None


def sections(file: TextFile, rules: Rules) -> Iterator[Section]:
    """Yield the sections of all documents of a file, in order.

    Raises DataError if the file cannot be read as `file.form` and `file.packing` require.
    """
    num_bytes = sys.maxsize if file.stop is None else file.stop - file.start
    found: Iterator[tuple[int, Any]]  # a number of a line or row of this piece, and its value
    with opened(file) as stream:
        if file.start:
            stream.seek(file.start)
        if file.packing == "parquet":
            found = enumerate(_parquet_rows(stream, rules.text_field), start=1)
        elif file.form == "text":
            lines = _lines(_blocks(stream, num_bytes), file.encoding, longest=SECTION_CHARS)
            yield from _sections(_plain_paragraphs(lines, rules.documents))
            return
        else:
            lines = _lines(_blocks(stream, num_bytes), file.encoding, longest=None)
            found = _json_values((line for line, _ in lines), file)
        for number, value in found:
            text = value.get(rules.text_field) if isinstance(value, dict) else None
            if isinstance(text, bytes):  # Parquet written by Spark, Hive or Impala
                text = text.decode("utf-8", "replace")
            if not isinstance(text, str):
                raise _error(file, number, *_problem(value, rules.text_field))
            paragraphs = re.split("\r\n?|\n", _with_line_feeds(text))
            yield from _sections((paragraph, False) for paragraph in _cut(paragraphs))


def _blocks(stream: BinaryIO, num_bytes: int) -> Iterator[bytes]:
    """Yield the next `num_bytes` bytes of a stream in blocks, or fewer if the stream ends."""
    while num_bytes > 0 and (block := stream.read(min(num_bytes, SAMPLE_BYTES))):
        yield block
        num_bytes -= len(block)


def _lines(
    blocks: Iterable[bytes], encoding: str, *, longest: int | None
) -> Iterator[tuple[str, bool]]:
    r"""Decode blocks of bytes and yield the lines as (piece, whether the piece ends its line).

    A line of more than `longest` characters is cut into several pieces. A line keeps its "\n".
    Line ends are LF, CR and CR LF. If `longest` is given, Unicode's other line ends count too.
    JSON is read without `longest`, because these characters may occur inside its strings. Bytes
    that are invalid in the encoding become U+FFFD.
    """
    decoder = io.IncrementalNewlineDecoder(
        codecs.getincrementaldecoder(encoding)("replace"), translate=True
    )
    pending: list[str] = []  # pieces of a line that has not ended yet
    for block in chain(blocks, (b"",)):
        text = decoder.decode(block, final=not block)
        if longest is not None:
            text = _with_line_feeds(text)
        *whole, last = text.split("\n")
        for line in whole:
            yield from _pieces("".join([*pending, line, "\n"]), longest, ends=True)
            pending = []
        pending.append(last)
        if longest is not None and sum(map(len, pending)) >= longest:
            yield from _pieces("".join(pending), longest, ends=False)
            pending = []
    yield "".join(pending), True


def _with_line_feeds(text: str) -> str:
    """Replace Unicode's other line ends (`_LINE_ENDS`) with line feeds."""
    for end, feed in _LINE_ENDS.items():
        text = text.replace(end, feed)
    return text


def _pieces(line: str, longest: int | None, *, ends: bool) -> Iterator[tuple[str, bool]]:
    """Cut a line into pieces of at most `longest` characters.

    Yields (piece, flag). The flag is `ends` for the last piece, and false for all others.
    """
    while longest is not None and len(line) > longest:
        yield line[:longest], False
        line = line[longest:]
    yield line, ends


def _plain_paragraphs(
    lines: Iterable[tuple[str, bool]], rule: DocumentRule
) -> Iterator[tuple[str, bool]]:
    """Group lines of plain text into paragraphs, and cut long paragraphs into parts.

    Yields (paragraph or part, whether it is the first one of a document).
    """
    collected: list[str] = []
    num_chars = 0
    opens, in_line = True, False
    for text, ends in lines:
        is_empty = not in_line and not text.strip()
        in_line = not ends
        collected.append(text)
        num_chars += len(text)
        if is_empty or num_chars >= SECTION_CHARS:
            paragraph = "".join(collected)
            if paragraph.strip():
                yield paragraph, opens
                opens = False
            collected, num_chars = [], 0
            opens = opens or (is_empty and rule == "empty-line")
    paragraph = "".join(collected)
    if paragraph.strip():
        yield paragraph, opens


def _sections(paragraphs: Iterable[tuple[str, bool]]) -> Iterator[Section]:
    """Group paragraphs into sections of documents.

    The flag of a paragraph is true if it opens a document. The first paragraph always opens one.
    """
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


def _cut(paragraphs: Iterable[str]) -> Iterator[str]:
    for paragraph in paragraphs:
        for start in range(0, len(paragraph), SECTION_CHARS):
            yield paragraph[start : start + SECTION_CHARS]


def _json_values(lines: Iterable[str], file: TextFile) -> Iterator[tuple[int, Any]]:
    """Parse each non-empty line and yield its number and its JSON value.

    The first line of a piece has the number 1. Raises DataError if a line is not JSON.
    """
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, json.loads(line.removeprefix("\ufeff"))
            except (ValueError, RecursionError):
                raise _error(file, number, "is not JSON", _ONE_OBJECT) from None


def _problem(value: Any, text_field: str) -> tuple[str, str]:
    """Return the problem of a JSON value or row whose field has no text, and the remedy."""
    if not isinstance(value, dict):
        return "is not a JSON object", _ONE_OBJECT
    remedy = "pass the field or column that contains the text with --text-field"
    if text_field not in value:
        return f"has no field {text_field!a}", remedy
    found = value[text_field]
    kind = "null" if found is None else in_brief(found)
    return (
        f"has {kind} instead of text in the field {text_field!a}",
        f"write text there, or {remedy}",
    )


def _error(file: TextFile, number: int, problem: str, remedy: str) -> DataError:
    """Return an error that names a line or row of the file, given its number in this piece."""
    if file.packing == "parquet":
        return DataError(f"{file.path}: row {number}", problem, remedy)
    with opened(file) as stream:
        before = _lines(_blocks(stream, file.start), file.encoding, longest=None)
        number += sum(1 for _ in before) - 1  # the last one is the empty text after the last line
    return DataError(f"{file.path}: line {number}", problem, remedy)


def _parquet_rows(stream: BinaryIO, text_field: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file, with only the column `text_field`.

    Null becomes an empty text. Only one page and one batch are in memory at a time, and no threads
    are used. The column may have strings, large strings, a dictionary (pandas' category), or binary
    UTF-8.
    """
    from pyarrow.parquet import ParquetFile  # from the extra `parquet`

    table = ParquetFile(
        stream, pre_buffer=False, buffer_size=_BUFFER_BYTES, page_checksum_verification=True
    )
    for rows in table.iter_batches(_PARQUET_ROWS, columns=[text_field], use_threads=False):
        for row in rows.to_pylist():
            yield {name: "" if value is None else value for name, value in row.items()}
