"""Opens a BERT in Hugging Face's form: safetensors, one file or several, and config.json.

Anybody may have written the files: their headers are checked, tensors read when asked. The format
of safetensors: 8 bytes of header length, a JSON header, then the tensors without gaps. Written anew
instead of the library's reader, which takes a pipe for a file, maps the whole file, and raises
errors that are not ours.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.checkpoint.huggingface.names import BUFFERS, COPIES, our_names, read_settings
from mlperf_bert.checkpoint.huggingface.weights import Source, Weight
from mlperf_bert.common.errors import CheckpointError, DataError
from mlperf_bert.common.records import Record, read_record
from mlperf_bert.common.untrusted import (
    MAX_JSON_BYTES,
    in_brief,
    open_regular_file,
    parse_json_object,
)

REMEDY = "give a file that is whole, as its source has it"

_PREFIX_BYTES = 8
_MOST_DIMENSIONS = 8
_MOST_SIZE = 2**40  # of a dimension, so that products stay within 64 bits of a file's size
# The format's word -> (its elements as numpy reads them, our word for them).
_DTYPES = {
    "F64": ("<f8", "float64"),
    "F32": ("<f4", "float32"),
    "F16": ("<f2", "float16"),
    "BF16": ("<u2", "bfloat16"),
    "I64": ("<i8", "int64"),
    "I32": ("<i4", "int32"),
    "I16": ("<i2", "int16"),
    "I8": ("|i1", "int8"),
    "U64": ("<u8", "uint64"),
    "U32": ("<u4", "uint32"),
    "U16": ("<u2", "uint16"),
    "U8": ("|u1", "uint8"),
    "BOOL": ("|b1", "bool"),
    "F8_E4M3": ("|u1", "float8_e4m3"),
    "F8_E5M2": ("|u1", "float8_e5m2"),
}
# Weights, and the whole numbers among which older files keep positions.
_READABLE = frozenset(("float64", "float32", "float16", "bfloat16", "int64", "int32"))

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_AS_SAFETENSORS = (
    "pickle can run code: where you trust it, write it anew with transformers, "
    "BertForPreTraining.from_pretrained(DIR).save_pretrained(OTHER), and give that directory"
)
_MOST_FILES = 1000
_MOST_POSITIONS = 2**20
_LONGEST_NAME = 60
_REMEDY = "give a directory with config.json and model.safetensors, as save_pretrained makes it"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file; see `SourceTensor`."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: str
    start: int  # byte of the file

    def read(self) -> NDArray[Any]:
        """The numbers, bfloat16 as float32.

        Raises CheckpointError where the file is cut short by now, or holds numbers of
        another kind there.
        """
        if self.dtype not in _READABLE:
            problem = f"{in_brief(self.name)} holds {self.dtype}"
            raise CheckpointError(str(self.path), problem, "give weights of 16, 32 or 64 bits")
        found = np.empty(math.prod(self.shape), self.elements)
        _read_into(self.path, self.start, found)
        if self.dtype == "bfloat16":  # the upper half of a float32
            found = (found.astype(np.uint32) << 16).view(np.float32)
        return found.reshape(self.shape)


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, none of them read, in the order of its header.

    Raises CheckpointError where the file is missing, no regular file or damaged. At most 8 MiB of
    header are read, and every tensor lies within the file.
    """
    try:
        header, first, size = _read_header(path)
    except OSError as error:
        raise CheckpointError(str(path), error.strerror or "cannot be read", REMEDY) from None
    except ValueError as error:
        problem = f"has a header that is not valid JSON ({error})"
        raise CheckpointError(str(path), problem, REMEDY) from None
    header.pop("__metadata__", None)
    try:
        tensors = {name: _entry(path, header, name, first) for name in header}
    except DataError as error:
        raise CheckpointError(*error.args) from None
    _check_places(path, tensors, first, size)
    return tensors


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Header, byte of the first tensor, bytes of the file."""
    with open_regular_file(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(_PREFIX_BYTES) or b"", "little")
        if not 2 <= length <= size - _PREFIX_BYTES:
            raise OSError(0, "is cut short, or no safetensors file")
        if length > MAX_JSON_BYTES:
            raise OSError(0, f"has a header of more than {MAX_JSON_BYTES:,} bytes")
        text = np.empty(length, np.uint8)
    _read_into(path, _PREFIX_BYTES, text)
    return parse_json_object(text.tobytes()), _PREFIX_BYTES + length, size


def _entry(path: Path, header: Mapping[str, Any], name: str, first: int) -> StoredTensor:
    """One tensor of the header; its bytes are as many as its shape has. Raises DataError."""
    record = Record(str(path), header, REMEDY).record(name)
    word, shape, offsets = (
        record.text("dtype"),
        record.integers("shape"),
        record.integers("data_offsets"),
    )
    if word not in _DTYPES:
        raise record.error("dtype", f"is {in_brief(word)}")
    elements, dtype = _DTYPES[word]
    if len(shape) > _MOST_DIMENSIONS or any(size > _MOST_SIZE for size in shape):
        raise record.error("shape", "is larger than any file")
    wanted = math.prod(shape) * np.dtype(elements).itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != wanted:
        raise record.error("data_offsets", f"are not {wanted:,} bytes, as its shape has")
    return StoredTensor(path, name, dtype, shape, elements, first + offsets[0])


def _check_places(
    path: Path, tensors: Mapping[str, StoredTensor], first: int, file_bytes: int
) -> None:
    """One tensor after the other, from the header to the end of the file."""
    place = first
    for tensor in sorted(tensors.values(), key=lambda each: (each.start, math.prod(each.shape))):
        if tensor.start != place:
            problem = f"{in_brief(tensor.name)} does not begin where the tensor before it ends"
            raise CheckpointError(str(path), problem, REMEDY)
        place += math.prod(tensor.shape) * np.dtype(tensor.elements).itemsize
        if place > file_bytes:
            break
    if place != file_bytes:
        problem = f"has {file_bytes:,} bytes, its header speaks of {in_brief(place)}"
        raise CheckpointError(str(path), problem, REMEDY)


def _read_into(path: Path, start: int, found: NDArray[Any]) -> None:
    """Fill an array from a byte on. Raises CheckpointError."""
    flat: Any = found.reshape(-1).view(np.uint8)
    view = memoryview(flat)
    try:
        with open_regular_file(path) as file:
            file.seek(start)
            while len(view):
                count = file.readinto(view)
                if not count:
                    raise OSError(0, "is cut short")
                view = view[count:]
    except OSError as error:
        raise CheckpointError(str(path), error.strerror or "cannot be read", REMEDY) from None


def open_huggingface(source: Path) -> Source:
    """Weights and settings of a directory, or of a safetensors file with config.json beside it.

    Nothing is read but headers and JSON of at most 8 MiB a file. Raises CheckpointError.
    """
    folder = source if source.is_dir() else source.parent
    try:
        config = read_record(folder / CONFIG, missing="is missing", remedy=_REMEDY)
        settings = read_settings(config)
        stored = _stored_tensors(source)
    except DataError as error:
        raise CheckpointError(*error.args) from None
    weights, copies, ignored = _sorted_out(stored)
    return Source(
        path=source,
        name=source.resolve().name or "unnamed",
        form=_form(config, weights),
        weights=weights,
        copies=copies,
        ignored=ignored,
        settings=settings,
        stated_in=config.where,
        folder=folder,
    )


def _stored_tensors(source: Path) -> dict[str, StoredTensor]:
    """By their names in the files."""
    if not source.is_dir():
        if source.suffix != ".safetensors":
            raise CheckpointError(str(source), "is no safetensors file or directory", _REMEDY)
        return read_safetensors(source)
    if os.path.lexists(source / SINGLE) or not os.path.lexists(source / INDEX):
        _check_not_pickled(source)
        return read_safetensors(source / SINGLE)
    record = read_record(source / INDEX, missing="is missing", remedy=_REMEDY)
    names = record.record("weight_map")
    files = {name: names.file_name(name) for name in names.values}
    if len(set(files.values())) > _MOST_FILES:
        raise names.error("files", f"are more than {_MOST_FILES:,}")
    found = {}
    for file in sorted(set(files.values())):
        if not file.endswith(".safetensors"):
            raise names.error(in_brief(file), "is no safetensors file")
        for name, tensor in read_safetensors(source / file).items():
            if files.get(name) != file:
                raise names.error(in_brief(name), f"is in {file}, which the index does not say")
            found[name] = tensor
    for name in files.keys() - found.keys():
        raise names.error(in_brief(name), f"is not in {files[name]}")
    return found


def _check_not_pickled(folder: Path) -> None:
    for name in _PICKLED:
        if (folder / name).exists() and not (folder / SINGLE).exists():
            raise CheckpointError(str(folder / name), "is a pickle", _AS_SAFETENSORS)


def _sorted_out(
    stored: Mapping[str, StoredTensor],
) -> tuple[dict[str, Weight], dict[str, str], dict[str, str]]:
    """Weights by our names, copies of others, and what is passed over."""
    weights: dict[str, Weight] = {}
    ignored = {}
    for name, ours in our_names(stored).items():
        where = f"{stored[name].path}: {in_brief(name)}"
        if ours in BUFFERS:
            _check_buffer(stored[name], where, ours)
            ignored[name] = "numbers that every model has"
        elif ours not in COPIES and not ours.startswith(("bert.", "cls.")):
            ignored[name] = "no part of pre-training"
        elif ours in weights:
            raise CheckpointError(where, f"is {ours} a second time", _REMEDY)
        else:
            weights[ours] = Weight(stored[name], where=where)
    copies = {}
    for copy, original in COPIES.items():
        if copy in weights and original in weights:
            copies[copy] = original
        elif copy in weights:
            weights[original] = weights.pop(copy)
    return weights, copies, ignored


def _check_buffer(tensor: StoredTensor, where: str, name: str) -> None:
    """0, 1, 2 .. for positions, 0 for segments: with others the model would compute otherwise."""
    size = math.prod(tensor.shape)
    if size > _MOST_POSITIONS:
        raise CheckpointError(where, f"has {size:,} numbers", _REMEDY)
    numbers = tensor.read().ravel()
    wanted = np.arange(size) if name.endswith("position_ids") else np.zeros(size)
    if not np.array_equal(numbers, wanted):
        problem = "are not 0, 1, 2 .." if name.endswith("position_ids") else "are not all 0"
        raise CheckpointError(where, f"{problem}, as in every BERT", _REMEDY)


def _form(config: Record, weights: Mapping[str, Weight]) -> str:
    """The class that it was saved from, or what its heads say."""
    classes = config.values.get("architectures")
    named = classes[0] if isinstance(classes, list) and classes else None
    if isinstance(named, str) and named.isidentifier() and named.isascii():
        return named[:_LONGEST_NAME]
    if "cls.seq_relationship.weight" in weights:
        return "BertForPreTraining"
    has_head = any(name.startswith("cls.predictions.") for name in weights)
    return "BertForMaskedLM" if has_head else "BertModel"
