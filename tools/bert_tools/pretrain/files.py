"""Finds the files of a corpus, detects their encodings, and opens them unpacked.

The ending of a file's name determines how the file is read (`FORMS`, `PACKINGS`, `PARQUET`). The
first bytes determine whether the encoding is UTF-8, UTF-16 or UTF-32, with or without a byte order
mark. Files that are not read are counted by kind (`Unread`) and reported, because a user might not
notice that they are missing. When run as a script, this module prints the table of
docs/guides/own_text.md.
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
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

from mlperf_bert.errors import DataError
from mlperf_bert.extras import require_packages
from mlperf_bert.files import in_brief, open_regular_file

Form = Literal["text", "json_lines"]
Packing = Literal["plain", "gzip", "bzip2", "xz", "zstandard", "parquet"]

# Maps a file's ending to how it is read. A row of Parquet is read like a JSON object.
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
READ = f"{', '.join(FORMS)} (each also packed as {', '.join(PACKINGS)}), {PARQUET}"
NO_TEXT = ("image", "audio", "video", "font")  # kinds of files that contain no text

MAX_REASONS = 6  # reasons that are reported one by one
EXPANSION = 4  # approximate size of unpacked text, divided by the size of the packed file
MAX_LINE_BYTES = 2**24  # of a line of JSON that is parsed to recognize JSON lines
SAMPLE_BYTES = 2**16  # bytes at the start of a file from which its encoding is detected
_BUFFER_BYTES = 2**20
# Byte order marks. UTF-32 comes before UTF-16, because its mark starts with the one of UTF-16.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_WIDE = ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")
_CONTROLS = bytes({*range(32), 127} - {*b"\t\n\v\f\r"})  # rare in UTF-8, common in UTF-16
_BREAKS = frozenset(" \n\r\u3000\u3001\u3002\uff0c")  # between words, lines or clauses
_MIN_BREAKS, _MAX_ODD = 0.002, 0.01  # fractions of the characters of a text
_FEW_PAGES = 4  # pages of 256 characters, enough for nearly all letters of an alphabet
# Pages of Chinese, Japanese and Korean, including Latin letters and wide punctuation.
_EAST_ASIAN = frozenset((0x00, *range(0x2E, 0xD8), 0xFF))


@dataclass(frozen=True, slots=True)
class TextFile:
    """One file of a corpus, or the part of a plain file from byte `start` to byte `stop`.

    `name` is the file's path relative to the corpus directory. One document begins at `start`, and
    another one at `stop`.
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
        """Return the number of bytes of text, which is an estimate if the file is packed."""
        if self.packing != "plain":
            return self.size_bytes * EXPANSION
        return (self.size_bytes if self.stop is None else self.stop) - self.start


@dataclass(frozen=True, slots=True)
class Unread:
    """A file or folder that is not read.

    `why` is the reason in a few words. `size_bytes` is 0 for a folder.
    """

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
    out: Path | None = None,
) -> tuple[list[TextFile], list[Unread]]:
    """Find the text files of a corpus, and the files and folders that are not read.

    Both lists are sorted by name. A directory is searched at any depth, and links are followed. A
    single file is read as plain text if its kind is not known.

    Args:
        source: a directory, or a single file.
        leave_out: a file to ignore, such as the vocabulary.
        text_field: the field of the text in JSON lines.
        also: further endings of plain text. "." stands for files without an ending.
        out: the output directory of the prepared data, which is ignored.

    Raises DataError if there is no text file or if more than half of the bytes are not read, and
    ConfigError if a package is missing. Hidden files are ignored.
    """
    if not source.is_dir():
        return [_text_file(source, source.name, also)], []
    files, unread = _search(source, (leave_out, out), text_field, also)
    missed = [each for each in unread if not _has_no_text(each.name)]
    if not files:
        others = f", only {unread_in_words(unread)}" if unread else ""
        remedy = f"pass files with these endings: {READ}, or add others with --also .ENDING"
        raise DataError(str(source), f"contains no text files{others}", remedy)
    missed_bytes = sum(each.size_bytes for each in missed)
    if missed_bytes > sum(file.size_bytes for file in files):
        problem = (
            f"contains more bytes in skipped files than in text files: {unread_in_words(missed)}"
        )
        remedy = "pass a directory of text files, or add endings of plain text with --also .ENDING"
        raise DataError(str(source), problem, remedy)
    return files, unread


