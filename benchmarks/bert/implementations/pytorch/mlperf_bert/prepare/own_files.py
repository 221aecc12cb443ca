"""The files of a user's own text: found, unpacked in bounded memory, and split into documents.

Plain text has three layouts (`DocumentRule`): `empty-line`, an empty line ends a document and the
lines of a document are joined; `line`, each line is a document; `file`, each file is a document and
an empty line ends a paragraph. If the user names none, the number of files decides (`layout_of`),
and short neighbours of one file are joined. A line of JSON or a row of Parquet is one document, and
each line of its text is a paragraph.

A document of more than SECTION_CHARS is cut at the end of a paragraph or line. Its sections become
separate documents, but stay on one side of the train/held-out split.
"""

import codecs
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from mlperf_bert.common.console import count_bytes
from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.common.untrusted import file_digest, in_brief, open_regular_file

Form = Literal["text", "json_lines"]
Packing = Literal["plain", "gzip", "zstd", "parquet"]  # the Parquet reader yields lines of JSON

FORMS: dict[str, Form] = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "json_lines",
    ".ndjson": "json_lines",
}
PACKINGS: dict[str, Packing] = {".gz": "gzip", ".zst": "zstd"}
PARQUET = ".parquet"
READ = f"{', '.join(FORMS)}, each also with {' or '.join(PACKINGS)}; {PARQUET}"

# Text packs to a third or a sixth. A file that expands a hundredfold is made to fill the disk.
MOST_EXPANSION = 100
ALWAYS_ALLOWED_BYTES = 64 * 2**20
LONG_READ_BYTES = 2**30  # takes seconds: print a line
_ZSTD_WINDOW_BYTES = 2**27  # memory that files written by `zstd --long` need
_ZSTD_INPUT_BYTES = 1024  # may unpack to 32 MiB
_BUFFER_BYTES = 2**20

DocumentRule = Literal["empty-line", "line", "file"]
SECTION_CHARS = 2**16  # about 12,000 words
_MOST_JSON_BYTES = 64 * 2**20

FEWEST_FILES = 32  # for a document per file: 1/16 of them is held out, and must be two
SAMPLE_BYTES = 2**18  # of each file, to count the characters of a small text
# About 350 words fill a sequence of 512 tokens; a small text gets less, to have 64 documents.
JOINED_CHARS = 2**11
_JOINED_SHARE = 64


@dataclass(frozen=True, slots=True)
class TextFile:
    """One file of the text; `name` is its path below the given directory."""

    path: Path
    name: str
    form: Form
    packing: Packing
    size_bytes: int


class Layout(NamedTuple):
    """Where documents end, and why; short ones of a file are joined to `join_chars` characters."""

    rule: DocumentRule
    join_chars: int
    why: str


