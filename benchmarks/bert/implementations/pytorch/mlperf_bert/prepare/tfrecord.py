"""TFRecord files, plain or gzip: their records in blocks, every checksum compared.

A record is its length (8 bytes, little endian), the masked CRC32C of these 8 bytes (4), its
contents, and their masked CRC32C (4). No length is believed before its checksum is right, and none
above MOST_RECORD_BYTES at all.
"""

import gzip
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedIOBase, BufferedReader
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.common.crc32c import masked_crc32c
from mlperf_bert.common.errors import DataError
from mlperf_bert.common.untrusted import open_regular_file

REMEDY = "get the file again: it is damaged, or no TFRecord file"
# One example of 65,535 tokens, the longest that a shard holds, has a third of it.
MOST_RECORD_BYTES = 2**20
BLOCK_BYTES = 2**20
# All records of a file, which gzip can make of little. An official part has less than 2**30.
MOST_UNPACKED_BYTES = 2**36

_HEAD = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_LENGTH_BYTES = 8
_GZIP = b"\x1f\x8b\x08"  # as the length of a record, that is over half a million
_READ_BYTES = 2**18


@dataclass(frozen=True, slots=True)
class RecordBlock:
    """Some records of a file, end to end: record i is `contents[ends[i] : ends[i + 1]]`."""

    first: int  # number of the first one in its file
    contents: NDArray[np.uint8]
    ends: NDArray[np.int64]  # [n + 1], from 0


def read_records(path: Path) -> Iterator[RecordBlock]:
    """All records, in blocks of about BLOCK_BYTES: memory does not depend on the file's size.

    Raises DataError where the file cannot be read, is cut short, differs from a checksum or has a
    record of more than MOST_RECORD_BYTES.
    """
    with _opened(path) as file:
        first, block, ends = 0, bytearray(), [0]
        for record in _records(path, file):
            block += record
            ends.append(len(block))
            if len(block) >= BLOCK_BYTES:
                yield _block(first, block, ends)
                first, block, ends = first + len(ends) - 1, bytearray(), [0]
        if len(ends) > 1:
            yield _block(first, block, ends)


def _block(first: int, block: bytearray, ends: list[int]) -> RecordBlock:
    return RecordBlock(first, np.frombuffer(block, np.uint8), np.array(ends, dtype=np.int64))


def _records(path: Path, file: BufferedIOBase) -> Iterator[bytes]:
    number, unpacked = 0, 0
    while head := file.read(_HEAD.size):
        if len(head) < _HEAD.size:
            _refuse(path, number, "is cut short")
        length, checksum = _HEAD.unpack(head)
        if masked_crc32c(head[:_LENGTH_BYTES]) != checksum:
            _refuse(path, number, "has a length that differs from its checksum")
        if length > MOST_RECORD_BYTES:
            _refuse(path, number, f"has {length:,} bytes, at most {MOST_RECORD_BYTES:,} are read")
        rest = file.read(length + _CHECKSUM.size)
        if len(rest) < length + _CHECKSUM.size:
            _refuse(path, number, "is cut short")
        record = rest[:length]
        if masked_crc32c(record) != _CHECKSUM.unpack(rest[length:])[0]:
            _refuse(path, number, "has contents that differ from their checksum")
        yield record
        number += 1
        unpacked += len(head) + len(rest)
        if unpacked > MOST_UNPACKED_BYTES:
            _refuse(path, number, f"begins after {MOST_UNPACKED_BYTES:,} bytes, where it ends")


@contextmanager
def _opened(path: Path) -> Iterator[BufferedIOBase]:
    try:
        with BufferedReader(open_regular_file(path), _READ_BYTES) as file:
            if file.peek(len(_GZIP)).startswith(_GZIP):
                with BufferedReader(gzip.GzipFile(fileobj=file), _READ_BYTES) as unpacked:
                    yield unpacked
            else:
                yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(str(path), f"cannot be unpacked as gzip ({error})", REMEDY) from None
    except OSError as error:
        raise DataError(str(path), error.strerror or "cannot be read", REMEDY) from None


def _refuse(path: Path, number: int, problem: str) -> NoReturn:
    raise DataError(f"{path}: record {number}", problem, REMEDY)
