"""Reader of a TensorFlow checkpoint (V2): its tensors one by one, and BERT's under our names.

A checkpoint is a table of tensors (`.index`) beside files of their bytes. The table has LevelDB's
format (https://github.com/google/leveldb, doc/table_format.md): blocks of entries whose keys omit
the prefix shared with the previous key, each block followed by its kind and masked CRC32C, an index
of the blocks, and a footer of 48 bytes. An entry's value is a protocol buffer
(tensorflow/core/protobuf/tensor_bundle.proto). Every block of the table and every tensor is checked
against its CRC32C, and a tensor's size against its shape and its file. What the checksums cover is
trusted beyond that.

The checkpoint that MLPerf's BERT starts from is known by its published size and digest
(https://github.com/mlcommons/training, language_model/tensorflow/bert/README.md). Only the table of
tensors counts for this: it holds every tensor's CRC32C, which is checked on reading.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from bert_tools.huggingface.weights import Source, Weight, read_settings
from mlperf_bert.errors import CheckpointError, DataError
from mlperf_bert.files import in_brief, open_regular_file, read_json, read_regular_file, reading
from mlperf_bert.model.bert import ENDINGS, WHOLE_NAMES, tensorflow_name

CONFIG = "bert_config.json"  # the first release's name; its keys are also Hugging Face's
# (bytes, md5) of model.ckpt-28252.index -> the folder in which MLPerf publishes it.
PUBLISHED = MappingProxyType({(17_371, "f97de3ae180eb8d479555c939d50d048"): "tf1_ckpt"})
MAX_INDEX_BYTES = 4 * 2**20  # BERT-large with its optimizer has 0.1 MB
_INDEX = ".index"
_NAME_IT = "give the name that TensorFlow saved it under, such as DIR/model.ckpt-28252"
_FOOTER_BYTES = 48
_MAGIC = 0xDB4775248B80FB57
_TRAILER_BYTES = 5  # a block's kind and checksum
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # kinds of a protocol buffer's fields
_FLOAT32 = 1  # in tensorflow/core/framework/types.proto: the only dtype of weights
_OF_THE_MODEL = ("bert/", "cls/")
_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"  # of TensorFlow 2's checkpoints of objects


def open_tensorflow_source(path: Path) -> Source:
    """Weights by our names, with the settings of the bert_config.json beside them.

    Raises CheckpointError, as `open_tensorflow`.
    """
    prefix = _prefix_of(path)
    tensors = open_tensorflow(prefix)
    names, ignored = sort_names(tensors)
    weights = {
        ours: _weight(tensors[name], f"{path}: {in_brief(name)}") for name, ours in names.items()
    }
    config = prefix.parent / CONFIG
    remedy = f"put the {CONFIG} of these weights beside them"
    try:
        stated = read_json(config, missing="is missing", remedy=remedy)
        with reading(config, remedy):
            settings = read_settings(stated)
    except DataError as error:
        raise CheckpointError(*error.args) from None
    with damage_of(path):
        table = read_regular_file(_index_of(prefix), MAX_INDEX_BYTES)
    digest = hashlib.md5(table, usedforsecurity=False).hexdigest()
    published = PUBLISHED.get((len(table), digest))
    return Source(
        folder=prefix.parent,
        name=prefix.name,
        form="TensorFlow checkpoint",
        weights=weights,
        ignored=ignored,
        settings=settings,
        stated_in=config,
        published=f"MLPerf {published}" if published else "",
    )


def _weight(tensor: "BundleTensor", where: str) -> Weight:
    """A tensor as a weight; a kernel is [in, out], our weight [out, in]."""
    if not tensor.name.endswith("/kernel"):
        return Weight(tensor.shape, "float32", tensor.read, where)
    return Weight(tensor.shape[::-1], "float32", lambda: tensor.read().T, where)


def open_tensorflow(source: Path) -> Mapping[str, "BundleTensor"]:
    """The tensors of a checkpoint by the names of their variables, unread.

    Shapes fit the sizes of the files. Reading a tensor checks its CRC32C and holds one tensor in
    memory; any order will do. Tensors that are not float32 are listed, and refused when they are
    read.

    Args:
        source: the name that the checkpoint was saved under, a prefix of its files' names; or a
            directory with one checkpoint.

    Raises:
        CheckpointError: it is missing, damaged or inconsistent.
    """
    prefix = _prefix_of(source)
    with damage_of(source):
        if not _index_of(prefix).exists():
            problem = f"is no TensorFlow checkpoint (V2): there is no {prefix.name}{_INDEX}"
            raise CheckpointError(str(source), problem, _NAME_IT)
    bundle = read_bundle(prefix)
    if _OBJECT_GRAPH in bundle:
        remedy = "give the first release's form; MLPerf publishes its weights so in tf1_ckpt"
        raise CheckpointError(str(source), "holds the objects of a TensorFlow 2 program", remedy)
    return bundle


def _prefix_of(source: Path) -> Path:
    """The name that TensorFlow saved a checkpoint under, one of a directory's."""
    with damage_of(source):
        if not source.is_dir():
            return source
        found = sorted(path.name.removesuffix(_INDEX) for path in source.glob(f"*{_INDEX}"))
    if len(found) != 1:
        remedy = f"name one of them: {', '.join(found[:8])}" if found else _NAME_IT
        raise CheckpointError(str(source), f"has {len(found)} checkpoints", remedy)
    return source / found[0]


