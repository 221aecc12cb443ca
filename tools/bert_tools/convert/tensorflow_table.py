"""Reader of TensorFlow's sorted tables, which index checkpoints: keys and values in checked blocks.

The format is LevelDB's (https://github.com/google/leveldb, doc/table_format.md): blocks of entries
whose keys omit the prefix shared with the previous key, each block followed by its kind and masked
CRC32C, an index of the blocks, and a footer of 48 bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bert_tools.convert.protobuf import varint
from mlperf_bert.common.crc32c import masked_crc32c
from mlperf_bert.common.untrusted import open_regular_file

_FOOTER_BYTES = 48
MAX_INDEX_BYTES = 4 * 2**20  # BERT-large with its optimizer has 0.1 MB
MAX_ENTRIES = 50_000
_MAX_KEY_BYTES = 1024
_MAGIC = 0xDB4775248B80FB57
_TRAILER_BYTES = 5
_UNCOMPRESSED = 0  # as TensorFlow writes the tables of its V2 checkpoints

Entry = tuple[bytes, memoryview]


@dataclass(frozen=True, slots=True)
class Block:
    """Place of a block's contents in the file, without its trailer."""

    start: int
    size: int


@dataclass(frozen=True, slots=True)
class SortedTable:
    """A table whose index has been read."""

    path: Path
    blocks: list[Block] = field(repr=False)

    def items(self, max_bytes: int) -> Iterator[Entry]:
        """All entries, with ascending keys; their blocks may total `max_bytes`.

        Raises ValueError if a block is damaged or too large; OSError.
        """
        before, count = None, 0
        for block in self.blocks:
            contents = read_block(self.path, block, max_bytes)
            max_bytes -= len(contents)
            for key, value in _entries_of(contents):
                count += 1
                if before is not None and key <= before:
                    raise ValueError("has keys that do not ascend")
                if count > MAX_ENTRIES:
                    raise ValueError(f"has more than {MAX_ENTRIES:,} entries")
                before = key
                yield key, value


def open_table(path: Path) -> SortedTable:
    """Read footer and index of a table.

    Raises ValueError if it is damaged or no table; OSError.
    """
    with open_regular_file(path) as file:
        end = max(0, file.seek(0, 2) - _FOOTER_BYTES)
        file.seek(end)
        footer = memoryview(file.read(_FOOTER_BYTES) or b"")
    if len(footer) < _FOOTER_BYTES or int.from_bytes(footer[-8:], "little") != _MAGIC:
        raise ValueError("is cut short, or no checkpoint of TensorFlow")
    _, place = _handle(footer, 0, end)  # index of metadata, which is empty
    index, _ = _handle(footer, place, end)
    last_key = b""
    blocks: list[Block] = []
    end_of_last = 0
    for key, value in _entries_of(read_block(path, index, MAX_INDEX_BYTES)):
        block, _ = _handle(value, 0, index.start)
        if block.start < end_of_last or (blocks and key <= last_key):
            raise ValueError("has blocks that do not follow one another")
        end_of_last = block.start + block.size + _TRAILER_BYTES
        last_key = key
        blocks.append(block)
    return SortedTable(path, blocks)


def read_block(path: Path, block: Block, max_bytes: int) -> NDArray[np.uint8]:
    """A block's contents. Raises ValueError if it is damaged or too large."""
    if block.size > max_bytes:
        raise ValueError(f"has a block of more than {max_bytes:,} bytes")
    stored = np.empty(block.size + _TRAILER_BYTES, np.uint8)
    read_into(path, block.start, stored)
    kind = int(stored[block.size])
    if masked_crc32c(stored[: block.size + 1]) != int.from_bytes(stored[-4:].tobytes(), "little"):
        raise ValueError("has a block with a wrong checksum")
    if kind != _UNCOMPRESSED:
        raise ValueError("has a compressed block, which TensorFlow's V2 checkpoints never have")
    return stored[: block.size]


def read_into(path: Path, start: int, found: NDArray[Any]) -> None:
    """Fill a contiguous array from a place in a file. Raises ValueError at its end; OSError."""
    rest = found.reshape(-1).view(np.uint8).data
    with open_regular_file(path) as file:
        file.seek(start)
        while len(rest):
            count = file.readinto(rest)
            if not count:
                raise ValueError("is cut short")
            rest = rest[count:]


def _handle(message: memoryview, place: int, end: int) -> tuple[Block, int]:
    """A block's place, before `end`, and the place after it in the handle."""
    start, place = varint(message, place)
    size, place = varint(message, place)
    if start + size + _TRAILER_BYTES > end:
        raise ValueError("has a block beyond its end")
    return Block(start, size), place


def _entries_of(contents: NDArray[np.uint8]) -> Iterator[Entry]:
    """Entries of a block: full keys, values in place."""
    block = contents.data
    num_restarts = int.from_bytes(block[-4:], "little")
    # After the entries: the places of full keys, for a search, and their number.
    end = len(block) - 4 - 4 * num_restarts
    if len(block) < 4 or end < 0:
        raise ValueError("has a block without its end")
    entries, key, place, count = block[:end], b"", 0, 0
    while place < end:
        shared, place = varint(entries, place)
        rest, place = varint(entries, place)
        size, place = varint(entries, place)
        if shared > len(key) or rest > _MAX_KEY_BYTES - shared:
            raise ValueError("has a key that is damaged or too long")
        if rest + size > end - place:
            raise ValueError("has an entry that is cut short")
        key = key[:shared] + bytes(entries[place : place + rest])
        place += rest
        yield key, entries[place : place + size]
        place += size
        count += 1
        if count > MAX_ENTRIES:
            raise ValueError(f"has a block of more than {MAX_ENTRIES:,} entries")