def layout_of(files: Sequence[TextFile], asked: DocumentRule | None) -> Layout:
    """Decide where documents end: as asked, or by the number of files.

    Raises DataError for a file that cannot be read.
    """
    if asked is not None:
        return Layout(asked, 0, f"documents end as --documents {asked} says")
    other = " (--documents decides otherwise)"
    plain = [file for file in files if file.form == "text"]
    if not plain:
        return Layout("file", 0, "each line of JSON or row of Parquet is a document")
    if len(files) > len(plain) or len(plain) >= FEWEST_FILES:
        return Layout(
            "file", 0, f"each of {len(plain):,} files of plain text is a document" + other
        )
    num_chars = 0
    for file in plain:
        with opened(file.path, file.packing) as stream:
            paragraphs = _plain_paragraphs(_lines(stream, SAMPLE_BYTES), "empty-line", 0)
            num_chars += sum(len(paragraph) for paragraph, _ in paragraphs)
    few = "one file" if len(plain) == 1 else f"{len(plain)} files, fewer than {FEWEST_FILES}"
    join_chars = min(JOINED_CHARS, num_chars // _JOINED_SHARE)
    ends = f"blocks between empty lines are documents, joined to {join_chars:,} characters"
    return Layout("empty-line", join_chars, f"{few}: {ends}{other}")


def find_files(source: Path, leave_out: Path | None = None) -> list[TextFile]:
    """The text files of a directory at any depth, sorted by name; or the one file that is named.

    Hidden files, files of other kinds, and `leave_out` are left out; a file that is named itself is
    read as plain text if its kind is not known. Raises DataError if there is none.
    """
    if not source.is_dir():
        return [_text_file(source, source.name, "text")]
    found = [
        _text_file(path, path.relative_to(source).as_posix(), None)
        for path in _files_below(source, leave_out)
        if _kind(path)[0] is not None
    ]
    if not found:
        raise DataError(str(source), "has no text files", f"these are read: {READ}")
    return sorted(found, key=lambda file: file.name)


def unread_files(source: Path, leave_out: Path | None = None) -> list[str]:
    """The names of files of other kinds, which `find_files` leaves out, sorted; not hidden ones."""
    names = (
        path.relative_to(source).as_posix()
        for path in _files_below(source, leave_out)
        if _kind(path)[0] is None
    )
    return sorted(names)


def _files_below(source: Path, leave_out: Path | None) -> Iterator[Path]:
    """All files of a directory at any depth but hidden ones and `leave_out`; none of a file."""
    for directory, subdirectories, names in os.walk(source):
        subdirectories[:] = [name for name in subdirectories if not name.startswith(".")]
        for name in names:
            path = Path(directory) / name
            is_left_out = leave_out is not None and path.resolve() == leave_out.resolve()
            if not name.startswith(".") and not is_left_out:
                yield path


def digests(files: Sequence[TextFile], *, quiet: bool) -> list[str]:
    """The sha256 of every file, still packed. Raises DataError if one cannot be read."""
    total = sum(file.size_bytes for file in files)
    advance = count_bytes(len(files), total, words=("read", "files"))
    found = []
    for file in files:
        found.append(file_digest(file.path, "give readable text files"))
        if not quiet and total >= LONG_READ_BYTES:
            advance(file.size_bytes)
    return found


@contextmanager
def opened(path: Path, packing: Packing, text_field: str = "") -> Iterator[BinaryIO]:
    """Open a file whose contents are unpacked as they are read; of Parquet the column `text_field`.

    Raises DataError if it cannot be read, is damaged, or expands more than text does.
    """
    try:
        with open_regular_file(path) as file:
            limit = ALWAYS_ALLOWED_BYTES + MOST_EXPANSION * os.fstat(file.fileno()).st_size
            with _unpacked(file, path, packing, text_field) as reader:
                # Closed with the file under it, as these readers only read.
                yield io.BufferedReader(_Limited(reader, limit), _BUFFER_BYTES)
    except _ExpandsTooMuchError:
        problem = f"expands to more than {MOST_EXPANSION} times its size"
        raise DataError(str(path), problem, "unpack it yourself if it is text") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        problem = f"is no whole gzip file ({error})"
        raise DataError(str(path), problem, "fetch or pack it again") from None
    except OSError as error:
        problem = error.strerror or "cannot be read"
        raise DataError(str(path), problem, "give readable text files") from None


def _kind(path: Path) -> tuple[Form | None, Packing]:
    if path.suffix.lower() == PARQUET:
        return "json_lines", "parquet"
    packing = PACKINGS.get(path.suffix.lower(), "plain")
    inner = Path(path.stem) if packing != "plain" else path
    return FORMS.get(inner.suffix.lower()), packing


def _text_file(path: Path, name: str, otherwise: Form | None) -> TextFile:
    form, packing = _kind(path)
    form = form or otherwise
    assert form is not None
    if packing == "parquet" and find_spec("pyarrow") is None:
        raise _lacking("parquet", "parquet", "move them out of the directory")
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or "is no name of a file"
        raise DataError(str(path), problem, "give a text file or a directory of them") from None
    if "\n" in name or not name.isprintable():
        raise DataError(in_brief(name), "is no printable name", "rename the file")
    return TextFile(path, name, form, packing, status.st_size)


@contextmanager
def _unpacked(file: io.FileIO, path: Path, packing: Packing, text_field: str) -> Iterator[Any]:
    """An unpacking reader with `readinto`."""
    if packing == "gzip":
        yield gzip.GzipFile(fileobj=io.BufferedReader(file, _BUFFER_BYTES), mode="rb")
    elif packing == "zstd":
        yield _Joined(_zstd_pieces(io.BufferedReader(file, _BUFFER_BYTES)))
    elif packing == "parquet":
        yield _Joined(_parquet_lines(path, text_field))
    else:
        yield file


class _Joined:
    """A stream over pieces of bytes."""

    def __init__(self, pieces: Iterator[bytes | bytearray]) -> None:
        self._pieces = pieces
        self._left = memoryview(b"")

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._left = memoryview(piece)
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


def _parquet_lines(path: Path, text_field: str) -> Iterator[bytes]:
    """Yield the rows of a Parquet file as lines of JSON. Raises DataError with pyarrow's words."""
    from mlperf_bert.prepare.parquet_reader import read_lines  # imports pyarrow, which is an extra

    try:
        yield from read_lines(text_field, str(path))
    except (OSError, ValueError, NotImplementedError) as error:
        problem = f"cannot be read ({error})"
        remedy = "give whole Parquet files, and the name of their column of text as --text-field"
        raise DataError(str(path), problem, remedy) from None


def _zstd_pieces(file: io.BufferedReader) -> Iterator[bytes]:
    """Yield the contents of a zstd file, frame by frame; a damaged or cut file is an OSError.

    The package's own reader takes a cut file for a complete one.
    """
    try:
        import zstandard
    except ImportError:
        raise _lacking("zst", "zstd") from None
    unpack = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    frame = None
    while packed := file.read(_ZSTD_INPUT_BYTES):
        while packed:
            frame = frame or unpack.decompressobj()
            try:
                yield frame.decompress(packed)
            except zstandard.ZstdError as error:
                raise OSError(0, f"is no whole zstd file ({error})") from None
            packed = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise OSError(0, "is no whole zstd file (it ends within a frame)")


def _lacking(kind: str, extra: str, otherwise: str = "unpack them") -> ConfigError:
    remedy = f"run in the checkout: tools/venv.sh {extra}, or {otherwise}"
    return ConfigError("--corpus", f"has .{kind} files, which need a package", remedy)


class _ExpandsTooMuchError(Exception):
    """Raised when a file expands to more bytes than allowed."""


class _Limited(io.RawIOBase):
    def __init__(self, reader: Any, limit: int) -> None:
        self._reader = reader
        self._left = limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self._reader.readinto(buffer)
        self._left -= count
        if self._left < 0:
            raise _ExpandsTooMuchError
        return count


@dataclass(frozen=True, slots=True)
class Section:
    """Consecutive paragraphs of a document; `opens` if they are its first."""

    paragraphs: list[str]
    opens: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """A file, or the bytes `start` to `stop` of a plain one; a document ends before each."""

    path: Path
    form: Form
    packing: Packing
    start: int
    stop: int | None


def sections(
    piece: Piece, rule: DocumentRule, text_field: str, join_chars: int = 0
) -> Iterator[Section]:
    """Yield all sections of a piece, in order; `join_chars` as in Layout.

    Raises DataError if the piece cannot be read in this form.
    """
    with opened(piece.path, piece.packing, text_field) as file:
        if piece.start:
            _skip(file, piece.start)
        most = None if piece.stop is None else piece.stop - piece.start
        if piece.form == "json_lines":
            yield from _json_documents(file, most, piece.path, text_field)
        else:
            yield from _sections(_plain_paragraphs(_lines(file, most), rule, join_chars))


def next_document(path: Path, form: Form, rule: DocumentRule, position: int) -> int | None:
    """The start of the first document that begins after `position`; None if there is none."""
    with opened(path, "plain") as file:
        _skip(file, position)
        at = position + _skip_line(file)  # the rest of a possibly incomplete line
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
    """Read to the end of the line; returns the number of bytes."""
    skipped = 0
    while line := file.readline(SECTION_CHARS):
        skipped += len(line)
        if line.endswith(b"\n"):
            break
    return skipped


def _lines(file: BinaryIO, most: int | None) -> Iterator[tuple[str, bool]]:
    """Yield lines, long ones in pieces, each with True if the line ends there.

    Bytes that are not UTF-8 become U+FFFD.
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
    lines: Iterator[tuple[str, bool]], rule: DocumentRule, join_chars: int
) -> Iterator[tuple[str, bool]]:
    """Yield paragraphs, or parts of long ones, each with True if it opens a document."""
    collected: list[str] = []
    num_chars = in_document = 0
    opens, in_line = True, False
    for text, ends in lines:
        is_empty = not in_line and not text.strip()
        in_line = not ends
        collected.append(text)
        num_chars += len(text)
        in_document += len(text)
        is_over = is_empty or (rule == "line" and ends and num_chars >= join_chars)
        if is_over or num_chars >= SECTION_CHARS:
            paragraph = "".join(collected)
            if paragraph.strip():
                yield paragraph, opens
                opens = False
            collected, num_chars = [], 0
            opens = opens or (is_over and rule != "file" and in_document >= join_chars)
            in_document = 0 if opens else in_document
    paragraph = "".join(collected)
    if paragraph.strip():
        yield paragraph, opens


def _sections(paragraphs: Iterator[tuple[str, bool]]) -> Iterator[Section]:
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
    remedy = "give one JSON object a line, or text in each row, and its name as --text-field"
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
