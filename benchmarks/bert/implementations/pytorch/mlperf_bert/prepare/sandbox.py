"""Files that anybody may have written, read in a child process with limits: the asking side.

The reader, a function named "module:function", runs in a child of a small server process
(`sandbox_server.py`), one child a file. Whatever the file makes of the child, this process gets
the answer's bytes or raises a DataError; the library that reads the file is not even imported here.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.common.records import Record
from mlperf_bert.common.untrusted import file_size, parse_json_object
from mlperf_bert.prepare.sandbox_server import (
    BEFORE_ERROR,
    FAILED,
    LENGTH,
    OUT_OF_MEMORY,
    READ,
    STATUS,
    TIMED_OUT,
    TOO_MUCH,
    Limits,
)

# The path of modules is that of this process, so that a test's own reader is found as well.
_BOOT = (
    "import json, sys; path, *words = map(json.loads, sys.argv[1:]); sys.path[:] = path; "
    "from mlperf_bert.prepare.sandbox_server import serve; serve(*words)"
)
_GRACE_S = 30.0  # beyond the child's own time: for the server to start, on a busy machine
_WAITING = 128  # connections, one for each process that reads at the same time
_BLOCK_BYTES = 2**20
_ERROR_BYTES = 2**10  # of an answer that says why there is none
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A running server; can be sent to other processes of this machine, which may all ask at once.

    `address` is a socket that only this user can open.
    """

    address: str
    limits: Limits

    def read_bytes(self, path: Path, remedy: str) -> bytearray:
        """What the reader made of `path`, at most `limits.answer_bytes`.

        Raises DataError, with this remedy, where the file cannot be read, is no regular file, or
        makes its reader fail, crash, exceed a limit or say too much.
        """
        answer = bytearray()
        for piece in self.read_pieces(path, remedy):
            answer += piece
        return answer

    def read_pieces(self, path: Path, remedy: str) -> Iterator[bytearray]:
        """The same in pieces, as they come. An error may follow after some, also as `read_bytes`.

        A child that sends faster than this is asked waits, and its time goes on.
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
                    # What is last may be the words of an error, and a status.
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
        """The same where the answer is one JSON object. Raises DataError as `read_bytes`."""
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
            connection.sendall(LENGTH.pack(len(name)) + name)
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

    Args:
        reader: "module:function"; the function takes a path (str) and yields the answer in pieces
            (bytes-like). Its module must import nothing of torch: every child would carry it.
        limits: of each child; None: the defaults.

    Raises:
        ConfigError: the directory for temporary files cannot hold a socket.
    """
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="sandbox-") as directory:
        address = f"{directory}/socket"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            try:
                listener.bind(address)
            except OSError as error:
                remedy = "set TMPDIR to a short path on a local disk"
                raise ConfigError(directory, f"takes no socket ({error})", remedy) from None
            listener.listen(_WAITING)
            words = (sys.path, listener.fileno(), reader, asdict(limits))
            server = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *map(json.dumps, words)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # a process group of its own, and no Ctrl-C
            )
        try:
            yield Sandbox(address, limits)
        finally:
            server.communicate()  # closing its standard input ends it
