"""The fork server of `sandbox.py`, and what happens in its children. Only the standard library.

A connection asks for one file. A supervisor is forked for it, which forks the child that reads,
ends it when its time is over, and adds the child's exit status as the last bytes of the answer:
by then nobody else can write there.
"""

import importlib
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

LENGTH = struct.Struct("!I")  # before the path that is asked for
STATUS = struct.Struct("!i")  # after the answer: exit status, or minus the signal
READ, FAILED, OUT_OF_MEMORY, TOO_MUCH, TIMED_OUT = 0, 3, 4, 5, 6  # exit statuses
BEFORE_ERROR = b"\0"
_ERROR_CHARACTERS = 300

Reader = Callable[[str], Iterator[bytes | memoryview]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one child may use; a limit that the system does not have is left out."""

    memory_bytes: int = 2**30  # of address space, beyond what the server has
    cpu_seconds: int = 30
    piece_cpu_seconds: int = 30  # of these, until the next piece of the answer
    wall_seconds: int = 60
    answer_bytes: int = 2**20
    open_files: int = 16


def serve(descriptor: int, reader_name: str, limits: dict[str, Any]) -> None:
    """Fork a supervisor for each connection to a listening socket, until standard input ends."""
    os.putenv("OPENBLAS_NUM_THREADS", "1")  # numpy's; a process with threads cannot fork safely
    module, _, function = reader_name.partition(":")
    reader: Reader = getattr(importlib.import_module(module), function)
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
    os.killpg(0, signal.SIGKILL)  # this process too: nothing is left to be done


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
    path = os.fsdecode(_receive(connection, LENGTH.unpack(_receive(connection, LENGTH.size))[0]))
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


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        block = connection.recv(size - len(received))
        if not block:
            raise ConnectionError("the asking process is gone")
        received += block
    return received


def _close_others(connection: socket.socket) -> None:
    """Leave the child its connection alone; what libraries print goes nowhere."""
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
            # Where the user's own limit is lower, it stays.
            with suppress(ValueError, OSError):
                # SIGXCPU comes a second before SIGKILL, and tells which limit it was.
                hard = value + 1 if name == "RLIMIT_CPU" else value
                resource.setrlimit(getattr(resource, name), (value, hard))


def _give_time(limits: Limits) -> None:
    """Have SIGPROF end this process where its next piece takes too long, measured from now."""
    signal.setitimer(signal.ITIMER_PROF, limits.piece_cpu_seconds)


def _address_space_bytes() -> int:
    """What the child has before it reads anything; 0 where the system does not say (not Linux)."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[0])
    except OSError:
        return 0
    return pages * resource.getpagesize()
