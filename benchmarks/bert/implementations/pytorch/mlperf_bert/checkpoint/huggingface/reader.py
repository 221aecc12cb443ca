"""Reader of weights in Hugging Face's form: one or more safetensors files and config.json.

The files are untrusted: headers are checked, and tensors are read on request. The library reads
them; this file refuses input that it would accept: a pipe, a header beyond 8 MiB, a duplicate name.
Importing this file imports no torch.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.checkpoint.huggingface.weights import (
    FAMILIES,
    MASKED_LM,
    PAIRS,
    Family,
    Source,
    Weight,
    our_names,
    read_settings,
)
from mlperf_bert.common.errors import CheckpointError, DataError
from mlperf_bert.common.records import Record, read_record
from mlperf_bert.common.untrusted import (
    MAX_JSON_BYTES,
    in_brief,
    open_regular_file,
    parse_json_object,
)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_AS_SAFETENSORS = (
    "pickle can run code: where you trust it, write it anew with transformers, "
    "AutoModelForPreTraining.from_pretrained(DIR).save_pretrained(OTHER), and give that directory"
)
_MOST_FILES = 1000
_MOST_POSITIONS = 2**20
_LONGEST_NAME = 60
_WHOLE = "give a complete file, as its source has it"
_PREFIX_BYTES = 8  # the header's length
_MOST_DIMENSIONS, _MOST_SIZE = 8, 2**40  # limit of a tensor, and of a dimension
_KINDS = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint"}  # the format's word -> ours
# Weights, and the integers in which older files keep positions.
_READABLE = frozenset(("float64", "float32", "float16", "bfloat16", "int64", "int32"))
REMEDY = "give a directory with config.json and model.safetensors, as save_pretrained makes it"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file; see `SourceTensor`."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Any  # the library's

    def read(self) -> NDArray[Any]:
        """Read the numbers, bfloat16 as float32.

        Raises CheckpointError if the file was truncated since, or holds numbers of another kind
        there.
        """
        from safetensors import SafetensorError

        if self.dtype not in _READABLE:
            problem = f"{in_brief(self.name)} holds {self.dtype}"
            raise CheckpointError(str(self.path), problem, "give weights of 16, 32 or 64 bits")
        try:
            found = self.file.get_tensor(self.name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(str(self.path), f"is cut short ({error})", _WHOLE) from None
        numbers: NDArray[Any] = (found.float() if self.dtype == "bfloat16" else found).numpy()
        return numbers


def open_huggingface(source: Path) -> Source:
    """Weights and settings of a directory, or of a safetensors file with config.json beside it.

    It reads only headers and JSON, at most 8 MiB per file. Raises CheckpointError.
    """
    folder = source if source.is_dir() else source.parent
    try:
        config = read_record(folder / CONFIG, missing="is missing", remedy=REMEDY)
        settings = read_settings(config)
        stored = _stored_tensors(source)
    except DataError as error:
        raise CheckpointError(*error.args) from None
    family = FAMILIES[settings["architecture"]]
    weights, copies, ignored = _sorted_out(stored, family)
    return Source(
        path=source,
        name=source.resolve().name or "unnamed",
        form=_form(config, weights, family),
        weights=weights,
        copies=copies,
        ignored=ignored,
        settings=settings,
        stated_in=config.where,
        folder=folder,
    )


def _stored_tensors(source: Path) -> dict[str, StoredTensor]:
    """Tensors by their names in the files."""
    if not source.is_dir():
        if source.suffix != ".safetensors":
            raise CheckpointError(str(source), "is no safetensors file or directory", REMEDY)
        return read_safetensors(source)
    if os.path.lexists(source / SINGLE) or not os.path.lexists(source / INDEX):
        _check_not_pickled(source)
        return read_safetensors(source / SINGLE)
    record = read_record(source / INDEX, missing="is missing", remedy=REMEDY)
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


def names_of_weights(folder: Path, family: Family) -> set[str]:
    """Our names of the tensors in a directory. Raises CheckpointError."""
    path = folder / SINGLE
    if not os.path.lexists(path) and os.path.lexists(folder / INDEX):
        path = folder / INDEX
    else:
        _check_not_pickled(folder)
    try:
        if path.name == INDEX:
            record = read_record(path, missing="is missing", remedy=REMEDY)
            return set(our_names(record.record("weight_map").values, family).values())
        return set(our_names(_read_header(path), family).values())
    except DataError as error:
        raise CheckpointError(*error.args) from None
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or "is no whole safetensors file"
        raise CheckpointError(str(path), problem, REMEDY) from None


def _check_not_pickled(folder: Path) -> None:
    for name in _PICKLED:
        if (folder / name).exists() and not (folder / SINGLE).exists():
            raise CheckpointError(str(folder / name), "is a pickle", _AS_SAFETENSORS)


def _sorted_out(
    stored: Mapping[str, StoredTensor], family: Family
) -> tuple[dict[str, Weight], dict[str, str], dict[str, str]]:
    """Weights by our names, duplicates, and ignored tensors."""
    weights: dict[str, Weight] = {}
    ignored = {}
    names, prefixes = our_names(stored, family), family.prefixes
    if family.word_bias not in names.values():
        prefixes = tuple(each for each in prefixes if each != family.head_of_any_task)
    for name, ours in names.items():
        where = f"{stored[name].path}: {in_brief(name)}"
        if ours in family.buffers:
            _check_buffer(stored[name], where, ours)
            ignored[name] = "numbers that every model has"
        elif ours not in family.copies and not ours.startswith(prefixes):
            ignored[name] = "no part of pre-training"
        elif ours in weights:
            raise CheckpointError(where, f"is {ours} a second time", REMEDY)
        else:
            weights[ours] = Weight(stored[name], where=where)
    copies = {}
    for copy, original in family.copies.items():
        if copy in weights and original in weights:
            copies[copy] = original
        elif copy in weights:
            weights[original] = weights.pop(copy)
    return weights, copies, ignored


def _check_buffer(tensor: StoredTensor, where: str, name: str) -> None:
    """Check for 0, 1, 2 .. as positions and 0 as segments; others would change the results."""
    size = math.prod(tensor.shape)
    if size > _MOST_POSITIONS:
        raise CheckpointError(where, f"has {size:,} numbers", REMEDY)
    numbers = tensor.read().ravel()
    wanted = np.arange(size) if name.endswith("position_ids") else np.zeros(size)
    if not np.array_equal(numbers, wanted):
        problem = "are not 0, 1, 2 .." if name.endswith("position_ids") else "are not all 0"
        raise CheckpointError(where, f"{problem}, as in every BERT", REMEDY)


def _form(config: Record, weights: Mapping[str, Weight], family: Family) -> str:
    """The class that the weights were saved from, else a description of their heads."""
    classes = config.values.get("architectures")
    named = classes[0] if isinstance(classes, list) and classes else None
    if isinstance(named, str) and named.isidentifier() and named.isascii():
        return named[:_LONGEST_NAME]
    if PAIRS in weights:
        return "BertForPreTraining"
    parts = tuple(prefix for prefix, head in family.heads.items() if head == MASKED_LM)
    has_head = any(name.startswith(parts) for name in weights)
    return f"{family.class_name}{'ForMaskedLM' if has_head else 'Model'}"


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, without reading them.

    Raises CheckpointError if the file is missing, no regular file or damaged. At most 8 MiB of
    header are read, and every tensor lies within the file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        _read_header(path)
        # Not mapped: truncating a mapped file would end this process.
        file: Any = safe_open(path, framework="pt", backend="pread")
    except SafetensorError as error:
        problem = f"is no whole safetensors file ({error})"
        raise CheckpointError(str(path), problem, _WHOLE) from None
    except OSError as error:
        raise CheckpointError(str(path), error.strerror or "cannot be read", _WHOLE) from None
    except ValueError as error:
        problem = f"has a header that is not valid JSON ({error})"
        raise CheckpointError(str(path), problem, _WHOLE) from None
    found = {}
    for name in file.keys():  # noqa: SIM118 (no mapping)
        about = file.get_slice(name)
        dtype = re.sub(r"^(BF|F|I|U)(?=\d)", lambda kind: _KINDS[kind[1]], about.get_dtype())
        shape = tuple(about.get_shape())
        if len(shape) > _MOST_DIMENSIONS or any(size > _MOST_SIZE for size in shape):
            raise CheckpointError(f"{path}: {in_brief(name)}", "is larger than any file", _WHOLE)
        found[name] = StoredTensor(path, name, dtype.lower(), shape, file)
    return found


def _read_header(path: Path) -> dict[str, Any]:
    """Read the header, if it is safe for the library. Raises OSError, ValueError."""
    with BufferedReader(open_regular_file(path)) as file:
        length = int.from_bytes(file.read(_PREFIX_BYTES), "little")
        if length > MAX_JSON_BYTES:
            raise OSError(0, f"has a header of more than {MAX_JSON_BYTES:,} bytes")
        return parse_json_object(file.read(length))
