"""Files: read without waiting or trusting, and written so that nothing is left half-written.

Reading takes bounded regular files and JSON objects. Nothing waits on a pipe or reads a device in a
file's place, and a missing file is told apart from a failing file system, where pathlib answers
"no" to some failures and raises at others. A prepared set, a run and a checkpoint of one's own are
trusted as far as their digests go.

Temporary files and directories are renamed when they are complete, and lines are written whole.
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
from typing import Any, TypeVar

from mlperf_bert.errors import CheckpointError, ConfigError, DataError, UnreadableError

MAX_JSON_BYTES = 8 * 2**20  # a manifest of 5,000 shards has 1.3 MB, a log or a sidecar far less
_BRIEF = 60
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR)
_NO_SUCH_FILE = (errno.EINVAL, errno.EFBIG)  # this file's message for other kinds of files
NO_ROOM = "check the disk's free space and that it can be written"


def open_regular_file(path: Path) -> FileIO:
    """Open a file for reading, unbuffered, without waiting on a pipe in its place.

    Raises OSError, whose `strerror` says what is wrong, for anything but a regular file;
    FileNotFoundError if there is no file.
    """
    try:
        # Opening a pipe without a writer would block, and a terminal must not become ours.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except ValueError:  # a zero byte, or characters outside the file system's encoding
        raise OSError(errno.EINVAL, "is no name of a file") from None
    if S_ISREG(os.fstat(descriptor).st_mode):
        return FileIO(descriptor)
    os.close(descriptor)
    raise OSError(errno.EINVAL, "is not a regular file")


def not_through_a_link(path: str, flags: int, mode: int = 0o666) -> int:
    """Open a file for writing, as `opener` of `open`, without waiting on a pipe in its place.

    Raises OSError (ELOOP, ENXIO) for a symbolic link, and for a pipe that nobody reads.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, mode)


def read_regular_file(path: Path, max_bytes: int) -> bytes:
    """The contents of a regular file of at most `max_bytes`. Raises OSError, as opening does."""
    with BufferedReader(open_regular_file(path)) as file:
        contents = file.read(max_bytes + 1)
    if len(contents) > max_bytes:
        raise OSError(errno.EFBIG, f"has more than {max_bytes:,} bytes")
    return contents