def _require_reader(form: Form | None, packing: Packing) -> None:
    """Raise ConfigError if reading files of this kind needs a package that is not installed."""
    if form is not None and packing in ("parquet", "zstandard"):
        suffix = PARQUET if packing == "parquet" else _packing_suffix(packing)
        otherwise = "move these files out of the directory"
        purpose = f"to read {suffix} files"
        require_packages("TEXT", "parquet", "pyarrow", purpose=purpose, otherwise=otherwise)


def unread_in_words(unread: Sequence[Unread]) -> str:
    """Describe how many files are skipped for each reason, and name one skipped file."""
    reasons = Counter(each.why for each in unread).most_common()
    counts = ", ".join(f"{count:,} {why}" for why, count in reasons[:MAX_REASONS])
    if others := sum(count for _, count in reasons[MAX_REASONS:]):
        counts += f", {others:,} of {len(reasons) - MAX_REASONS:,} other kinds"
    return f"{counts} (first {in_brief(unread[0].name)})"


def _has_no_text(name: str) -> bool:
    """Return whether a file's name shows that it contains no text, for example a picture."""
    kind = mimetypes.guess_type(name)[0] or ""
    return kind.partition("/")[0] in NO_TEXT


def _search(
    source: Path, ignored: Iterable[Path | None], text_field: str, also: Collection[str]
) -> tuple[list[TextFile], list[Unread]]:
    """Return the text files of a directory and the files that are not read, sorted by name."""
    left_out = {_identity(path) for path in ignored if path is not None and path.exists()}
    files, unread = [], []
    for path, status, why in _walk(source, left_out):
        name = path.relative_to(source).as_posix()
        why = why or _why_not(path, status, text_field, also)
        if why is None:
            files.append(_text_file(path, name, also))
        else:
            unread.append(Unread(name, why, status.st_size if status and _is_file(status) else 0))
    return sorted(files, key=lambda each: each.name), sorted(unread, key=lambda each: each.name)


_Found = tuple[Path, os.stat_result | None, str | None]
_Identity = tuple[int, int]


def _walk(source: Path, left_out: Collection[_Identity]) -> Iterator[_Found]:
    """Walk through a directory at any depth and yield (path, status, reason).

    The reason is None for a file, and describes why a folder or a link cannot be read. A folder
    that several links lead to is entered only once. Hidden files and folders and those in
    `left_out` are skipped.
    """
    waiting, entered = [source], {_identity(source)}
    while waiting:
        folder = waiting.pop()
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            if folder == source:
                problem = error.strerror or "cannot be read"
                remedy = "check the directory's permissions, or pass another directory"
                raise DataError(str(source), problem, remedy) from None
            yield folder, None, _reason(error)
            continue
        for path in (folder / name for name in names if not name.startswith(".")):
            try:
                status = path.stat()
            except OSError as error:  # a broken link, a cycle of links, a lost file system
                yield path, None, _reason(error)
                continue
            identity = status.st_dev, status.st_ino
            if identity in left_out:
                continue
            if not stat.S_ISDIR(status.st_mode):
                yield path, status, None
            elif identity in entered:
                yield path, None, "already read by another name"
            else:
                entered.add(identity)
                waiting.append(path)


def _reason(error: OSError) -> str:
    """Return a few words that describe why a file or folder cannot be read."""
    if isinstance(error, FileNotFoundError):
        return "with a broken link"
    if isinstance(error, PermissionError):
        return "without read permission"
    return f"unreadable ({(error.strerror or 'unknown').lower()})"


def _identity(path: Path) -> _Identity:
    """Return the device and inode of a path, which identify a file under all of its names."""
    status = path.stat()
    return status.st_dev, status.st_ino


def _is_file(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode)


def _why_not(
    path: Path, status: os.stat_result | None, text_field: str, also: Collection[str]
) -> str | None:
    """Return the reason why a file of a directory is not read, or None if it is read."""
    if status is None or not _is_file(status):
        return "not a regular file"
    form, packing = _kind(path.name, also)
    endings = "".join(suffix for suffix in path.suffixes[-2:] if len(suffix) <= 9).lower()
    if form is None:
        suffix = path.suffix.lower()
        return (endings if suffix in PACKINGS else suffix) or "without an ending"
    if not os.access(path, os.R_OK):
        return "without read permission"
    if form == "json_lines" and ".json" in endings and ".jsonl" not in endings:
        file = TextFile(path, path.name, form, packing, status.st_size)
        if not _is_json_lines(file, text_field):
            return f"{endings} without {in_brief(text_field)} in its first line"
    return None


