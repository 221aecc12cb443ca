"""Untrusted files read in a child process with limits.

The reader, a function named "module:function" or "module:function:word", runs in a child of a small
server process, one child per file. Whatever the file does to the child, the asking process gets the
answer's bytes or raises a DataError; it does not even import the library that reads the file.

A connection asks for one file. The server forks a supervisor for it. The supervisor forks the
reading child, ends it when its time is over, and appends the child's exit status to the answer; by
then nobody else can write there. Nothing from the child is unpickled.
"""

import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.common.records import Record
from mlperf_bert.common.untrusted import file_size, parse_json_object

STATUS = struct.Struct("!i")  # after the answer: exit status, or minus the signal
READ, FAILED, OUT_OF_MEMORY, TOO_MUCH, TIMED_OUT = 0, 3, 4, 5, 6  # exit statuses
BEFORE_ERROR = b"\0"
_ERROR_CHARACTERS = 300

# The server gets this process's module path, so that it finds a test's own reader too.
_BOOT = (
    "import json, sys; path, *words = map(json.loads, sys.argv[1:]); sys.path[:] = path; "
    "from mlperf_bert.prepare.sandbox import serve; serve(*words)"
)
# A process with threads cannot fork safely, and reserved address space counts as memory.
_OF_LIBRARIES = (
    ("OPENBLAS_NUM_THREADS", "1"),  # numpy's
    ("JE_ARROW_MALLOC_CONF", "background_thread:false"),  # pyarrow's, like the next
    ("ARROW_DEFAULT_MEMORY_POOL", "system"),
)
_GRACE_S = 30.0  # beyond the child's own time: the server's start on a busy machine
_WAITING = 128  # connections, one for each process that reads at the same time
_BLOCK_BYTES = 2**20
_ERROR_BYTES = 2**10  # limit of an answer that reports an error
_MIB = 2**20


Reader = Callable[[str], Iterator[bytes | memoryview]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of one child; a limit that the system does not support is left out."""

    memory_bytes: int = 2**30  # of address space, beyond the server's own
    cpu_seconds: int = 30
    piece_cpu_seconds: int = 30  # part of it until the next piece of the answer
    wall_seconds: int = 60
    answer_bytes: int = 2**20
    open_files: int = 16


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A running server; processes of this machine that it is sent to may all ask at once.

    `address` is a socket that only this user can open.
    """

    address: str
    limits: Limits

    def read_bytes(self, path: Path, remedy: str) -> bytearray:
        """The reader's answer for `path`, at most `limits.answer_bytes`.

        Raises DataError, with this remedy, if the file cannot be read, is no regular file, or makes
        its reader fail, crash, exceed a limit or answer too much.
        """
        answer = bytearray()
        for piece in self.read_pieces(path, remedy):
            answer += piece
        return answer

    def read_pieces(self, path: Path, remedy: str) -> Iterator[bytearray]:
        """Yield the answer in pieces as they come. It raises like `read_bytes`, at any piece.

        A child that sends faster than the caller reads must wait, and its time runs on.
        """
        file_size(path, remedy)
        num_bytes, held = 0, bytearray()
        try:
            with closing(self._ask(os.fsencode(os.path.abspath(path)))) as blocks:
                for block in blocks:
                    num_bytes += len(block)
                    if num_bytes > self.limits.answer_bytes + _ERROR_BYTES:
                        raise DataError(str(path), self._in_words(TOO_MUCH, held), remedy)
                    held += block
                    # The last bytes may be an error message and a status.
                    if len(held) > _BLOCK_BYTES:
                        yield held[:-_ERROR_BYTES]
                        del held[:-_ERROR_BYTES]
        except OSError as error:
            problem = f"was not read: its reader process does not answer ({error})"
            raise DataError(str(path), problem, remedy) from None
        if len(held) < STATUS.size:
            raise DataError(str(path), "was not read: its reader process is gone", remedy)
        (status,) = STATUS.unpack(held[-STATUS.size :])
        del held[-STATUS.size :]
        if status != READ:
            raise DataError(str(path), self._in_words(status, held), remedy)
        yield held

    def read_record(self, path: Path, remedy: str) -> Record:
        """Read an answer that is one JSON object. Raises DataError like `read_bytes`."""
        try:
            values = parse_json_object(bytes(self.read_bytes(path, remedy)))
        except ValueError as error:
            problem = f"makes its reader process answer no JSON object ({error})"
            raise DataError(str(path), problem, remedy) from None
        return Record(str(path), values, remedy)

    def _ask(self, name: bytes) -> Generator[bytes, None, None]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(self.limits.wall_seconds + _GRACE_S)
            connection.connect(self.address)
            connection.sendall(name)
            connection.shutdown(socket.SHUT_WR)
            while block := connection.recv(_BLOCK_BYTES):
                yield block

    def _in_words(self, status: int, answer: bytearray) -> str:
        limits = self.limits
        if status == FAILED:
            text = answer.rpartition(BEFORE_ERROR)[2].decode("ascii", "replace")
            return f"cannot be read ({text})"
        known = {
            OUT_OF_MEMORY: f"needs more than {limits.memory_bytes // _MIB} MiB to be read",
            TOO_MUCH: f"makes its reader answer more than {limits.answer_bytes:,} bytes",
            TIMED_OUT: f"was not read within {limits.wall_seconds} s",
            -signal.SIGXCPU: f"was not read within {limits.cpu_seconds} s of processor time",
            -signal.SIGPROF: f"takes its reader {limits.piece_cpu_seconds} s of processor time at "
            "one place",
        }
        if status in known:
            return known[status]
        cause = f"status {status}"
        if status < 0:
            with suppress(ValueError):
                cause = signal.Signals(-status).name
        return f"ends its reader process with {cause}"


@contextmanager
def sandbox(reader: str, limits: Limits | None = None) -> Iterator[Sandbox]:
    """Start a server, and end it with all its children when the context is left.

    `reader` is "module:function", which takes a path (str) and yields the answer in pieces
    (bytes-like), or "module:function:word", which takes the word first. Its module must not import
    torch, because every child would hold it in memory. `limits` apply to each child. Raises
    ConfigError if the directory for temporary files does not support sockets.
    """
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="sandbox-") as directory:
        address = f"{directory}/socket"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            try:
                listener.bind(address)
            except OSError as error:
                remedy = "set TMPDIR to a short path on a local disk"
                raise ConfigError(directory, f"cannot hold a socket ({error})", remedy) from None
            listener.listen(_WAITING)
            words = (sys.path, listener.fileno(), reader, asdict(limits))
            server = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, *map(json.dumps, words)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # a process group of its own, and no Ctrl-C
            )
        try:
            yield Sandbox(address, limits)
        finally:
            server.communicate()  # closing its standard input ends it


