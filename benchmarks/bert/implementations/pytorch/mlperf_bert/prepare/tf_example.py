"""TFRecord files of tf.train.Example messages, plain or gzip, to rows, with all checksums checked.

A record is its length (8 bytes, little endian), the masked CRC32C of these 8 bytes (4), its
contents, and their masked CRC32C (4). A length is used only if its checksum is right and it is at
most MOST_RECORD_BYTES.

Compiled code reads these parts of the message Example (protocol buffers): field 1, Features; in it
field 1, an entry of a map: key (field 1) and Feature (field 2); in a Feature a list of floats
(field 2) or of integers (field 3), packed or not. Other well-formed fields are skipped. Protocol
buffers let a later field of the same number replace or extend an earlier one; no writer does so,
and it is refused here.
"""

import gzip
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedIOBase, BufferedReader
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.common.compiled import compiled
from mlperf_bert.common.crc32c import masked_crc32c
from mlperf_bert.common.errors import DataError
from mlperf_bert.common.untrusted import open_regular_file
from mlperf_bert.prepare.foreign_rows import Rows
from mlperf_bert.prepare.hdf5_reader import ABSENT, FEATURES, LENGTHS, WEIGHTS

REMEDY = "get the file again: it is damaged, or no TFRecord file"
# An example of 65,535 tokens, the longest that a shard holds, has less than half of this.
MOST_RECORD_BYTES = 2**20
BLOCK_BYTES = 2**20
# Limit of all unpacked records, against gzip bombs. An official part has less than 2**30.
MOST_UNPACKED_BYTES = 2**36

_HEAD = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_LENGTH_BYTES = 8
_GZIP = b"\x1f\x8b\x08"  # read as the length of a record, this is over half a million
_READ_BYTES = 2**18

READ = FEATURES[:LENGTHS]
# Letters of each name [K, 32], and their number [K]; constants for the compiled code.
_LETTERS = np.array([list(name.encode("ascii").ljust(32)) for name in READ], np.uint8)
_LENGTHS = np.array([len(name) for name in READ])
RIGHT = 0
PROBLEMS = (
    "nothing",
    "is no tf.train.Example",
    "has a feature twice, or a feature of two lists",
    "has a number below zero or above 2**31 - 1",
    "has floats where integers belong",
    "has a weight other than 0 and 1",
)
MALFORMED, TWICE, BAD_NUMBER, FLOATS, BAD_WEIGHT = range(1, 6)
# Tags: field number * 8 + wire type.
_LEN = 2
_FIELD_1, _FIELD_2, _FIELD_3 = 8 | _LEN, 16 | _LEN, 24 | _LEN  # of bytes that follow their length
_ONE_INTEGER, _ONE_FLOAT = 8, 8 | 5
_FLOAT_BYTES, _DOUBLE_BYTES = 4, 8
_VARINT_BYTES = 10
_ONE_BITS = 0x3F800000  # 1.0


@dataclass(frozen=True, slots=True)
class RecordBlock:
    """Some records of a file, end to end: record i is `contents[ends[i] : ends[i + 1]]`."""

    first: int  # number of the first one in its file
    contents: NDArray[np.uint8]
    ends: NDArray[np.int64]  # [n + 1], from 0