def _index_of(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + _INDEX)


def sort_names(names: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Sort a checkpoint's names: our name of each weight, and why each other one is ignored.

    A checkpoint of training also holds the optimizer's tensors, named after their weights, and
    counters. An unknown name in the model's own scopes, `bert` and `cls`, stays among the weights
    unchanged, so that the caller can refuse it.
    """
    weights, others, ignored = {}, [], {}
    for name in names:
        ours = parameter_name(name)
        if ours is None:
            others.append(name)
        else:
            weights[name] = ours
    for name in others:
        if any(parent in weights for parent in _parents(name)):
            ignored[name] = "the optimizer's"
        elif name.startswith(_OF_THE_MODEL):
            weights[name] = name
        else:
            ignored[name] = "no part of pre-training"
    return weights, ignored


def parameter_name(theirs: str) -> str | None:
    """The inverse of `tensorflow_name`; None if it is no parameter's name."""
    for ours, whole in WHOLE_NAMES.items():
        if theirs == whole:
            return ours
    for ours, end in ENDINGS:
        if theirs.startswith(_OF_THE_MODEL) and theirs.endswith(end):
            stem = theirs.removesuffix(end).replace("encoder/layer_", "encoder/layer/")
            name = stem.replace("/", ".") + ours
            if tensorflow_name(name) == theirs:
                return name
    return None


def _parents(name: str) -> Iterable[str]:
    """The scopes that a name lies in."""
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name


@contextmanager
def damage_of(path: Path, name: str = "") -> Iterator[None]:
    """Turn ValueError, IndexError and OSError into CheckpointError about a file or its tensor.

    The readers of formats raise these, as they know the fault but not the file.
    """
    where = f"{path}: {name}" if name else str(path)
    remedy = "give a checkpoint that is whole, as TensorFlow wrote it"
    try:
        yield
    except FileNotFoundError:
        remedy = "keep all files of a checkpoint together, as TensorFlow wrote them"
        raise CheckpointError(where, "is missing", remedy) from None
    except OSError as error:
        raise CheckpointError(where, error.strerror or "cannot be read", remedy) from None
    except IndexError:
        raise CheckpointError(where, "is cut short", remedy) from None
    except ValueError as error:
        raise CheckpointError(where, str(error), remedy) from None


@dataclass(frozen=True, slots=True)
class BundleTensor:
    """A tensor of a checkpoint; it is not in memory before `read`."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # byte of the file
    num_bytes: int
    crc: int  # masked

    def read(self) -> NDArray[np.float32]:
        """The numbers. Raises CheckpointError if the file is damaged or holds no float32 there."""
        with damage_of(self.path, in_brief(self.name)):
            if self.dtype != "float32":
                raise ValueError(f"holds {self.dtype}, where weights are float32 in one piece")
            with open_regular_file(self.path) as file:
                file.seek(self.start)
                contents = np.fromfile(file, np.uint8, self.num_bytes)
            if len(contents) < self.num_bytes:
                raise ValueError("is cut short")
            if masked_crc32c(contents) != self.crc:
                raise ValueError("has a wrong checksum")
            return contents.view("<f4").reshape(self.shape)


def read_bundle(prefix: Path) -> Mapping[str, BundleTensor]:
    """The tensors of `prefix`.index, unread, in the order of their names.

    A variable that was saved in parts is listed with the dtype "parts", and refused when it is
    read: no published BERT has one.

    Raises CheckpointError if a file is missing or damaged, and if a tensor does not lie within its
    file or has another size than its shape.
    """
    path = _index_of(prefix)
    with damage_of(path):
        entries = dict(_table(read_regular_file(path, MAX_INDEX_BYTES)))
        header = dict(fields(entries.pop(b"", memoryview(b""))))
        if header.get(2):
            raise ValueError("was written by a big-endian machine")
        count = header.get(1, 0)
        names = [f"{prefix.name}.data-{shard:05d}-of-{count:05d}" for shard in range(count)]
        paths = [prefix.with_name(name) for name in names]
        # A key with a leading zero byte is of a part of a tensor.
        whole = {key.decode(): entry for key, entry in entries.items() if key[:1] != b"\0"}
        tensors = {name: _tensor(name, entry, paths) for name, entry in whole.items()}
    sizes = {path: _size_of(path) for path in paths}
    with damage_of(path):
        for tensor in tensors.values():
            if tensor.start + tensor.num_bytes > sizes[tensor.path]:
                where = f"beyond the end of {tensor.path.name}"
                raise ValueError(f"says that {in_brief(tensor.name)} lies {where}")
    return tensors


def _tensor(name: str, message: memoryview, paths: list[Path]) -> BundleTensor:
    """A tensor by its `BundleEntryProto`. Raises ValueError and IndexError."""
    entry = dict(fields(message))
    shape = tuple(
        dict(fields(size)).get(1, 0)
        for number, size in fields(entry.get(2, memoryview(b"")))
        if number == 2
    )
    number, size = entry.get(1, 0), entry.get(5, 0)
    dtype = "parts" if 7 in entry else "float32" if number == _FLOAT32 else f"dtype_{number}"
    if dtype == "float32" and size != 4 * math.prod(shape):
        problem = f"of {size:,} bytes, not {4 * math.prod(shape):,} as its shape has"
        raise ValueError(f"has a tensor {in_brief(name)} {problem}")
    path, start, crc = paths[entry.get(3, 0)], entry.get(4, 0), entry.get(6, 0)
    return BundleTensor(path, name, dtype, shape, start, size, crc)


def _size_of(path: Path) -> int:
    """Bytes of a data file. Raises CheckpointError."""
    with damage_of(path), open_regular_file(path) as file:
        return file.seek(0, 2)


def _table(contents: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """Entries of a table, with ascending keys. Raises ValueError and IndexError."""
    footer = memoryview(contents)[-_FOOTER_BYTES:]
    if len(footer) < _FOOTER_BYTES or int.from_bytes(footer[-8:], "little") != _MAGIC:
        raise ValueError("is cut short, or no checkpoint of TensorFlow")
    _, place = varint(footer, 0)  # the index of metadata, which is empty
    _, place = varint(footer, place)
    for _, handle in _entries(_block(contents, footer[place:])):
        yield from _entries(_block(contents, handle))


def _block(contents: bytes, handle: memoryview) -> memoryview:
    """A block's contents by its place and size. Raises ValueError."""
    start, place = varint(handle, 0)
    size, _ = varint(handle, place)
    stored = contents[start : start + size + _TRAILER_BYTES]
    if len(stored) < size + _TRAILER_BYTES or (
        masked_crc32c(stored[:-4]) != int.from_bytes(stored[-4:], "little")
    ):
        raise ValueError("has a block that is cut short or has a wrong checksum")
    if stored[size]:
        raise ValueError("has a compressed block, which TensorFlow's V2 checkpoints never have")
    return memoryview(stored)[:size]


def _entries(block: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Full keys and values of a block."""
    # After the entries: the places of full keys, for a search, and their number.
    end = len(block) - 4 - 4 * int.from_bytes(block[-4:], "little")
    key, place = b"", 0
    while place < end:
        shared, place = varint(block, place)
        rest, place = varint(block, place)
        size, place = varint(block, place)
        key = key[:shared] + bytes(block[place : place + rest])
        place += rest
        yield key, block[place : place + size]
        place += size


def fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protocol buffer, in order, without a schema.

    Values are unsigned integers, or bytes in place (https://protobuf.dev/programming-guides/encoding).
    Raises ValueError for an unknown kind of field, IndexError at the end of the message.
    """
    place = 0
    while place < len(message):
        tag, place = varint(message, place)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, place = varint(message, place)
            yield number, value
            continue
        if kind == _BYTES:
            size, place = varint(message, place)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError("has a field of an unknown kind")
        contents = message[place : place + size]
        yield number, contents if kind == _BYTES else int.from_bytes(contents, "little")
        place += size


def masked_crc32c(contents: bytes | NDArray[Any]) -> int:
    """The CRC32C of bytes, or of an array's memory, rotated by 15 bits and with a constant added.

    TensorFlow stores it so, that checksums of data with checksums in them do not cancel out. Raises
    ValueError if that memory has gaps.
    """
    crc: int = google_crc32c.value(contents)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def varint(message: memoryview, place: int) -> tuple[int, int]:
    """An integer of seven bits per byte, low ones first, and the place after it.

    Raises IndexError if the message ends before it does.
    """
    value, shift = 0, 0
    while True:
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