def serve(descriptor: int, reader_name: str, limits: dict[str, Any]) -> None:
    """Fork a supervisor for each connection to a listening socket, until standard input ends."""
    for setting in _OF_LIBRARIES:
        os.putenv(*setting)
    module, function, *words = reader_name.split(":", 2)
    reader: Reader = partial(getattr(importlib.import_module(module), function), *words)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors are reaped by the system
    owner = sys.stdin.fileno()
    with socket.socket(fileno=descriptor) as listener:
        while owner not in (ready := select.select([listener, owner], [], [])[0]):
            assert ready
            with suppress(ConnectionError):
                connection, _ = listener.accept()
                if os.fork() == 0:
                    listener.close()
                    _supervise(connection, reader, Limits(**limits))
                connection.close()
    os.killpg(0, signal.SIGKILL)  # end this process too: nothing is left to do


def _supervise(connection: socket.socket, reader: Reader, limits: Limits) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        status = FAILED
        try:
            status = _answer(connection, reader, limits)
        finally:
            os._exit(status)
    is_late = False

    def end(*_: object) -> None:
        nonlocal is_late
        is_late = True
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, end)
    signal.alarm(limits.wall_seconds)
    _, wait_status = os.waitpid(child, 0)
    signal.alarm(0)
    status = TIMED_OUT if is_late else os.waitstatus_to_exitcode(wait_status)
    with suppress(OSError):
        connection.sendall(STATUS.pack(status))
    os._exit(0)


def _answer(connection: socket.socket, reader: Reader, limits: Limits) -> int:
    """Read the file that `connection` asks for, and send the answer; returns the exit status."""
    path = os.fsdecode(b"".join(iter(lambda: connection.recv(_BLOCK_BYTES), b"")))
    _close_others(connection)
    _set_limits(limits)
    sent = 0
    try:
        _give_time(limits)
        for piece in reader(path):
            sent += memoryview(piece).nbytes
            if sent > limits.answer_bytes:
                return TOO_MUCH
            connection.sendall(piece)
            _give_time(limits)
    except MemoryError:
        return OUT_OF_MEMORY
    except Exception as error:
        text = ascii(str(error))[1:-1] or type(error).__name__
        connection.sendall(BEFORE_ERROR + text[:_ERROR_CHARACTERS].encode("ascii"))
        return FAILED
    return READ


def _close_others(connection: socket.socket) -> None:
    """Leave the child only its connection; output of libraries is discarded."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    own = connection.fileno()
    os.closerange(3, own)
    os.closerange(own + 1, max(own, nowhere) + 64)


def _set_limits(limits: Limits) -> None:
    soft_and_hard = {
        "RLIMIT_AS": limits.memory_bytes + _address_space_bytes(),
        "RLIMIT_CPU": limits.cpu_seconds,
        "RLIMIT_FSIZE": 0,
        "RLIMIT_CORE": 0,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_NPROC": 0,
    }
    for name, value in soft_and_hard.items():
        if hasattr(resource, name):
            # A lower limit of the user stays.
            with suppress(ValueError, OSError):
                # SIGXCPU comes a second before SIGKILL, and tells which limit it was.
                hard = value + 1 if name == "RLIMIT_CPU" else value
                resource.setrlimit(getattr(resource, name), (value, hard))


def _give_time(limits: Limits) -> None:
    """Let SIGPROF end this process if its next piece takes too long, measured from now."""
    signal.setitimer(signal.ITIMER_PROF, limits.piece_cpu_seconds)


def _address_space_bytes() -> int:
    """The child's address space before it reads; 0 if the system does not say (not Linux)."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[0])
    except OSError:
        return 0
    return pages * resource.getpagesize()
