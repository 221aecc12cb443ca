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
from pathlib import Path
from typing import Any, BinaryIO, Literal

from bert_tools.pretrain.files import SAMPLE_BYTES, TextFile, opened
from mlperf_bert.errors import DataError

DocumentRule = Literal["file", "empty-line"]
SECTION_CHARS = 2**16  # about 12,000 words

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
    with opened(file) as stream:
        if file.start:
            stream.seek(file.start)
        if file.packing == "parquet":
            found = _parquet_rows(stream, rules.text_field)
        elif file.form == "text":
            lines = _lines(_blocks(stream, num_bytes), file.encoding, longest=SECTION_CHARS)
            yield from _sections(_plain_paragraphs(lines, rules.documents))
            return
        else:
            lines = _lines(_blocks(stream, num_bytes), file.encoding, longest=None)
            found = _json_values((line for line, _ in lines), file.path)
        for number, value in enumerate(found, start=1):
            text = value.get(rules.text_field) if isinstance(value, dict) else None
            if isinstance(text, bytes):  # Parquet written by Spark, Hive or Impala
                text = text.decode("utf-8", "replace")
            if not isinstance(text, str):
                remedy = "pass the field or column that contains the text with --text-field"
                problem = f"has no text field {rules.text_field!a}"
                raise DataError(f"{file.path}: document {number}", problem, remedy)
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


def _json_values(lines: Iterable[str], path: Path) -> Iterator[Any]:
    """Parse each non-empty line and yield its JSON value. Raises DataError if it is not JSON."""
    full = (line for line in lines if line.strip())
    for number, line in enumerate(full, start=1):
        try:
            yield json.loads(line.removeprefix("\ufeff"))
        except (ValueError, RecursionError):
            remedy = "write one JSON object per line"
            raise DataError(f"{path}: document {number}", "is not JSON", remedy) from None


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