def read_records(path: Path) -> Iterator[RecordBlock]:
    """Yield all records in blocks of about BLOCK_BYTES: memory does not depend on the file's size.

    Raises DataError if the file cannot be read, is cut short, differs from a checksum or has a
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


class Span(NamedTuple):
    """Bytes `start` .. `end` of a message; `start` is negative if there are none."""

    start: int
    end: int


def room_for_rows(num_records: int, num_bytes: int) -> Rows:
    """Rows with room for all values of the records, since a value takes at least one byte."""
    shape = (num_records, len(FEATURES))
    return Rows(
        np.empty(num_bytes, np.int32),
        np.zeros(shape, np.int64),
        np.full(shape, ABSENT, np.int64),
    )


@compiled
def parse_examples(
    contents: NDArray[np.uint8], ends: NDArray[np.int64], rows: Rows
) -> tuple[int, int]:
    """Fill `rows`, made by `room_for_rows`, from n messages laid end to end.

    `ends` [n + 1] begins with 0. Returns RIGHT and 0, or the problem of the first wrong message
    and its number.
    """
    used = 0
    for record in range(len(ends) - 1):
        message = Span(ends[record], ends[record + 1])
        features, problem = _only_field(contents, message, _FIELD_1)
        if problem != RIGHT:
            return problem, record
        if features.start < 0:
            continue
        used, problem = _parse_features(contents, features, rows, record, used)
        if problem != RIGHT:
            return problem, record
    return RIGHT, 0


@compiled
def _parse_features(
    contents: NDArray[np.uint8], features: Span, rows: Rows, record: int, used: int
) -> tuple[int, int]:
    """Read the entries of the map, after `used` earlier values. Returns `used`, problem."""
    at = features.start
    while at < features.end:
        tag, value, at = _field(contents, at, features.end)
        if at < 0:
            return used, MALFORMED
        if tag != _FIELD_1:
            continue
        key, problem = _only_field(contents, value, _FIELD_1)
        if problem != RIGHT:
            return used, problem
        feature, problem = _only_field(contents, value, _FIELD_2)
        if problem != RIGHT:
            return used, problem
        number = _number_of(contents, key)
        if number < 0:
            continue
        if rows.counts[record, number] != ABSENT:
            return used, TWICE
        rows.starts[record, number] = used
        used, problem = _parse_feature(contents, feature, rows.values, used, number == WEIGHTS)
        rows.counts[record, number] = used - rows.starts[record, number]
        if problem != RIGHT:
            return used, problem
    return used, RIGHT


@compiled
def _parse_feature(
    contents: NDArray[np.uint8],
    feature: Span,
    values: NDArray[np.int32],
    used: int,
    is_weight: bool,
) -> tuple[int, int]:
    """Read the list of a Feature, if it has one. Returns `used`, problem."""
    if feature.start < 0:
        return used, RIGHT
    floats, problem = _only_field(contents, feature, _FIELD_2)
    if problem != RIGHT:
        return used, problem
    integers, problem = _only_field(contents, feature, _FIELD_3)
    if problem != RIGHT:
        return used, problem
    if floats.start >= 0 and integers.start >= 0:
        return used, TWICE
    if floats.start >= 0:
        if not is_weight:
            return used, FLOATS
        return _parse_floats(contents, floats, values, used)
    if integers.start >= 0:
        return _parse_integers(contents, integers, values, used)
    return used, RIGHT


@compiled
def _parse_integers(
    contents: NDArray[np.uint8], integers: Span, values: NDArray[np.int32], used: int
) -> tuple[int, int]:
    """Append the values of an Int64List. Returns `used`, problem."""
    at = integers.start
    while at < integers.end:
        if contents[at] == _ONE_INTEGER:
            inner = Span(at + 1, _after_varint(contents, at + 1, integers.end))
            at = inner.end
        else:
            tag, inner, at = _field(contents, at, integers.end)
            if at >= 0 and tag != _FIELD_1:
                continue
        if at < 0:
            return used, MALFORMED
        place = inner.start
        while place < inner.end:
            value, after = _varint(contents, place, inner.end)
            if after < 0:
                is_whole = _after_varint(contents, place, inner.end) >= 0
                return used, BAD_NUMBER if is_whole else MALFORMED
            values[used] = value
            used += 1
            place = after
    return used, RIGHT


@compiled
def _parse_floats(
    contents: NDArray[np.uint8], floats: Span, values: NDArray[np.int32], used: int
) -> tuple[int, int]:
    """Append the values of a FloatList, all of which are 0 or 1. Returns `used`, problem."""
    at = floats.start
    while at < floats.end:
        if contents[at] == _ONE_FLOAT:
            inner = Span(at + 1, at + 1 + _FLOAT_BYTES)
            at = inner.end if inner.end <= floats.end else -1
        else:
            tag, inner, at = _field(contents, at, floats.end)
            if at >= 0 and tag != _FIELD_1:
                continue
        if at < 0 or (inner.end - inner.start) % _FLOAT_BYTES:
            return used, MALFORMED
        for place in range(inner.start, inner.end, _FLOAT_BYTES):
            bits = 0
            for i in range(_FLOAT_BYTES):
                bits |= int(contents[place + i]) << 8 * i
            if bits not in (0, _ONE_BITS):
                return used, BAD_WEIGHT
            values[used] = bits == _ONE_BITS
            used += 1
    return used, RIGHT


@compiled
def _only_field(contents: NDArray[np.uint8], message: Span, wanted: int) -> tuple[Span, int]:
    """The value of the field with this tag in a message, and the problem; it must occur once."""
    found = Span(-1, -1)
    at = message.start
    while 0 <= at < message.end:
        tag, value, at = _field(contents, at, message.end)
        if at < 0:
            return found, MALFORMED
        if tag == wanted:
            if found.start >= 0:
                return found, TWICE
            found = value
    return found, RIGHT


@compiled
def _field(contents: NDArray[np.uint8], at: int, end: int) -> tuple[int, Span, int]:
    """Tag and value of the field at `at`, and the place after it; -1 if it is malformed.

    Fields that begin with their length have a span as value; other fields are skipped.
    """
    nothing = Span(-1, -1)
    tag, at = _varint(contents, at, end)
    if at < 0 or tag < 8:
        return 0, nothing, -1
    wire_type = tag & 7
    if wire_type == _LEN:
        length, at = _varint(contents, at, end)
        if at < 0 or length > end - at:
            return tag, nothing, -1
        return tag, Span(at, at + length), at + length
    if wire_type == 0:
        return tag, nothing, _after_varint(contents, at, end)
    if wire_type in (1, 5):
        after = at + (_DOUBLE_BYTES if wire_type == 1 else _FLOAT_BYTES)
        return tag, nothing, after if after <= end else -1
    return tag, nothing, -1  # groups, which no writer uses any more


@compiled
def _varint(contents: NDArray[np.uint8], at: int, end: int) -> tuple[int, int]:
    """An integer of 0 .. 2**31 - 1, and the place after it; -1 if there is none."""
    value = 0
    for i in range(min(5, end - at)):
        byte = int(contents[at + i])
        value |= (byte & 127) << 7 * i
        if byte < 128:
            return value, at + i + 1 if value < 2**31 else -1
    return 0, -1


@compiled
def _after_varint(contents: NDArray[np.uint8], at: int, end: int) -> int:
    """The place after an integer of any size; -1 if it does not end."""
    for i in range(min(_VARINT_BYTES, end - at)):
        if contents[at + i] < 128:
            return at + i + 1
    return -1


@compiled
def _number_of(contents: NDArray[np.uint8], key: Span) -> int:
    """The number of the feature with this name; -1 if the feature is not used."""
    length = key.end - key.start if key.start >= 0 else 0
    for number in range(len(_LENGTHS)):
        if _LENGTHS[number] != length:
            continue
        same = True
        for i in range(length):
            same &= contents[key.start + i] == _LETTERS[number, i]
        if same:
            return number
    return -1