def _kind(name: str, also: Collection[str]) -> tuple[Form | None, Packing]:
    """Return a file's form (such as JSON lines) and packing according to its name.

    The form is None if the ending of the name is not known.
    """
    path = Path(name.lower())
    if path.suffix == PARQUET:
        return "json_lines", "parquet"
    packing = PACKINGS.get(path.suffix, "plain")
    suffix = path.suffix if packing == "plain" else Path(path.stem).suffix
    return ("text" if (suffix or ".") in also else FORMS.get(suffix)), packing


def _packing_suffix(packing: Packing) -> str:
    """Return the file name ending of a packing, or an empty text for unpacked files."""
    return next((suffix for suffix, each in PACKINGS.items() if each == packing), "")


def _is_json_lines(file: TextFile, text_field: str) -> bool:
    """Return whether a .json file contains JSON lines.

    This is the case if its first line is an object whose field `text_field` is a string.
    """
    with opened(file, SAMPLE_BYTES) as stream:
        sample = stream.read(SAMPLE_BYTES)
        encoding = encoding_of(sample) or "utf-8"
        start = sample.decode(encoding, "replace").lstrip("\ufeff \t\r\n")
        if not start.startswith("{"):
            return False
        if "\n" not in start:  # a .json file may be a single line of gigabytes
            sample += stream.read(MAX_LINE_BYTES)
    first, ends, _ = sample.decode(encoding, "replace").lstrip("\ufeff \t\r\n").partition("\n")
    if not ends and len(sample) > MAX_LINE_BYTES:
        return False
    try:
        value = json.loads(first.removeprefix("\ufeff"))
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and isinstance(value.get(text_field), str)


def _text_file(path: Path, name: str, also: Collection[str]) -> TextFile:
    """Return the description of a file to read, without its encoding.

    Raises DataError if the file cannot be accessed, and ConfigError if a package is missing.
    """
    form, packing = _kind(name, also)
    _require_reader(form, packing)
    try:
        size_bytes = path.stat().st_size
    except OSError as error:
        problem = error.strerror or "cannot be read"
        raise DataError(str(path), problem, "pass a file or a directory of text") from None
    return TextFile(path, name, form or "text", packing, size_bytes)


def text_bytes(files: Sequence[TextFile]) -> int:
    """Return the bytes of text in all files, which is an estimate if some files are packed."""
    return sum(file.text_bytes for file in files)


# Open ---------------------------------------------------------------------------------------------


@contextmanager
def opened(file: TextFile, buffer_bytes: int = _BUFFER_BYTES) -> Iterator[BinaryIO]:
    """Return a context manager that opens a file and unpacks its contents while they are read.

    Parquet files are not unpacked. Raises DataError if the file cannot be read, is damaged, or is
    truncated.
    """
    try:
        with io.BufferedReader(open_regular_file(file.path), buffer_bytes) as stream:
            yield _unpacked(file.packing, stream)
    except (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError) as error:
        problem = f"cannot be read ({getattr(error, 'strerror', None) or error})"
        remedy = "check that the file is complete and not damaged"
        raise DataError(str(file.path), problem, remedy) from None


def _unpacked(packing: Packing, stream: BinaryIO) -> Any:
    """Return a stream that unpacks the bytes of another stream."""
    match packing:
        case "gzip":
            return gzip.GzipFile(fileobj=stream)
        case "bzip2":
            return bz2.BZ2File(stream)
        case "xz":
            return lzma.LZMAFile(stream)
        case "zstandard":
            from pyarrow import CompressedInputStream, PythonFile  # from the extra `parquet`

            return io.BufferedReader(CompressedInputStream(PythonFile(stream), "zstd"))
    return stream


# Encoding -----------------------------------------------------------------------------------------


def with_encodings(files: Sequence[TextFile]) -> tuple[list[TextFile], list[TextFile]]:
    """Return the files with their encodings, and a second list of files that are not Unicode text.

    Reads the first SAMPLE_BYTES of each file. Raises DataError, as `opened` does.
    """
    known, foreign = [], []
    for file in files:
        if file.packing == "parquet":
            known.append(file)
            continue
        with opened(file, SAMPLE_BYTES) as stream:
            encoding = encoding_of(stream.read(SAMPLE_BYTES))
        if encoding is None:
            foreign.append(file)
        else:
            known.append(file if encoding == "utf-8" else replace(file, encoding=encoding))
    return known, foreign


