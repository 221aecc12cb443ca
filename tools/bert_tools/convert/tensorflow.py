"""A reader of TensorFlow checkpoints (V2) that does not need TensorFlow.

A checkpoint consists of a table of tensors (`.index`) and of files with the tensors' bytes. The
table has LevelDB's format (https://github.com/google/leveldb, doc/table_format.md). It contains
blocks of entries, an index of the blocks, and a footer of 48 bytes. The key of an entry omits the
prefix that it shares with the previous key. Each block is followed by its kind and its masked
CRC32C. The value of an entry is a protocol buffer (tensorflow/core/protobuf/tensor_bundle.proto).
The reader compares every block of the table and every tensor with its CRC32C, and the size of a
tensor with its shape and its file. It does not check the other contents, because the checksums
cover them.

The checkpoint that MLPerf's BERT starts from is recognized by its published size and digest
(https://github.com/mlcommons/training, language_model/tensorflow/bert/README.md). Comparing the
digest of the table is sufficient, because the table contains the CRC32C of every tensor.
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

CONFIG = "bert_config.json"  # the name in Google's release; Hugging Face uses the same keys
# (bytes, md5) of model.ckpt-28252.index -> the folder in which MLPerf publishes it.
PUBLISHED = MappingProxyType({(17_371, "f97de3ae180eb8d479555c939d50d048"): "tf1_ckpt"})
MAX_INDEX_BYTES = 4 * 2**20  # the table of BERT-large with its optimizer has 0.1 MB
_INDEX = ".index"
_NAME_IT = "pass the name that TensorFlow saved it under, such as DIR/model.ckpt-28252"
_FOOTER_BYTES = 48
_MAGIC = 0xDB4775248B80FB57
_TRAILER_BYTES = 5  # a block's kind and checksum
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types of a protocol buffer's fields
_FLOAT32 = 1  # DT_FLOAT of tensorflow/core/framework/types.proto, the only dtype of weights
_MODEL_SCOPES = ("bert/", "cls/")
_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"  # only in object-based checkpoints of TensorFlow 2


def open_tensorflow_source(path: Path) -> Source:
    """Open the weights of a checkpoint, and read the settings from the bert_config.json next to it.

    Raises CheckpointError if that file or the checkpoint is missing, damaged or inconsistent.
    """
    prefix = _prefix_of(path)
    tensors = open_tensorflow(prefix)
    names, ignored = sort_names(tensors)
    weights = {
        ours: _weight(tensors[name], f"{path}: {in_brief(name)}") for name, ours in names.items()
    }
    config = prefix.parent / CONFIG
    remedy = f"copy the {CONFIG} of these weights into the same directory"
    try:
        stated = read_json(config, missing="no such file", remedy=remedy)
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
    """Return a tensor as a `Weight` in our layout.

    Kernels are transposed from [in, out] to [out, in]. `where` names the file and the tensor in
    error messages.
    """
    if not tensor.name.endswith("/kernel"):
        return Weight(tensor.shape, "float32", tensor.read, where)
    return Weight(tensor.shape[::-1], "float32", lambda: tensor.read().T, where)


def open_tensorflow(source: Path) -> Mapping[str, "BundleTensor"]:
    """Open a checkpoint and return its tensors by variable name, without reading their values.

    This function checks the tensors' sizes against the files. `BundleTensor.read` reads one tensor
    and checks its CRC32C. Tensors can be read in any order, so only one needs to be in memory.
    Tensors with a dtype other than float32 are listed, but cannot be read.

    Args:
        source: the name that TensorFlow saved the checkpoint under, which is a prefix of the names
            of its files, or a directory with a single checkpoint.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or inconsistent.
    """
    prefix = _prefix_of(source)
    with damage_of(source):
        if not _index_of(prefix).exists():
            problem = f"not a TensorFlow checkpoint (V2), because {prefix.name}{_INDEX} is missing"
            raise CheckpointError(str(source), problem, _NAME_IT)
    bundle = read_bundle(prefix)
    if _OBJECT_GRAPH in bundle:
        problem = "this is an object-based checkpoint of TensorFlow 2, which cannot be converted"
        remedy = "pass a name-based checkpoint, such as MLPerf's tf1_ckpt"
        raise CheckpointError(str(source), problem, remedy)
    return bundle


def _prefix_of(source: Path) -> Path:
    """Return the name that TensorFlow saved a checkpoint under.

    `source` is that name, or a directory with a single checkpoint. Raises CheckpointError if a
    directory has none or several.
    """
    with damage_of(source):
        if not source.is_dir():
            return source
        found = sorted(path.name.removesuffix(_INDEX) for path in source.glob(f"*{_INDEX}"))
    if len(found) != 1:
        if not found:
            raise CheckpointError(str(source), f"contains no *{_INDEX} file", _NAME_IT)
        remedy = f"add the name of one checkpoint to the path: {', '.join(found[:8])}"
        raise CheckpointError(str(source), f"has {len(found)} checkpoints", remedy)
    return source / found[0]


def _index_of(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + _INDEX)


def sort_names(names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Map each weight's name to our name, and return the other names as ignored ones.

    A training checkpoint also contains counters and the optimizer's tensors, whose names begin with
    the name of a weight. An unknown name in one of the model's scopes, `bert` and `cls`, is mapped
    to itself among the weights, so that the caller can raise an error.
    """
    weights, others, ignored = {}, [], []
    for name in names:
        ours = parameter_name(name)
        if ours is None:
            others.append(name)
        else:
            weights[name] = ours
    for name in others:
        is_of_optimizer = any(parent in weights for parent in _parents(name))
        if name.startswith(_MODEL_SCOPES) and not is_of_optimizer:
            weights[name] = name
        else:
            ignored.append(name)
    return weights, ignored


