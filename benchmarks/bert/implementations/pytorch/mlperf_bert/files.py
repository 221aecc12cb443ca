"""Read untrusted files safely, and write files so that none is ever incomplete.

The readers accept regular files of limited size and JSON objects. They never block on a pipe or
read from a device. They also distinguish a missing file from a failing file system. pathlib does
not, because it returns False for some failures and raises an error for others. The user's own
prepared sets, runs and checkpoints are trusted once their digests have been checked.

The writers write a temporary file, and rename it when its contents are complete. Each line of a log
is written completely or not at all.
"""

import errno
import hashlib
import json
import mmap
import os
import platform
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields
from io import BufferedReader, FileIO
from pathlib import Path
from stat import S_ISREG
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from mlperf_bert.errors import CheckpointError, ConfigError, DataError, UnreadableError

MAX_JSON_BYTES = 64 * 2**20  # the tokenizer.json of LaBSE has 10 MB, and other files have less
_BRIEF = 60  # characters of an untrusted value in a message
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR)
_NO_SUCH_FILE = (errno.EINVAL, errno.EFBIG)  # raised below for a wrong kind or size of file
NO_ROOM = "check that the disk has free space and is writable"


def open_regular_file(path: Path) -> FileIO:
    """Open a regular file for unbuffered reading. The call does not block on a pipe.

    Raises FileNotFoundError if there is no file, and OSError for anything that is not a regular
    file. The error's `strerror` says what is wrong.
    """
    try:
        # The flags avoid blocking on a pipe without a writer, and taking over a terminal.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except ValueError:  # a zero byte, or characters outside the file system's encoding
        raise OSError(errno.EINVAL, "is not a valid file name") from None
    if S_ISREG(os.fstat(descriptor).st_mode):
        return FileIO(descriptor)
    os.close(descriptor)
    raise OSError(errno.EINVAL, "is not a regular file")


def not_through_a_link(path: str, flags: int, mode: int = 0o666) -> int:
    """Open a file without following a symbolic link or blocking on a pipe.

    Pass this function as the `opener` of `open`. Raises OSError with ELOOP for a symbolic link, and
    with ENXIO if the file is opened for writing and is a pipe that nobody reads.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, mode)


def read_regular_file(path: Path, max_bytes: int) -> bytes:
    """Return the bytes of a regular file. Raises OSError as `open_regular_file` does.

    Also raises OSError if the file is larger than `max_bytes`.
    """
    with BufferedReader(open_regular_file(path)) as file:
        contents = file.read(max_bytes + 1)
    if len(contents) > max_bytes:
        raise OSError(errno.EFBIG, f"is larger than {max_bytes:,} bytes")
    return contents


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a regular file in hex. Raises OSError as `open_regular_file` does."""
    with open_regular_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_json_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError if the text is anything else."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("is not a JSON object")
    return found


def in_brief(value: object) -> str:
    """Format an untrusted value as a short line of ASCII, for use in a message."""
    if isinstance(value, dict | list):
        return f"a {type(value).__name__}"
    if type(value) is int and value.bit_length() > _BRIEF:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to format a huge one
    if isinstance(value, str | bytes):
        value = value[: _BRIEF + 1]  # so that a long value is not formatted in full first
    return f"{value!a:.{_BRIEF}}"


def reading_error(path: Path, error: OSError, *, missing: str, remedy: str) -> DataError:
    """Return the error to raise for a file that could not be read.

    The error is a DataError if the file is missing or not a regular file of the allowed size, and
    otherwise an UnreadableError. `missing` is the problem to report for a missing file. `remedy`
    describes what the user can do if the error is a DataError.
    """
    if error.errno in _NOT_THERE:
        return DataError(str(path), missing, remedy)
    problem = error.strerror or "unknown error"
    if error.errno in _NO_SUCH_FILE:
        return DataError(str(path), problem, remedy)
    remedy = "check the file's permissions and its file system, and then try again"
    return UnreadableError(str(path), f"cannot be read ({problem})", remedy)


def is_there(path: Path) -> bool:
    """Return True if anything exists at this path, even a broken link. Raises UnreadableError."""
    return _seen(path, follows=False) is not None


def is_file(path: Path) -> bool:
    """Return True if `path` is a regular file or a link to one. Raises UnreadableError."""
    seen = _seen(path, follows=True)
    return seen is not None and S_ISREG(seen.st_mode)


def names_in(directory: Path) -> list[str]:
    """Return the sorted names of the entries of a directory, or [] if it does not exist.

    Raises UnreadableError if the directory cannot be read.
    """
    try:
        return sorted(os.listdir(directory))
    except OSError as error:
        if error.errno in _NOT_THERE:
            return []
        raise reading_error(directory, error, missing="", remedy="") from None


def _seen(path: Path, *, follows: bool) -> os.stat_result | None:
    try:
        return os.stat(path, follow_symlinks=follows)
    except OSError as error:
        if error.errno in _NOT_THERE:
            return None
        raise reading_error(path, error, missing="", remedy="") from None


