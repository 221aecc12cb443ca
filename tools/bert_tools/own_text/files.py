"""The files of a user's own text: which are read, how they are unpacked, and where documents end.

A file's suffixes decide how it is read (`FORMS`, `GZIP`, `PARQUET`). It is never in memory as a
whole, whatever its size; only a line of JSON is.

A plain file is one document, in which an empty line ends a paragraph (`file`), or each of its
paragraphs is a document (`empty-line`). A line of JSON or a row of Parquet is one document, and
each line of its text is a paragraph.

A document of more than SECTION_CHARS is cut at the end of a paragraph or line. Its sections become
separate documents, but stay on one side of the train/held-out split.
"""

import codecs
import gzip
import io
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Literal

from mlperf_bert.errors import ConfigError, DataError
from mlperf_bert.files import open_regular_file

Form = Literal["text", "json_lines"]
Packing = Literal["plain", "gzip", "parquet"]  # a row of Parquet is read like a JSON object

FORMS: dict[str, Form] = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "json_lines",
    ".ndjson": "json_lines",
}
GZIP, PARQUET = ".gz", ".parquet"
READ = f"{', '.join(FORMS)}, each also with {GZIP}; {PARQUET}"

DocumentRule = Literal["file", "empty-line"]
SECTION_CHARS = 2**16  # about 12,000 words
EXPANSION = 4  # of packed text, roughly

_PARQUET_ROWS = 16  # in memory at a time
_BUFFER_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class TextFile:
    """One file of the text, or the bytes `start` to `stop` of a plain one.

    `name` is its path below the given directory. A document begins at `start`, and at `stop`.
    """

    path: Path
    name: str
    form: Form
    packing: Packing
    size_bytes: int
    start: int = 0
    stop: int | None = None

    @property
    def text_bytes(self) -> int:
        """Bytes of text; an estimate if it is packed."""
        if self.packing != "plain":
            return self.size_bytes * EXPANSION
        return (self.size_bytes if self.stop is None else self.stop) - self.start


@dataclass(frozen=True, slots=True)
class Rules:
    """Where documents of plain text end, and the name of the text in JSON lines and Parquet."""

    documents: DocumentRule
    text_field: str


@dataclass(frozen=True, slots=True)
class Section:
    """Consecutive paragraphs of a document; `opens` if they are its first."""

    paragraphs: list[str]
    opens: bool


# Find ---------------------------------------------------------------------------------------------


def find_files(source: Path, leave_out: Path | None = None) -> list[TextFile]:
    """The text files of a directory at any depth, sorted by name; or the one file that is named.

    Hidden files, files of other kinds, and `leave_out` are left out; a file that is named itself is
    read as plain text if its kind is not known. Raises DataError if there is none, ConfigError if a
    package is missing.
    """
    if not source.is_dir():
        return [_text_file(source, source.name)]
    names = [name for name in _names_below(source, leave_out) if _kind(name)[0] is not None]
    if not names:
        raise DataError(str(source), "has no text files", f"these are read: {READ}")
    return [_text_file(source / name, name) for name in names]


def unread_files(source: Path, leave_out: Path | None = None) -> list[str]:
    """The names of files of other kinds, which `find_files` leaves out, sorted; not hidden ones."""
    return [name for name in _names_below(source, leave_out) if _kind(name)[0] is None]


def _names_below(source: Path, leave_out: Path | None) -> list[str]:
    """All files of a directory at any depth but hidden ones and `leave_out`; none of a file."""
    found = []
    for directory, subdirectories, names in os.walk(source):
        subdirectories[:] = [name for name in subdirectories if not name.startswith(".")]
        for name in names:
            path = Path(directory, name)
            is_left_out = leave_out is not None and path.resolve() == leave_out.resolve()
            if not name.startswith(".") and not is_left_out:
                found.append(path.relative_to(source).as_posix())
    return sorted(found)


def _kind(name: str) -> tuple[Form | None, Packing]:
    path = Path(name.lower())
    if path.suffix == PARQUET:
        return "json_lines", "parquet"
    if path.suffix == GZIP:
        return FORMS.get(Path(path.stem).suffix), "gzip"
    return FORMS.get(path.suffix), "plain"


def _text_file(path: Path, name: str) -> TextFile:
    form, packing = _kind(name)
    if packing == "parquet" and find_spec("pyarrow") is None:
        remedy = "run in the checkout: tools/venv.sh parquet, or move them out of the directory"
        raise ConfigError("TEXT", f"has {PARQUET} files, which need a package", remedy)
    try:
        size_bytes = path.stat().st_size
    except OSError as error:
        problem = error.strerror or "cannot be read"
        raise DataError(str(path), problem, "give a text file or a directory of them") from None
    return TextFile(path, name, form or "text", packing, size_bytes)