def parameter_name(theirs: str) -> str | None:
    """Return our name for a TensorFlow variable, or None if it is not one of our parameters.

    This function is the inverse of `tensorflow_name`.
    """
    for ours, whole in WHOLE_NAMES.items():
        if theirs == whole:
            return ours
    for ours, end in ENDINGS:
        if theirs.startswith(_MODEL_SCOPES) and theirs.endswith(end):
            stem = theirs.removesuffix(end).replace("encoder/layer_", "encoder/layer/")
            name = stem.replace("/", ".") + ours
            if tensorflow_name(name) == theirs:
                return name
    return None


def _parents(name: str) -> Iterable[str]:
    """Yield the scopes that contain a variable, from the innermost to the outermost."""
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name


@contextmanager
def damage_of(path: Path, name: str = "") -> Iterator[None]:
    """Return a context manager that converts parsing errors to CheckpointError.

    The functions that parse a format raise ValueError, IndexError or OSError, because they do not
    know which file they parse. The CheckpointError names the file and, if `name` is given, the
    tensor.
    """
    where = f"{path}: {name}" if name else str(path)
    remedy = "pass a complete checkpoint, as TensorFlow wrote it"
    try:
        yield
    except FileNotFoundError:
        remedy = "keep all files of a checkpoint in one directory, as TensorFlow wrote them"
        raise CheckpointError(where, "no such file", remedy) from None
    except OSError as error:
        raise CheckpointError(where, error.strerror or "cannot be read", remedy) from None
    except IndexError:
        raise CheckpointError(where, "truncated", remedy) from None
    except ValueError as error:
        raise CheckpointError(where, str(error), remedy) from None