def file_size(path: Path, remedy: str) -> int:
    """Return the size of a regular file in bytes. Raises DataError if there is no such file."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(str(path), error.strerror or "no such file", remedy) from None
    except ValueError:  # a name that no file system accepts
        raise DataError(repr(str(path)), "is not a valid file name", remedy) from None
    if not S_ISREG(status.st_mode):
        raise DataError(str(path), "is not a regular file", remedy)
    return status.st_size


def check_size(path: Path, size: int, remedy: str) -> None:
    """Raise DataError unless `path` is a regular file of `size` bytes. The file is not opened."""
    found = file_size(path, remedy)
    if found != size:
        raise _size_error(path, found, size, remedy)


def file_digest(path: Path, remedy: str) -> str:
    """Return the SHA-256 of a regular file in hex. Raises DataError if it cannot be read."""
    try:
        return file_sha256(path)
    except OSError as error:
        raise DataError(str(path), error.strerror or "cannot be read", remedy) from None


def check_digest(path: Path, sha256: str, remedy: str) -> None:
    """Raise DataError if the SHA-256 of a file differs from `sha256`, the manifest's value."""
    if file_digest(path, remedy) != sha256:
        raise digest_error(str(path), remedy)


def digest_error(where: str, remedy: str) -> DataError:
    """Return the error for a file whose SHA-256 differs from that in the manifest.

    `where` is the name of the file.
    """
    return DataError(where, "the file's SHA-256 differs from the one in the manifest", remedy)


def map_file(path: Path, size: int, remedy: str) -> mmap.mmap:
    """Map a regular file of `size` bytes into memory, read-only. `size` must be at least 1.

    Raises DataError if there is no such file, or if the file has another size.
    """
    try:
        with open_regular_file(path) as file:
            found = os.fstat(file.fileno()).st_size
            if found == size:
                return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DataError(str(path), error.strerror or "cannot be mapped", remedy) from None
    except ValueError:  # the file was truncated after its size was checked
        raise DataError(str(path), "cannot be mapped", remedy) from None
    raise _size_error(path, found, size, remedy)


def _size_error(path: Path, found: int, size: int, remedy: str) -> DataError:
    return DataError(str(path), f"has {found:,} bytes instead of {size:,}", remedy)


Parsed = TypeVar("Parsed")


def read_json(
    path: Path, *, missing: str, remedy: str, max_bytes: int = MAX_JSON_BYTES
) -> dict[str, Any]:
    """Read the file `path`, which must be a JSON object, and return that object.

    `missing` is the problem to report if there is no such file. `remedy` describes what the user
    can do about any problem with the file. Raises DataError if the file is missing, too large, not
    a regular file or not one JSON object. Raises UnreadableError if the file cannot be read.
    """
    try:
        return parse_json_object(read_regular_file(path, max_bytes))
    except OSError as error:
        raise reading_error(path, error, missing=missing, remedy=remedy) from None
    except ValueError as error:
        raise DataError(str(path), f"is not valid JSON ({error})", remedy) from None


@contextmanager
def reading(path: Path, remedy: str) -> Iterator[None]:
    """Convert an error of the with block about the contents of `path` into a DataError.

    A KeyError counts as a missing key. The text of another error, such as a ValueError, becomes the
    problem that the DataError reports.
    """
    try:
        yield
    except KeyError as error:
        raise DataError(str(path), f"has no key {error}", remedy) from None
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        raise DataError(str(path), str(error), remedy) from None


def parse(kind: type[Parsed], values: Mapping[str, Any], **found: Any) -> Parsed:
    """Build a dataclass instance from the values whose keys are names of its fields.

    `found` contains the fields that the caller has already converted. A field without a value gets
    its default, and other keys are ignored. Raises KeyError if a field has neither a value nor a
    default.
    """
    for field in fields(kind):  # type: ignore[arg-type]
        is_needed = field.default is MISSING and field.default_factory is MISSING
        if field.name not in found and (is_needed or field.name in values):
            found[field.name] = values[field.name]
    return kind(**found)


def check_version(values: Mapping[str, Any], *versions: int, key: str = "format_version") -> None:
    """Raise ValueError unless the version in `values` is one of `versions`.

    Raises KeyError if `values` has no version under `key`.
    """
    if values[key] not in versions:
        read = " or ".join(map(str, versions))
        raise ValueError(f"{key} is {in_brief(values[key])}, but this program reads {read}")


def bare_name(name: str) -> str:
    """Return `name` if it is a plain file name. Raises ValueError if it contains a directory."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{in_brief(name)} is not a file name without a directory")
    return name


def without_defaults(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` without the keys whose value is the default.

    A new key with a default therefore does not change existing files. Two files with the same
    meaning have the same bytes and digests, even if one of them was written before a key was added.
    """
    return {
        key: value for key, value in values.items() if key not in defaults or defaults[key] != value
    }