def file_sha256(path: Path) -> str:
    """The digest of a regular file of any size, in hex. Raises OSError, as opening it does."""
    with open_regular_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_json_object(text: str | bytes) -> dict[str, Any]:
    """Parse one JSON object. Raises ValueError for anything else."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("is not a JSON object")
    return found


def in_brief(value: object) -> str:
    """An untrusted value for a message: always one short line of ASCII."""
    if isinstance(value, dict | list):
        return f"a {type(value).__name__}"
    if type(value) is int and value.bit_length() > _BRIEF:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to write a huge one
    if isinstance(value, str | bytes):
        value = value[: _BRIEF + 1]  # so that a long value is not written out in full first
    return f"{value!a:.{_BRIEF}}"


def reading_error(path: Path, error: OSError, *, missing: str, remedy: str) -> DataError:
    """The error for a file that was not read: UnreadableError, unless the file is to blame.

    `missing` is the problem if there is no such file, `remedy` what to do about a file that is
    missing or of the wrong kind.
    """
    if error.errno in _NOT_THERE:
        return DataError(str(path), missing, remedy)
    problem = error.strerror or "fails"
    if error.errno in _NO_SUCH_FILE:
        return DataError(str(path), problem, remedy)
    remedy = "check its permissions and its file system, then try again"
    return UnreadableError(str(path), f"cannot be read ({problem})", remedy)


def is_there(path: Path) -> bool:
    """True if there is anything, even a broken link. Raises UnreadableError."""
    return _seen(path, follows=False) is not None


def is_file(path: Path) -> bool:
    """True if there is a regular file, or a link to one. Raises UnreadableError."""
    seen = _seen(path, follows=True)
    return seen is not None and S_ISREG(seen.st_mode)


def names_in(directory: Path) -> list[str]:
    """Sorted names of a directory's entries; none if it is missing.

    Raises UnreadableError.
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
    """Bytes of a regular file. Raises DataError for anything else, a pipe or a device too."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(str(path), error.strerror or "is missing", remedy) from None
    except ValueError:  # a name that no file system accepts
        raise DataError(repr(str(path)), "is no file name", remedy) from None
    if not S_ISREG(status.st_mode):
        raise DataError(str(path), "is not a regular file", remedy)
    return status.st_size


def check_size(path: Path, size: int, remedy: str) -> None:
    """Raise DataError unless the file is a regular one of `size` bytes; it is not opened."""
    found = file_size(path, remedy)
    if found != size:
        raise _size_error(path, found, size, remedy)


def file_digest(path: Path, remedy: str) -> str:
    """The sha256 of a regular file. Raises DataError when it cannot be read."""
    try:
        return file_sha256(path)
    except OSError as error:
        raise DataError(str(path), error.strerror or "cannot be read", remedy) from None


def check_digest(path: Path, sha256: str, remedy: str) -> None:
    """Raise DataError if the file is not the one that the manifest names."""
    if file_digest(path, remedy) != sha256:
        raise digest_error(str(path), remedy)


def digest_error(where: str, remedy: str) -> DataError:
    """The error for a file that is not the one that the manifest names."""
    return DataError(where, "is not the file that the manifest names (its sha256 differs)", remedy)


def map_file(path: Path, size: int, remedy: str) -> mmap.mmap:
    """Map a regular file of `size` bytes, one or more, read-only. Raises DataError if it is not."""
    try:
        with open_regular_file(path) as file:
            found = os.fstat(file.fileno()).st_size
            if found == size:
                return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DataError(str(path), error.strerror or "cannot be mapped", remedy) from None
    except ValueError:  # truncated since its size was checked
        raise DataError(str(path), "cannot be mapped", remedy) from None
    raise _size_error(path, found, size, remedy)


def _size_error(path: Path, found: int, size: int, remedy: str) -> DataError:
    return DataError(str(path), f"is {found} bytes where {size} belong", remedy)


Parsed = TypeVar("Parsed")


def read_json(path: Path, *, missing: str, remedy: str) -> dict[str, Any]:
    """Parse the JSON object in `path`.

    `missing` is the problem to report when there is no such file, `remedy` what the user can do
    about any problem with it. Raises DataError if it is missing, no regular file, too large, or not
    one JSON object; UnreadableError if it cannot be read.
    """
    try:
        return parse_json_object(read_regular_file(path, MAX_JSON_BYTES))
    except OSError as error:
        raise reading_error(path, error, missing=missing, remedy=remedy) from None
    except ValueError as error:
        raise DataError(str(path), f"is not valid JSON ({error})", remedy) from None


@contextmanager
def reading(path: Path, remedy: str) -> Iterator[None]:
    """Within it, a missing key or an unfit value becomes a DataError that names the file.

    A ValueError says in its own words what is wrong.
    """
    try:
        yield
    except KeyError as error:
        raise DataError(str(path), f"has no key {error}", remedy) from None
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        raise DataError(str(path), str(error), remedy) from None


def parse(kind: type[Parsed], values: Mapping[str, Any], **found: Any) -> Parsed:
    """Build a dataclass from the keys of its fields; `found` gives fields that need conversion.

    A missing key has the field's default, other keys are left out. Raises KeyError.
    """
    for field in fields(kind):  # type: ignore[arg-type]
        is_needed = field.default is MISSING and field.default_factory is MISSING
        if field.name not in found and (is_needed or field.name in values):
            found[field.name] = values[field.name]
    return kind(**found)


def check_version(values: Mapping[str, Any], *versions: int, key: str = "format_version") -> None:
    """Raise ValueError for a version other than these, KeyError for none."""
    if values[key] not in versions:
        read = " or ".join(map(str, versions))
        raise ValueError(f"{key} is {in_brief(values[key])}, this program reads {read}")


def bare_name(name: str) -> str:
    """The same name, if it leads nowhere else than into its directory. Raises ValueError."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{in_brief(name)} is not a bare file name")
    return name