@dataclass(frozen=True, slots=True)
class BundleTensor:
    """A tensor of a checkpoint, whose method `read` loads it into memory."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # position in the file, in bytes
    num_bytes: int
    crc: int  # masked

    def read(self) -> NDArray[np.float32]:
        """Read the tensor into memory, and check it against its CRC32C.

        Raises CheckpointError if the tensor is damaged or not float32.
        """
        with damage_of(self.path, in_brief(self.name)):
            if self.dtype != "float32":
                raise ValueError(f"must be float32 in one piece, not {self.dtype}")
            with open_regular_file(self.path) as file:
                file.seek(self.start)
                contents = np.fromfile(file, np.uint8, self.num_bytes)
            if len(contents) < self.num_bytes:
                raise ValueError("truncated")
            if masked_crc32c(contents) != self.crc:
                raise ValueError("the checksum is wrong")
            return contents.view("<f4").reshape(self.shape)


def read_bundle(prefix: Path) -> Mapping[str, BundleTensor]:
    """List the tensors of `prefix`.index in the order of their names, without reading them.

    A variable that was saved in several parts is listed with the dtype "parts". It cannot be read,
    because no published BERT has such a variable.

    Raises CheckpointError if a file is missing or damaged, if a tensor extends beyond its file, or
    if the size of a tensor does not match its shape.
    """
    path = _index_of(prefix)
    with damage_of(path):
        entries = dict(_table(read_regular_file(path, MAX_INDEX_BYTES)))
        header = dict(fields(entries.pop(b"", memoryview(b""))))
        if header.get(2):
            raise ValueError("written by a big-endian machine, which is not supported")
        count = header.get(1, 0)
        names = [f"{prefix.name}.data-{shard:05d}-of-{count:05d}" for shard in range(count)]
        paths = [prefix.with_name(name) for name in names]
        # A key that begins with a zero byte belongs to a part of a tensor.
        whole = {key.decode(): entry for key, entry in entries.items() if key[:1] != b"\0"}
        tensors = {name: _tensor(name, entry, paths) for name, entry in whole.items()}
    sizes = {path: _size_of(path) for path in paths}
    with damage_of(path):
        for tensor in tensors.values():
            if tensor.start + tensor.num_bytes > sizes[tensor.path]:
                end = f"beyond the end of {tensor.path.name}"
                raise ValueError(f"the tensor {in_brief(tensor.name)} extends {end}")
    return tensors


def _tensor(name: str, message: memoryview, paths: list[Path]) -> BundleTensor:
    """Parse the `BundleEntryProto` in `message`, and return the tensor that it describes.

    Raises ValueError or IndexError if the message is damaged.
    """
    entry = dict(fields(message))
    shape = tuple(
        dict(fields(size)).get(1, 0)
        for number, size in fields(entry.get(2, memoryview(b"")))
        if number == 2
    )
    number, size = entry.get(1, 0), entry.get(5, 0)
    dtype = "parts" if 7 in entry else "float32" if number == _FLOAT32 else f"dtype_{number}"
    if dtype == "float32" and size != 4 * math.prod(shape):
        problem = f"has {size:,} bytes, but its shape needs {4 * math.prod(shape):,} bytes"
        raise ValueError(f"the tensor {in_brief(name)} {problem}")
    path, start, crc = paths[entry.get(3, 0)], entry.get(4, 0), entry.get(6, 0)
    return BundleTensor(path, name, dtype, shape, start, size, crc)


def _size_of(path: Path) -> int:
    """Return the size of a file in bytes. Raises CheckpointError if the size cannot be read."""
    with damage_of(path), open_regular_file(path) as file:
        return file.seek(0, 2)


def _table(contents: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the key and value of each entry of a table, in ascending order of keys.

    Raises ValueError or IndexError if the table is damaged.
    """
    footer = memoryview(contents)[-_FOOTER_BYTES:]
    if len(footer) < _FOOTER_BYTES or int.from_bytes(footer[-8:], "little") != _MAGIC:
        raise ValueError("truncated, or not a TensorFlow checkpoint")
    _, position = varint(footer, 0)  # skips the index of metadata, which is empty
    _, position = varint(footer, position)
    for _, handle in _entries(_block(contents, footer[position:])):
        yield from _entries(_block(contents, handle))


def _block(contents: bytes, handle: memoryview) -> memoryview:
    """Return the block of a table that `handle` refers to by its position and size.

    Raises ValueError if the block is damaged.
    """
    start, position = varint(handle, 0)
    size, _ = varint(handle, position)
    stored = contents[start : start + size + _TRAILER_BYTES]
    if len(stored) < size + _TRAILER_BYTES or (
        masked_crc32c(stored[:-4]) != int.from_bytes(stored[-4:], "little")
    ):
        raise ValueError("a block is truncated or its checksum is wrong")
    if stored[size]:
        raise ValueError("a block is compressed, which TensorFlow's V2 checkpoints never are")
    return memoryview(stored)[:size]


def _entries(block: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the complete key and the value of each entry of a block."""
    # The entries are followed by the positions of complete keys, and by their number.
    end = len(block) - 4 - 4 * int.from_bytes(block[-4:], "little")
    key, position = b"", 0
    while position < end:
        shared, position = varint(block, position)
        rest, position = varint(block, position)
        size, position = varint(block, position)
        key = key[:shared] + bytes(block[position : position + rest])
        position += rest
        yield key, block[position : position + size]
        position += size


def fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield the number and value of each field of a protocol buffer, without its schema.

    The fields are in the order of the message. A value is an unsigned integer or a memoryview.
    Source: https://protobuf.dev/programming-guides/encoding. Raises ValueError for an unknown kind
    of field, and IndexError if the message is truncated.
    """
    position = 0
    while position < len(message):
        tag, position = varint(message, position)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, position = varint(message, position)
            yield number, value
            continue
        if kind == _BYTES:
            size, position = varint(message, position)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError("a field has an unknown kind")
        contents = message[position : position + size]
        yield number, contents if kind == _BYTES else int.from_bytes(contents, "little")
        position += size


def masked_crc32c(contents: bytes | NDArray[Any]) -> int:
    """Return TensorFlow's masked CRC32C of bytes, or of the memory of an array.

    Masking rotates the CRC by 15 bits and adds a constant. TensorFlow masks checksums because the
    CRC of data that contains unmasked CRCs would be unreliable. Raises ValueError if the array is
    not contiguous.
    """
    crc: int = google_crc32c.value(contents)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def varint(message: memoryview, position: int) -> tuple[int, int]:
    """Decode a variable-length integer. Returns its value and the position after it.

    Each byte contains seven bits of the integer, the lowest bits first. Raises IndexError if the
    message ends within the integer.
    """
    value, shift = 0, 0
    while True:
        byte = message[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