def encoding_of(sample: bytes) -> str | None:
    """Detect the Unicode encoding of a file from its first bytes, `sample`.

    Returns Python's name of the encoding, or None if the file is not Unicode text.

    Without a byte order mark, UTF-16 and UTF-32 are recognized if decoding as UTF-8 fails or gives
    many control characters, and if the decoded text has spaces and letters of few scripts.
    """
    for mark, encoding in _MARKS:
        if sample.startswith(mark):
            return encoding
    as_utf8 = _decoded(sample, "utf-8")
    if as_utf8 is not None and len(sample.translate(None, _CONTROLS)) == len(sample):
        return "utf-8"  # the result for nearly all files
    if as_utf8 is not None and _fraction_odd(as_utf8) <= _MAX_ODD:
        return "utf-8"
    wide = {encoding: _decoded(sample, encoding) for encoding in _WIDE}
    breaks = {
        encoding: sum(char in _BREAKS for char in text)
        for encoding, text in wide.items()
        if text and _is_of_few_scripts(text)
    }
    best = max(breaks, key=breaks.__getitem__, default=None)
    if best is not None and breaks[best] >= _MIN_BREAKS * len(wide[best] or ""):
        return best
    if as_utf8 is not None:
        return "utf-8"
    with_marks = sample.decode("utf-8", "replace")
    return "utf-8" if with_marks.count("\ufffd") <= _MAX_ODD * len(with_marks) + 1 else None


def _decoded(sample: bytes, encoding: str) -> str | None:
    """Decode bytes that may end inside a character, or return None if they are invalid."""
    try:
        return codecs.getincrementaldecoder(encoding)().decode(sample)
    except UnicodeDecodeError:
        return None


def _fraction_odd(text: str) -> float:
    """Return the fraction of characters that should not occur in text.

    These characters are control, private-use and unassigned characters.
    """
    odd = sum(
        count
        for char, count in Counter(text).items()
        if unicodedata.category(char) in ("Cc", "Cn", "Co", "Cs")
        and char not in "\t\n\v\f\r\x1a\x85"
    )
    return odd / max(1, len(text))


def _is_of_few_scripts(text: str) -> bool:
    """Return whether a text uses few scripts.

    Bytes that are wrongly decoded as UTF-16 or UTF-32 look like text of many scripts.
    """
    pages = Counter(ord(char) >> 8 for char in text)
    written = sum(count for _, count in pages.most_common(_FEW_PAGES))
    east_asian = sum(count for page, count in pages.items() if page in _EAST_ASIAN)
    return _fraction_odd(text) <= _MAX_ODD and max(written, east_asian) >= 0.9 * len(text)


# Describe -----------------------------------------------------------------------------------------


def what_is_read() -> str:
    """Return a Markdown table of the kinds of files that are read."""
    text = [suffix for suffix, form in FORMS.items() if form == "text"]
    lines = [suffix for suffix, form in FORMS.items() if form == "json_lines"]
    encodings = dict.fromkeys(name.upper()[:6].rstrip("-") for _, name in _MARKS)
    rows = {
        "plain text": f"{_listed(text)}. Add other endings with `--also .ENDING`.",
        "JSON": f"{_listed(lines)} with one object per line. The text is in the field `text`. To "
        "change that, add `--text-field NAME`.",
        "Parquet": f"{_listed([PARQUET])}. The column may have strings, large strings, categories "
        "or binary UTF-8. A null value is no text.",
        "compressed": f"plain text and JSON whose names also end in {_listed(PACKINGS)}",
        "encodings": f"{', '.join(encodings)}, in either byte order, with or without a byte order "
        "mark",
        "line ends": "LF, CR LF, CR, NEL, U+2028, U+2029",
    }
    table = "".join(f"| {name} | {found} |\n" for name, found in rows.items())
    return f"| Kind | What `pretrain` reads |\n|---|---|\n{table}".rstrip()


def _listed(endings: Collection[str]) -> str:
    return " ".join(f"`{ending}`" for ending in endings)


if __name__ == "__main__":
    print(what_is_read())
