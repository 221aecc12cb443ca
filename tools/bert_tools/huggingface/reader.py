"""A reader of weights in the format of Hugging Face, which are safetensors files and config.json.

The safetensors library reads the weights. Pickles are not supported, because a pickle from an
untrusted source can run code. Opening a directory reads only the headers and the JSON files,
because the library maps the tensors into memory.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bert_tools.huggingface.weights import (
    FAMILIES,
    Family,
    Source,
    Weight,
    our_names,
    read_settings,
)
from mlperf_bert.checkpoint.manifest import LATEST, MANIFEST
from mlperf_bert.checkpoint.tensors import NEXT_SENTENCE, read_tensors
from mlperf_bert.checkpoint.weights_directory import HUGGINGFACE, check_directory
from mlperf_bert.errors import CheckpointError, DataError, one_line
from mlperf_bert.files import file_size, in_brief, is_there, read_json, reading

SINGLE = "model.safetensors"
CONFIG = "config.json"
REMEDY = "pass a directory written by save_pretrained(), with config.json and model.safetensors"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_SHARDED = "model.safetensors.index.json"
_SAVED_AGAIN = (
    "convert it with transformers: "
    "AutoModelForPreTraining.from_pretrained(DIR).save_pretrained(OTHER), and pass OTHER"
)
_WHOLE = "download or copy the complete file again"


def is_huggingface(directory: Path) -> bool:
    """Return whether a directory has Hugging Face's format and is not one of our checkpoints."""
    ours = (directory / name for name in (MANIFEST, LATEST))
    return is_there(directory / CONFIG) and not any(map(is_there, ours))


def open_huggingface(folder: Path) -> Source:
    """Open the weights and settings of a directory, without reading the weights.

    Only the headers and the JSON files are read. Raises CheckpointError if a file is missing,
    damaged or not supported.
    """
    check_directory(folder, HUGGINGFACE, accepts_names=True)
    path = folder / CONFIG
    try:
        config = read_json(path, missing="no such file", remedy=REMEDY)
        with reading(path, REMEDY):
            settings = read_settings(config)
        stored = _stored_tensors(folder)
    except DataError as error:
        raise CheckpointError(*error.args) from None
    family = FAMILIES[settings["architecture"]]
    weights, ignored = _sorted_out(folder, stored, family)
    classes = config.get("architectures")
    named = classes[0] if isinstance(classes, list) and classes else family.class_name
    return Source(
        folder=folder,
        name=folder.absolute().name,
        form=one_line(str(named)),
        weights=weights,
        ignored=ignored,
        settings=settings,
        stated_in=path,
    )


def _stored_tensors(folder: Path) -> dict[str, Tensor]:
    """Map the tensors of a directory into memory, and return them by name.

    Raises CheckpointError if the directory contains no intact safetensors file.
    """
    if is_there(folder / SINGLE):
        return read_safetensors(folder / SINGLE)
    for name in _PICKLED:
        if is_there(folder / name):
            problem = "this file is a pickle, which can run code when it is loaded"
            raise CheckpointError(str(folder / name), problem, f"if you trust it, {_SAVED_AGAIN}")
    if is_there(folder / _SHARDED):
        problem = f"lists weights in several files, but only {SINGLE} is read"
        raise CheckpointError(str(folder / _SHARDED), problem, _SAVED_AGAIN)
    raise CheckpointError(str(folder / SINGLE), "no such file", REMEDY)


def _sorted_out(
    folder: Path, stored: Mapping[str, Tensor], family: Family
) -> tuple[dict[str, Weight], list[str]]:
    """Return the weights by our names, and the names of the ignored tensors.

    Models for other tasks may have a part of a masked-LM head, but not the bias of its decoder. In
    this case, the part is ignored.
    """
    names = our_names(stored, family)
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    if twice:
        problem = f"contains two tensors for {twice[0]}, with different names"
        raise CheckpointError(str(folder), problem, REMEDY)
    found = {
        ours: _weight(stored[name], f"{folder}: {in_brief(name)}") for name, ours in names.items()
    }
    head = family.head if family.word_bias in found else ()
    parts = (family.body, *NEXT_SENTENCE, *head)
    weights, ignored = {}, []
    for name, ours in names.items():
        original = family.copies.get(ours)
        if ours in family.buffers or not ours.startswith(parts):
            ignored.append(name)
        elif original in found:
            _check_copy(found[ours], found[original], original)
            ignored.append(name)
        else:
            weights[ours] = found[ours]
    return weights, ignored


def _weight(tensor: Tensor, where: str) -> Weight:
    """Return a tensor as a `Weight`.

    bfloat16 is converted to float32, because numpy has no bfloat16.
    """
    is_bfloat16 = tensor.dtype == torch.bfloat16
    return Weight(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        load=lambda: (tensor.float() if is_bfloat16 else tensor).numpy(),
        where=where,
    )


def _check_copy(copy: Weight, original: Weight, name: str) -> None:
    """Raise CheckpointError unless `copy` is equal to the `original` weight, called `name`."""
    if copy.shape != original.shape or not np.array_equal(copy.read(), original.read()):
        problem = f"differs from {name}, but this program uses the same weight for both tensors"
        raise CheckpointError(copy.where, problem, "pass a model with a tied decoder")


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Map the tensors of a safetensors file into memory, by name.

    Raises CheckpointError if the file is missing or damaged.
    """
    try:
        file_size(path, _WHOLE)  # raises for a pipe, on which the library would wait forever
    except DataError as error:
        raise CheckpointError(*error.args) from None
    return read_tensors(path, _WHOLE)