def text_bytes(files: Sequence[TextFile]) -> int:
    """Bytes of all text; an estimate if it is packed."""
    return sum(file.text_bytes for file in files)


@contextmanager
def opened(file: TextFile) -> Iterator[BinaryIO]:
    """Open a file whose contents are unpacked as they are read; Parquet as it is.

    Raises DataError if it cannot be read, is damaged, or is cut short.
    """
    try:
        with io.BufferedReader(open_regular_file(file.path), _BUFFER_BYTES) as stream:
            unpacked: Any = gzip.GzipFile(fileobj=stream) if file.packing == "gzip" else stream
            yield unpacked
    except (OSError, EOFError, zlib.error, ValueError, NotImplementedError) as error:
        problem = f"cannot be read ({getattr(error, 'strerror', None) or error})"
        raise DataError(str(file.path), problem, "give whole, readable files") from None


# Where documents end ------------------------------------------------------------------------------


def next_document(file: TextFile, position: int) -> int | None:
    """The start of the first document that begins after `position`; None if there is none.

    The file is plain, not packed. Memory is bounded even if it is one line.
    """
    at = position
    at_line_start = opens = False  # `position` may be within a line
    with opened(file) as stream:
        stream.seek(position)
        for line in _byte_lines(stream, longest=SECTION_CHARS):
            if opens and line.strip():
                return at
            is_empty = at_line_start and not line.strip()
            at_line_start = line.endswith(b"\n")
            opens = at_line_start and (file.form == "json_lines" or is_empty)
            at += len(line)
    return None


def sections(file: TextFile, rules: Rules) -> Iterator[Section]:
    """Yield all sections in order. Raises DataError if the file cannot be read in this form."""
    num_bytes = math.inf if file.stop is None else file.stop - file.start
    with opened(file) as stream:
        if file.start:
            stream.seek(file.start)
        if file.form == "text":
            lines = _lines(stream, num_bytes)
            yield from _sections(_plain_paragraphs(lines, rules.documents))
            return
        if file.packing == "parquet":
            found = _parquet_rows(stream, rules.text_field)
        else:
            found = _json_values(_byte_lines(stream, num_bytes), file.path)
        for number, value in enumerate(found, start=1):
            text = value.get(rules.text_field) if isinstance(value, dict) else None
            if not isinstance(text, str):
                remedy = "give objects or rows with text, and its name as --text-field"
                problem = f"has no text {rules.text_field!a}"
                raise DataError(f"{file.path}: document {number}", problem, remedy)
            yield from _sections((paragraph, False) for paragraph in _cut(text.split("\n")))


def _byte_lines(
    stream: BinaryIO, num_bytes: float = math.inf, longest: int = -1
) -> Iterator[bytes]:
    """Yield the lines that begin in the next `num_bytes`, in pieces of `longest` bytes at most."""
    while num_bytes > 0 and (line := stream.readline(longest)):
        yield line
        num_bytes -= len(line)


def _lines(stream: BinaryIO, num_bytes: float) -> Iterator[tuple[str, bool]]:
    """Yield lines, long ones in pieces, each with True if the line ends there.

    Bytes that are not UTF-8 become U+FFFD.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for line in _byte_lines(stream, num_bytes, longest=SECTION_CHARS):
        yield decoder.decode(line), line.endswith(b"\n")
    yield decoder.decode(b"", final=True), True


def _plain_paragraphs(
    lines: Iterable[tuple[str, bool]], rule: DocumentRule
) -> Iterator[tuple[str, bool]]:
    """Yield paragraphs, or parts of long ones, each with True if it opens a document."""
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
    """Group paragraphs of a document up to the length of a section; the first opens a document."""
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


def _json_values(lines: Iterable[bytes], path: Path) -> Iterator[Any]:
    full = (line for line in lines if line.strip())
    for number, line in enumerate(full, start=1):
        try:
            yield json.loads(line.decode("utf-8", "replace").removeprefix("\ufeff"))
        except (ValueError, RecursionError):
            remedy = "give one JSON object a line"
            raise DataError(f"{path}: document {number}", "is not JSON", remedy) from None


def _parquet_rows(stream: BinaryIO, text_field: str) -> Iterator[dict[str, Any]]:
    """Yield rows of one column. It starts no threads and holds one page and one batch of rows."""
    from pyarrow.parquet import ParquetFile  # an extra

    table = ParquetFile(
        stream, pre_buffer=False, buffer_size=_BUFFER_BYTES, page_checksum_verification=True
    )
    for rows in table.iter_batches(_PARQUET_ROWS, columns=[text_field], use_threads=False):
        yield from rows.to_pylist()
