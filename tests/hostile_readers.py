"""A reader for the sandbox that does what the file says, as a file that took over its reader."""

import ctypes
import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from mlperf_bert.prepare.sandbox import READ, STATUS


def obey(path: str) -> Iterator[bytes]:
    word = Path(path).read_text()
    yield from DEEDS[word](path)


def answer(path: str) -> Iterator[bytes]:
    yield b'{"path": '
    yield json.dumps(path).encode() + b"}"


def look_around(_: str) -> Iterator[bytes]:
    around = {
        "modules": sorted(sys.modules),
        "files": sorted(os.readlink(f"/proc/self/fd/{number}") for number in open_files()),
    }
    yield json.dumps(around).encode()


def open_files() -> list[str]:
    return [
        number for number in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{number}").exists()
    ]


def crash(_: str) -> Iterator[bytes]:
    yield b"{}" + STATUS.pack(READ)  # as if all had gone well
    ctypes.string_at(0)


def spin(_: str) -> Iterator[bytes]:
    while True:
        yield b""


def sleep(_: str) -> Iterator[bytes]:
    time.sleep(3600)
    yield b""


def grow(_: str) -> Iterator[bytes]:
    yield bytes(2**30)


def write(path: str) -> Iterator[bytes]:
    Path(path).with_suffix(".written").write_bytes(b"from the sandbox")
    yield b"{}"


def open_many(path: str) -> Iterator[bytes]:
    files = [os.open(path, os.O_RDONLY) for _ in range(64)]
    yield str(len(files)).encode()


def flood(_: str) -> Iterator[bytes]:
    while True:
        yield bytes(2**16)


def pour(_: str) -> Iterator[bytes]:
    for number in range(5):
        yield bytes([number]) * 2**20


def pour_and_spin(path: str) -> Iterator[bytes]:
    for piece in pour(path):
        yield piece
        end_s = time.process_time() + 0.4
        while time.process_time() < end_s:  # no more than may be until the next one
            pass
    while True:
        pass


def pour_and_fail(path: str) -> Iterator[bytes]:
    yield from pour(path)
    raise ValueError("the rest is missing")


def fail(_: str) -> Iterator[bytes]:
    yield b"half an answer"
    raise ValueError("odd\n\x1b[31m" + "x" * 5000)


def babble(_: str) -> Iterator[bytes]:
    yield b"\xff\x00no JSON"


class Trap:
    """Whoever unpickles it touches a file."""

    def __init__(self, path: str) -> None:
        self.touched = Path(path).with_suffix(".unpickled")

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.touched,)


def pickled(path: str) -> Iterator[bytes]:
    yield pickle.dumps(Trap(path))


def nest(_: str) -> Iterator[bytes]:
    yield b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}"


DEEDS: dict[str, Callable[[str], Iterator[bytes]]] = {
    deed.__name__: deed
    for deed in (
        answer,
        look_around,
        crash,
        spin,
        sleep,
        grow,
        write,
        open_many,
        flood,
        pour,
        pour_and_fail,
        pour_and_spin,
        fail,
        babble,
        pickled,
        nest,
    )
}
