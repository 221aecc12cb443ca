"""Opens a BERT in Hugging Face's form: safetensors, one file or several, and config.json.

Anybody may have written the files: their headers are checked, tensors read when asked.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mlperf_bert.checkpoint.huggingface.weights import (
    BUFFERS,
    COPIES,
    Source,
    Weight,
    our_names,
    read_settings,
)
from mlperf_bert.checkpoint.tensors import StoredTensor, read_safetensors
from mlperf_bert.common.errors import CheckpointError, DataError
from mlperf_bert.common.records import Record, read_record
from mlperf_bert.common.untrusted import in_brief

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
