"""Writes protocol buffers and TensorFlow's tables, right or wrong, for tests of readers."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import google_crc32c

from bert_tools.convert.protobuf import varint
from bert_tools.convert.tensorflow_bundle import BundleTensor
from bert_tools.convert.tensorflow_table import open_table
from mlperf_bert.common.crc32c import mask, masked_crc32c

MAGIC = 0xDB4775248B80FB57
Field = tuple[int, "int | bytes | list[Field]"]
Entries = Sequence[tuple[bytes, bytes]]


def encoded(number: int) -> bytes:
    """An integer of protocol buffers; a negative one has 64 bits."""
    number %= 2**64
    found = bytearray()
    while number >= 128:
        found.append(number % 128 | 128)
        number >>= 7
    return bytes([*found, number])


def message(*fields: Field) -> bytes:
    """A message of these fields: integers as varints, bytes as they are, lists as messages."""
    found = b""
    for number, value in fields:
        if isinstance(value, int):
            found += encoded(number << 3) + encoded(value)
        else:
            inner = message(*value) if isinstance(value, list) else value
            found += encoded(number << 3 | 2) + encoded(len(inner)) + inner
    return found


def fixed32(number: int, value: int) -> bytes:
    """A field of four bytes."""
    return encoded(number << 3 | 5) + value.to_bytes(4, "little")


def block_of(entries: Entries) -> bytes:
    """A block's contents; the second half of the keys share what they can with the one before."""
    found, before = b"", b""
    for number, (key, value) in enumerate(entries):
        shared = 0
        while 2 * number >= len(entries) and key[: shared + 1] == before[: shared + 1]:
            if shared == len(key):
                break
            shared += 1
        parts = (shared, len(key) - shared, len(value))
        found += b"".join(map(encoded, parts)) + key[shared:] + value
        before = key
    return found + (0).to_bytes(4, "little") + (1).to_bytes(4, "little")


def sealed(contents: bytes, kind: int) -> bytes:
    """A block's bytes in the file, with its kind (0: uncompressed) and checksum."""
    stored = contents + bytes([kind])
    return stored + masked_crc32c(stored).to_bytes(4, "little")


def table_of(blocks: Iterable[tuple[bytes, bytes, int]]) -> bytes:
    """A table of (last key, contents, kind) each."""
    found, index = b"", []
    for last_key, contents, kind in blocks:
        block = sealed(contents, kind)
        index.append((last_key, handle(len(found), block)))
        found += block
    return ended(found, index)


def handle(start: int, block: bytes) -> bytes:
    """The place of a block, without its trailer."""
    return encoded(start) + encoded(len(block) - 5)


def ended(blocks: bytes, index: Entries) -> bytes:
    """A table of these blocks and this index of them, whatever it says."""
    meta, last = sealed(block_of([]), 0), sealed(block_of(index), 0)
    footer = handle(len(blocks), meta) + handle(len(blocks) + len(meta), last)
    return blocks + meta + last + footer.ljust(40, b"\0") + MAGIC.to_bytes(8, "little")


def table(entries: Entries, *, per_block: int = 1000) -> bytes:
    """A table of sorted entries."""
    parts = [entries[at : at + per_block] for at in range(0, len(entries), per_block)]
    return table_of((part[-1][0], block_of(part), 0) for part in parts)


def entries_of(path: Path) -> list[tuple[bytes, bytes]]:
    """The entries of a real table."""
    return [(key, bytes(value)) for key, value in open_table(path).items(2**22)]


def text_tensor(path: Path, text: bytes) -> BundleTensor:
    """A tensor that is a text, in a file of its own, with right checksums."""
    before = google_crc32c.value(len(text).to_bytes(4, "little"))
    check = mask(before).to_bytes(4, "little")
    contents = encoded(len(text)) + check + text
    path.write_bytes(contents)
    crc = mask(google_crc32c.extend(before, check + text))
    return BundleTensor(path, "text", "string", (), 0, len(contents), crc)


def fields_of(contents: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Fields of a well-formed message: number and kind of each, and its value as bytes."""
    view, place = memoryview(contents), 0
    while place < len(view):
        tag, place = varint(view, place)
        start = place
        if tag & 7 == 0:
            _, place = varint(view, place)
        elif tag & 7 == 2:
            size, start = varint(view, place)
            place = start + size
        else:
            place += 4 if tag & 7 == 5 else 8
        yield tag >> 3, tag & 7, contents[start:place]