def without_defaults(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`values` without keys at their default, so that new keys do not change old files.

    Files with the same meaning, written before and after a key was added, are equal byte by byte
    and have equal digests.
    """
    return {
        key: value for key, value in values.items() if key not in defaults or defaults[key] != value
    }


def write_json(values: Mapping[str, Any]) -> bytes:
    """JSON in the form of prepared sets: indented, keys in the given order."""
    return (json.dumps(values, indent=1, ensure_ascii=True) + "\n").encode("ascii")


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; it is renamed to `path` on success, deleted on failure.

    Raises DataError when the file cannot be written.
    """
    temporary = _beside(path)
    try:
        temporary.unlink(missing_ok=True)  # a link at this name would be written through
        yield temporary
        # Without the flush a power cut could leave a complete name over incomplete contents.
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise _not_written(path, error) from error
    finally:
        with suppress(OSError):  # a place that cannot be written may refuse the removal too
            temporary.unlink(missing_ok=True)


def write_file(path: Path, contents: bytes | memoryview) -> None:
    """Write or replace `path` in one step. Raises DataError when it cannot be written."""
    with replaced_file(path) as temporary, temporary.open("xb") as file:
        file.write(contents)


def check_writable(path: Path) -> None:
    """Check that `write_file` could write `path`, without changing it. Raises DataError."""
    temporary = _beside(path)
    try:
        temporary.unlink(missing_ok=True)
        temporary.touch(exist_ok=False)
        temporary.unlink()
    except OSError as error:
        raise _not_written(path, error) from error


def make_directory(path: Path) -> None:
    """Create a directory and its parents. Raises DataError when that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or "cannot be created"
        raise DataError(str(path), reason, "name a directory that can be written") from error


def remove_temporaries(directory: Path, names: Collection[str]) -> None:
    """Remove temporary files of killed writers, `.NAME.PID-MACHINE.tmp` of a NAME in `names`.

    No writer of these files may be running, on any machine.
    """
    for path in directory.glob(".*.tmp"):
        name, _, writer = path.stem.removeprefix(".").rpartition(".")
        if name in names and writer.partition("-")[0].isdecimal():
            path.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}-{_machine()}.tmp")


def _machine() -> str:
    """A name for this machine, since processes of two machines may have equal ids."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _not_written(path: Path, error: OSError) -> DataError:
    reason = error.strerror or "cannot be written"
    return DataError(str(path), reason, "check the directory and its free space")


@contextmanager
def new_directory(path: Path, num_bytes: int) -> Iterator[Path]:
    """Yield a directory to fill; it is renamed to `path` on success, deleted on failure.

    `path` must be absent or an empty directory; about `num_bytes` will be written. Raises
    CheckpointError if `path` is taken or cannot be written.
    """
    path = Path(os.path.abspath(path))
    beside = path.with_name(f".{path.name or 'out'}.{os.getpid()}.partial")
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise CheckpointError(str(path), "is there already", "name a new directory")
        beside.mkdir(parents=True)
        if shutil.disk_usage(beside).free < num_bytes:
            problem = f"needs {num_bytes / 1e6:,.0f} MB, the disk has less"
            raise CheckpointError(str(path), problem, "name a directory elsewhere")
        yield beside
        beside.rename(path)
    except OSError as error:
        problem = f"cannot be written ({error.strerror or error})"
        raise CheckpointError(str(path), problem, NO_ROOM) from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@contextmanager
def whole_or_nothing(file: int) -> Iterator[None]:
    """Undo a failed append to an open file.

    The next line would otherwise continue half a line. Raises the body's OSError.
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
    """Appends whole lines; each is in the file when `append` returns.

    A line that cannot be written is dropped, because training is worth more than its log. `warn` is
    called for the first dropped line, and again only after a line was written.
    """

    def __init__(self, path: Path, warn: Callable[[str], None], *, continued: bool = False) -> None:
        """Open a new file, or an existing one if `continued`.

        Raises ConfigError if that fails.
        """
        self._path = path
        self._warn = warn
        try:
            mode = "a" if continued else "x"
            self._file = FileIO(path, mode, opener=not_through_a_link)
        except OSError as error:
            remedy = "give a run directory that you can write to"
            raise ConfigError(str(path), f"cannot be opened ({error.strerror})", remedy) from None
        self._file.seek(0, os.SEEK_END)
        self._is_failing = False

    def append(self, line: str) -> None:
        """Write a line; the line end is added."""
        contents = memoryview(f"{line}\n".encode())
        try:
            with whole_or_nothing(self._file.fileno()):
                while contents:
                    contents = contents[self._file.write(contents) :]
        except OSError as error:
            if not self._is_failing:
                self._warn(f"{self._path} cannot be written ({error.strerror}): going on without")
            self._is_failing = True
        else:
            self._is_failing = False

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):
            self._file.close()