def write_json(values: Mapping[str, Any]) -> bytes:
    """Format values as indented JSON, with keys in the given order, and return the bytes."""
    return (json.dumps(values, indent=1, ensure_ascii=True) + "\n").encode("ascii")


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path, whose file is renamed to `path` on success and deleted on failure.

    The with block must create the file at the temporary path. Raises DataError if the file cannot
    be written.
    """
    temporary = _temporary(path)
    try:
        temporary.unlink(missing_ok=True)  # writing would follow a link of this name
        yield temporary
        # Without the flush, a power cut could leave the final name with incomplete contents.
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise _not_written(path, error) from error
    finally:
        with suppress(OSError):  # a directory that cannot be written may refuse the removal too
            temporary.unlink(missing_ok=True)


def write_file(path: Path, contents: bytes | memoryview) -> None:
    """Write or replace the file `path` atomically. Raises DataError if it cannot be written."""
    with replaced_file(path) as temporary, temporary.open("xb") as file:
        file.write(contents)


def check_writable(path: Path) -> None:
    """Create the directory of `path`. Raise DataError if `write_file` could not write `path` there.

    The file at `path` is not changed.
    """
    make_directory(path.parent)
    temporary = _temporary(path)
    try:
        temporary.unlink(missing_ok=True)
        temporary.touch(exist_ok=False)
        temporary.unlink()
    except OSError as error:
        raise _not_written(path, error) from error


def make_directory(path: Path) -> None:
    """Create a directory and its parents if they are missing. Raises DataError if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or "cannot be created"
        raise DataError(str(path), reason, "use a directory that you can write to") from error


def remove_temporaries(directory: Path, names: Collection[str]) -> None:
    """Delete temporary files that killed writers left in `directory`.

    The files are `.NAME.PID-MACHINE.tmp` for each NAME in `names`. The caller must ensure that no
    writer of these files is running on any machine.
    """
    for path in directory.glob(".*.tmp"):
        name, _, writer = path.stem.removeprefix(".").rpartition(".")
        if name in names and writer.partition("-")[0].isdecimal():
            path.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}-{_machine()}.tmp")


def _machine() -> str:
    """Return a short name for this machine.

    Temporary files need it because processes on two machines may have the same id.
    """
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _not_written(path: Path, error: OSError) -> DataError:
    reason = error.strerror or "cannot be written"
    return DataError(str(path), reason, "check the directory's permissions and the free disk space")


@contextmanager
def new_directory(path: Path, num_bytes: int) -> Iterator[Path]:
    """Yield a temporary directory, which is renamed to `path` on success and deleted on failure.

    `path` must be an empty directory, a link to one, or must not exist. `num_bytes` is the
    approximate number of bytes that the with block will write. Raises CheckpointError if `path` is
    a file, a non-empty directory or a mount point, if the disk has too little space, or if the
    directory cannot be written.
    """
    path = Path(os.path.realpath(path))
    try:
        if os.path.ismount(path):
            remedy = f"use a new directory inside it, such as {path / 'model'}"
            raise CheckpointError(str(path), "is a mount point, which cannot be replaced", remedy)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise CheckpointError(str(path), "already exists", "use a new directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(path.parent).free < num_bytes:
            problem = f"needs {num_bytes / 1e6:,.0f} MB, but the disk has less free space than that"
            raise CheckpointError(str(path), problem, "use a directory on another disk")
        with TemporaryDirectory(".partial", f".{path.name}.", path.parent) as private:
            partial = Path(private, path.name)
            partial.mkdir()  # so that others may read it, unlike a temporary directory
            yield partial
            partial.rename(path)
    except OSError as error:
        problem = f"cannot be written ({error.strerror or error})"
        raise CheckpointError(str(path), problem, NO_ROOM) from None


@contextmanager
def whole_or_nothing(file: int) -> Iterator[None]:
    """Undo an incomplete append to an open file if the with block raises an OSError.

    Without this, the next line would follow an incomplete one. `file` is the file's descriptor.
    """
    end = os.fstat(file).st_size
    try:
        yield
    except OSError:
        with suppress(OSError):
            os.ftruncate(file, end)
            os.lseek(file, end, os.SEEK_SET)
        raise


class LineFile:
    """A log file to which lines are appended. When `append` returns, the line is in the file.

    A line that cannot be written is dropped, so that a full disk does not stop the training. `warn`
    is called for the first dropped line, and again only after another line could be written.
    """

    def __init__(self, path: Path, warn: Callable[[str], None], *, continued: bool = False) -> None:
        """Create a new file, or open an existing file if `continued` is True.

        Raises ConfigError if the file cannot be opened.
        """
        self._path = path
        self._warn = warn
        try:
            mode = "a" if continued else "x"
            self._file = FileIO(path, mode, opener=not_through_a_link)
        except OSError as error:
            remedy = "use a run directory that you can write to"
            raise ConfigError(str(path), f"cannot be opened ({error.strerror})", remedy) from None
        self._file.seek(0, os.SEEK_END)
        self._is_failing = False

    def append(self, line: str) -> None:
        """Append `line` and a line end to the file."""
        contents = memoryview(f"{line}\n".encode())
        try:
            with whole_or_nothing(self._file.fileno()):
                while contents:
                    contents = contents[self._file.write(contents) :]
        except OSError as error:
            if not self._is_failing:
                self._warn(f"cannot write {self._path} ({error.strerror}); continuing without it")
            self._is_failing = True
        else:
            self._is_failing = False

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):
            self._file.close()
