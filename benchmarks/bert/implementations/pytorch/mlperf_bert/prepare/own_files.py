"""The files of a user's own text: which are read, unpacked in bounded memory, to raw documents.

Three layouts of plain text (`DocumentRule`): `empty-line`, documents apart by an empty line, the
lines of one joined; `line`, each line a document; `file`, each file one, its paragraphs apart by
an empty line. A line of JSON and a row of Parquet is one document, whose text has paragraphs of a
line each.

A document of more than SECTION_CHARS is cut at the end of a paragraph, or of a line: the sections
become documents of their own, but stay together on one side of the split.
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
from typing import Any, BinaryIO, Literal

from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.common.file_progress import progress_of
from mlperf_bert.common.untrusted import file_digest, in_brief, open_regular_file
from mlperf_bert.prepare.sandbox import Limits, sandbox

Form = Literal["text", "json_lines"]
Packing = Literal["plain", "gzip", "zstd", "parquet"]  # out of Parquet come lines of JSON

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

# Text shrinks to a third or a sixth. What expands a hundredfold is made to fill the disk.
MOST_EXPANSION = 100
ALWAYS_ALLOWED_BYTES = 64 * 2**20
LONG_READ_BYTES = 2**30  # takes seconds: worth a word
_ZSTD_WINDOW_BYTES = 2**27  # of memory; what `zstd --long` writes needs as much
_ZSTD_INPUT_BYTES = 1024  # which can be 32 MiB unpacked
_BUFFER_BYTES = 2**20
PARQUET_READER = "mlperf_bert.prepare.parquet_reader:read_lines"
# As long as cleaning takes, which the reader waits for; how much it may say is a file's expansion.
_PARQUET_LIMITS = Limits(cpu_seconds=36_000, wall_seconds=10 * 86_400, answer_bytes=2**50)

DocumentRule = Literal["empty-line", "line", "file"]
SECTION_CHARS = 2**16  # about 12,000 words
_MOST_JSON_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class TextFile:
    """One file of the text; `name` is its path below the directory that was given."""

    path: Path
    name: str
    form: Form
    packing: Packing
    size_bytes: int


def find_files(source: Path, leave_out: Path | None = None) -> list[TextFile]:
    """The text files of a directory, at any depth, by name; or the one file that is named.

    Hidden ones, those of other kinds, and `leave_out` are left out; a file that is named itself is
    read as plain text where its kind is not known. Raises DataError where there is none.
    """
    if not source.is_dir():
        return [_text_file(source, source.name, "text")]
    found = []
    for directory, subdirectories, names in os.walk(source):
        subdirectories[:] = [name for name in subdirectories if not name.startswith(".")]
        for name in names:
            path = Path(directory) / name
            if leave_out is not None and path.resolve() == leave_out.resolve():
                continue
            if not name.startswith(".") and _kind(path)[0] is not None:
                found.append(_text_file(path, path.relative_to(source).as_posix(), None))
    if not found:
        raise DataError(str(source), "has no text files", f"these are read: {READ}")
    return sorted(found, key=lambda file: file.name)


def digests(files: Sequence[TextFile], *, quiet: bool) -> list[str]:
    """The sha256 of every file, as it lies there. Raises DataError where one cannot be read."""
    total = sum(file.size_bytes for file in files)
    quiet = quiet or total < LONG_READ_BYTES
    found = []
    with progress_of(len(files), total, quiet=quiet, words=("read", "files")) as advance:
        for file in files:
            found.append(file_digest(file.path, "give readable text files"))
            advance(file.path.name, file.size_bytes)
    return found


@contextmanager
def opened(path: Path, packing: Packing, text_field: str = "") -> Iterator[BinaryIO]:
    """The file's contents, unpacked as they are read; of Parquet the column `text_field`.

    Raises DataError where it cannot be read, is damaged, or expands more than text does.
    """
    try:
        with open_regular_file(path) as file:
            limit = ALWAYS_ALLOWED_BYTES + MOST_EXPANSION * os.fstat(file.fileno()).st_size
            with _unpacked(file, path, packing, text_field) as reader:
                # Closed with the file under it: none of these readers has anything to write.
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
    """What has `readinto`."""
    if packing == "gzip":
        yield gzip.GzipFile(fileobj=io.BufferedReader(file, _BUFFER_BYTES), mode="rb")
    elif packing == "zstd":
        yield _Joined(_zstd_pieces(io.BufferedReader(file, _BUFFER_BYTES)))
    elif packing == "parquet":
        with sandbox(f"{PARQUET_READER}:{text_field}", _PARQUET_LIMITS) as running:
            remedy = (
                "give whole Parquet files, and the name of their column of text as --text-field"
            )
            yield _Joined(running.read_pieces(path, remedy))
    else:
        yield file


class _Joined:
    """Pieces of bytes, one after the other."""

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


def _zstd_pieces(file: io.BufferedReader) -> Iterator[bytes]:
    """The frames of a zstd file, one after the other; damages are OSErrors, a cut file too.

    The package's own reader takes a file that is cut for one that ends.
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
    """Raised past the most bytes that a file may expand to."""


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
    with opened(piece.path, piece.packing, text_field) as file:
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
