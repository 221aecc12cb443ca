"""The files of a user's own text: which are read, in which encoding, and how they are unpacked.

A file's endings decide how it is read (`FORMS`, `PACKINGS`, `PARQUET`); its first bytes decide
between UTF-8, UTF-16 and UTF-32, with a byte order mark or without, and what ends its lines. What
is not read is counted by kind (`unread_files`), because nobody looks for a silence. As a script it
prints the table of docs/start/own_text.md.
"""

import bz2
import codecs
import gzip
import io
import json
import lzma
import mimetypes
import os
import stat
import unicodedata
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Literal

from mlperf_bert.errors import ConfigError, DataError
from mlperf_bert.files import in_brief, open_regular_file

Form = Literal["text", "json_lines"]
Packing = Literal["plain", "gzip", "bzip2", "xz", "zstandard", "parquet"]

# Ending -> how the file is read; a row of Parquet is read like a JSON object.
FORMS: dict[str, Form] = {
    **dict.fromkeys((".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".adoc", ".org"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json_lines"),
}
PACKINGS: dict[str, Packing] = {
    ".gz": "gzip",
    ".bz2": "bzip2",
    ".xz": "xz",
    ".zst": "zstandard",  # read by pyarrow
}
PARQUET = ".parquet"
READ = f"{', '.join(FORMS)}, each also with {', '.join(PACKINGS)}; {PARQUET}"
NO_TEXT = ("image", "audio", "video", "font")  # kinds of files that nobody misses in a text

EXPANSION = 4  # of packed text, roughly
SAMPLE_BYTES = 2**16  # of a file's beginning, in which its encoding is seen
_BUFFER_BYTES = 2**20
_MARKS = (  # byte order marks; that of UTF-32 begins with that of UTF-16
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_WIDE = ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")
_BREAKS = frozenset(" \n\r\u3000\u3001\u3002\uff0c")  # between words, lines or clauses
_LEAST_BREAKS, _MOST_ODD = 0.002, 0.01  # shares of the characters of a text
_FEW_PAGES = 4  # of 256 characters, which hold nearly all letters of a script that has an alphabet
# Pages of Chinese, Japanese and Korean, with Latin letters and wide punctuation between them.
_EAST_ASIAN = frozenset((0x00, *range(0x2E, 0xD8), 0xFF))


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
    encoding: str = "utf-8"
    start: int = 0
    stop: int | None = None

    @property
    def text_bytes(self) -> int:
        """Bytes of text; an estimate if it is packed."""
        if self.packing != "plain":
            return self.size_bytes * EXPANSION
        return (self.size_bytes if self.stop is None else self.stop) - self.start


@dataclass(frozen=True, slots=True)
class Unread:
    """A file or folder that is not read, why, and its bytes (0 for a folder)."""

    name: str
    why: str
    size_bytes: int


# Find ---------------------------------------------------------------------------------------------


def find_files(
    source: Path,
    leave_out: Path | None = None,
    *,
    text_field: str = "text",
    also: Collection[str] = (),
) -> list[TextFile]:
    """The text files of a directory at any depth, sorted by name; or the one file that is named.

    Folders and files that are links count like others. Hidden files, files of other kinds
    (`unread_files`) and `leave_out` are left out; `also` names endings of plain text that are read
    too. A file that is named itself is read as plain text if its kind is not known. Raises
    DataError if there is none or if most of what was given is not read, ConfigError if a package
    is missing.
    """
    if not source.is_dir():
        return [_text_file(source, source.name, also)]
    files, unread = _look(source, leave_out, text_field, also)
    missed = [each for each in unread if not _has_no_text(each.name)]
    if not files:
        beside = f"; not read: {unread_in_words(unread)}" if unread else ""
        remedy = f"these are read: {READ}; --also .ENDING reads others as plain text"
        raise DataError(str(source), f"has no text files{beside}", remedy)
    missed_bytes = sum(each.size_bytes for each in missed)
    if missed_bytes > sum(file.size_bytes for file in files):
        problem = f"is mostly not read ({unread_in_words(missed)}; {len(files):,} of its files are)"
        remedy = "give a directory of what is read, or name endings of plain text by --also .ENDING"
        raise DataError(str(source), problem, remedy)
    return files


def unread_files(
    source: Path,
    leave_out: Path | None = None,
    *,
    text_field: str = "text",
    also: Collection[str] = (),
) -> list[Unread]:
    """What `find_files` leaves out below `source`, sorted by name, but hidden files."""
    return _look(source, leave_out, text_field, also)[1] if source.is_dir() else []


def unread_in_words(unread: Sequence[Unread]) -> str:
    """Their number by reason, the most frequent first, and the name of one."""
    reasons = Counter(each.why for each in unread).most_common()
    counts = ", ".join(f"{count:,} {why}" for why, count in reasons)
    return f"{counts} (first {in_brief(unread[0].name)})"


def _has_no_text(name: str) -> bool:
    kind = mimetypes.guess_type(name)[0] or ""
    return kind.partition("/")[0] in NO_TEXT


def _look(
    source: Path, leave_out: Path | None, text_field: str, also: Collection[str]
) -> tuple[list[TextFile], list[Unread]]:
    files, unread = [], []
    for path, why in _walk(source):
        name = path.relative_to(source).as_posix()
        if why is None and leave_out is not None and path.resolve() == leave_out.resolve():
            continue
        size_bytes = 0
        if why is None:
            try:
                status = path.stat()
                size_bytes = status.st_size
                why = _why_not(path, status, text_field, also)
            except FileNotFoundError:
                why = "linked to nothing"
            except PermissionError:
                why = "without permission"
        if why is None:
            files.append(_text_file(path, name, also))
        else:
            unread.append(Unread(name, why, size_bytes))
    return sorted(files, key=lambda each: each.name), sorted(unread, key=lambda each: each.name)


def _walk(source: Path) -> Iterator[tuple[Path, str | None]]:
    """Yield the files of a directory at any depth, and, with the reason, folders that are not read.

    A folder that two links lead to is entered once.
    """
    closed: list[OSError] = []
    entered = {_identity(source)}
    for directory, subdirectories, names in os.walk(
        source, onerror=closed.append, followlinks=True
    ):
        shown = sorted(name for name in subdirectories if not name.startswith("."))
        subdirectories.clear()
        for name in shown:
            path = Path(directory, name)
            if (identity := _identity(path)) in entered:
                yield path, "read by another name"
            else:
                entered.add(identity)
                subdirectories.append(name)
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(directory, name), None
    for error in closed:
        if Path(error.filename) == source:
            problem = error.strerror or "cannot be read"
            raise DataError(str(source), problem, "give a directory that you may read")
        yield Path(error.filename), "without permission"


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _why_not(
    path: Path, status: os.stat_result, text_field: str, also: Collection[str]
) -> str | None:
    """Why a file below the directory is not read; None if it is."""
    if not stat.S_ISREG(status.st_mode):
        return "no regular file"
    form, packing = _kind(path.name, also)
    endings = "".join(suffix for suffix in path.suffixes[-2:] if len(suffix) <= 9).lower()
    if form is None:
        suffix = path.suffix.lower()
        return (endings if suffix in PACKINGS else suffix) or "without an ending"
    if not os.access(path, os.R_OK):
        return "without permission"
    if Path(path.name.lower().removesuffix(_packing_suffix(packing))).suffix == ".json":
        file = TextFile(path, path.name, form, packing, status.st_size)
        return None if _is_json_lines(file, text_field) else f"{endings} without a text a line"
    return None


def _kind(name: str, also: Collection[str]) -> tuple[Form | None, Packing]:
    path = Path(name.lower())
    if path.suffix == PARQUET:
        return "json_lines", "parquet"
    packing = PACKINGS.get(path.suffix, "plain")
    suffix = path.suffix if packing == "plain" else Path(path.stem).suffix
    return ("text" if suffix in also else FORMS.get(suffix)), packing


def _packing_suffix(packing: Packing) -> str:
    return next((suffix for suffix, each in PACKINGS.items() if each == packing), "")


def _is_json_lines(file: TextFile, text_field: str) -> bool:
    """True if the first line of a .json file is an object with a text, as in JSON lines."""
    with opened(file) as stream:
        sample = stream.read(SAMPLE_BYTES)
        encoding = encoding_of(sample) or "utf-8"
        if not sample.decode(encoding, "replace").lstrip("\ufeff \t\r\n").startswith("{"):
            return False  # an array may be one line of gigabytes
    with opened(file) as stream:
        lines = io.TextIOWrapper(stream, encoding, "replace")
        first = next(line for line in lines if line.strip("\ufeff \t\n"))
        lines.detach()  # so that its end closes nothing
    try:
        value = json.loads(first.removeprefix("\ufeff"))
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and isinstance(value.get(text_field), str)


def _text_file(path: Path, name: str, also: Collection[str]) -> TextFile:
    form, packing = _kind(name, also)
    if packing in ("parquet", "zstandard") and find_spec("pyarrow") is None:
        suffix = PARQUET if packing == "parquet" else _packing_suffix(packing)
        remedy = "run in the checkout: tools/venv.sh parquet, or move them out of the directory"
        raise ConfigError("TEXT", f"has {suffix} files, which need a package", remedy)
    try:
        size_bytes = path.stat().st_size
    except OSError as error:
        problem = error.strerror or "cannot be read"
        raise DataError(str(path), problem, "give a text file or a directory of them") from None
    return TextFile(path, name, form or "text", packing, size_bytes)


def text_bytes(files: Sequence[TextFile]) -> int:
    """Bytes of all text; an estimate if it is packed."""
    return sum(file.text_bytes for file in files)


# Open ---------------------------------------------------------------------------------------------


@contextmanager
def opened(file: TextFile) -> Iterator[BinaryIO]:
    """Open a file whose contents are unpacked as they are read; Parquet as it is.

    Raises DataError if it cannot be read, is damaged, or is cut short.
    """
    try:
        with io.BufferedReader(open_regular_file(file.path), _BUFFER_BYTES) as stream:
            yield _unpacked(file.packing, stream)
    except (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError) as error:
        problem = f"cannot be read ({getattr(error, 'strerror', None) or error})"
        raise DataError(str(file.path), problem, "give whole, readable files") from None


def _unpacked(packing: Packing, stream: BinaryIO) -> Any:
    match packing:
        case "gzip":
            return gzip.GzipFile(fileobj=stream)
        case "bzip2":
            return bz2.BZ2File(stream)
        case "xz":
            return lzma.LZMAFile(stream)
        case "zstandard":
            from pyarrow import CompressedInputStream, PythonFile  # an extra

            return io.BufferedReader(CompressedInputStream(PythonFile(stream), "zstd"))
    return stream


# Encoding -----------------------------------------------------------------------------------------


def with_encodings(files: Sequence[TextFile]) -> tuple[list[TextFile], list[TextFile]]:
    """The files with their encodings, and those of them that are no Unicode text.

    Reads the first SAMPLE_BYTES of each. Raises DataError like `opened`.
    """
    known, foreign = [], []
    for file in files:
        if file.packing == "parquet":
            known.append(file)
            continue
        with opened(file) as stream:
            encoding = encoding_of(stream.read(SAMPLE_BYTES))
        known.append(replace(file, encoding=encoding or "utf-8"))
        if encoding is None:
            foreign.append(file)
    return known, foreign


def encoding_of(sample: bytes) -> str | None:
    """The Unicode encoding of a file that begins with `sample`, as Python names it; None for none.

    Without a byte order mark, UTF-16 and UTF-32 are known by what UTF-8 would make of them, control
    characters or nothing, and by having spaces and few kinds of letters.
    """
    for mark, encoding in _MARKS:
        if sample.startswith(mark):
            return encoding
    as_utf8 = _decoded(sample, "utf-8")
    if as_utf8 is not None and _share_of_odd(as_utf8) <= _MOST_ODD:
        return "utf-8"
    wide = {encoding: _decoded(sample, encoding) for encoding in _WIDE}
    breaks = {
        encoding: sum(char in _BREAKS for char in text)
        for encoding, text in wide.items()
        if text and _is_of_few_scripts(text)
    }
    best = max(breaks, key=breaks.__getitem__, default=None)
    if best is not None and breaks[best] >= _LEAST_BREAKS * len(wide[best] or ""):
        return best
    if as_utf8 is not None:
        return "utf-8"
    with_marks = sample.decode("utf-8", "replace")
    return "utf-8" if with_marks.count("\ufffd") <= _MOST_ODD * len(with_marks) + 1 else None


def _decoded(sample: bytes, encoding: str) -> str | None:
    """The text of bytes that may end within a character; None if they are not of the encoding."""
    try:
        return codecs.getincrementaldecoder(encoding)().decode(sample)
    except UnicodeDecodeError:
        return None


def _share_of_odd(text: str) -> float:
    """The share of characters that no text has: control characters, private and unassigned ones."""
    odd = sum(
        count
        for char, count in Counter(text).items()
        if unicodedata.category(char) in ("Cc", "Cn", "Co", "Cs")
        and char not in "\t\n\v\f\r\x1a\x85"
    )
    return odd / max(1, len(text))


def _is_of_few_scripts(text: str) -> bool:
    """True for what a person may have written, not bytes read in pairs that are none."""
    pages = Counter(ord(char) >> 8 for char in text)
    written = sum(count for _, count in pages.most_common(_FEW_PAGES))
    east_asian = sum(count for page, count in pages.items() if page in _EAST_ASIAN)
    return _share_of_odd(text) <= _MOST_ODD and max(written, east_asian) >= 0.9 * len(text)


# Say ----------------------------------------------------------------------------------------------


def what_is_read() -> str:
    """What is read, as a table in Markdown."""
    text = [suffix for suffix, form in FORMS.items() if form == "text"]
    lines = [suffix for suffix, form in FORMS.items() if form == "json_lines"]
    encodings = dict.fromkeys(name.upper()[:6].rstrip("-") for _, name in _MARKS)
    rows = {
        "plain text": f"{_listed(text)}; others with `--also .ENDING`",
        "JSON, an object a line": f"{_listed(lines)}; its text is `text`, or `--text-field NAME`",
        "Parquet": f"{_listed([PARQUET])}; a column of strings, large strings, categories, or "
        "binary UTF-8; null is no text",
        "packed": f"{_listed(PACKINGS)} behind the endings of text and JSON lines",
        "encodings": f"{', '.join(encodings)}, either byte order, with or without a mark",
        "line ends": "LF, CR LF, CR, NEL, U+2028, U+2029",
    }
    table = "".join(f"| {name} | {found} |\n" for name, found in rows.items())
    return f"| what | is read |\n|---|---|\n{table}".rstrip()


def _listed(endings: Collection[str]) -> str:
    return " ".join(f"`{ending}`" for ending in endings)


if __name__ == "__main__":
    print(what_is_read())
