"""Reader of weights in Hugging Face's form: a safetensors file and config.json.

The safetensors library reads the files, and nothing is unpickled: these models are other people's.
Opening a directory reads headers and JSON only, as the library maps the tensors.
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
from mlperf_bert.checkpoint.tensors import NEXT_SENTENCE
from mlperf_bert.checkpoint.weights_directory import HUGGINGFACE, check_directory
from mlperf_bert.errors import CheckpointError, DataError, one_line
from mlperf_bert.files import file_size, in_brief, is_there, read_json, reading

SINGLE = "model.safetensors"
CONFIG = "config.json"
REMEDY = "give a directory with config.json and model.safetensors, as save_pretrained makes it"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_AS_SAFETENSORS = (
    "pickle can run code: where you trust it, write it anew with transformers, "
    "AutoModelForPreTraining.from_pretrained(DIR).save_pretrained(OTHER), and give that directory"
)
_WHOLE = "give a complete file, as its source has it"


def is_huggingface(directory: Path) -> bool:
    """True if a directory has Hugging Face's form, and is no checkpoint of ours."""
    ours = (directory / name for name in (MANIFEST, LATEST))
    return is_there(directory / CONFIG) and not any(map(is_there, ours))


def open_huggingface(folder: Path) -> Source:
    """Weights and settings of a directory; it reads only headers and JSON.

    Raises CheckpointError.
    """
    check_directory(folder, HUGGINGFACE)
    path = folder / CONFIG
    try:
        config = read_json(path, missing="is missing", remedy=REMEDY)
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
    """Tensors of a directory's file by their names. Raises CheckpointError."""
    if is_there(folder / SINGLE):
        return read_safetensors(folder / SINGLE)
    for name in _PICKLED:
        if is_there(folder / name):
            raise CheckpointError(str(folder / name), "is a pickle", _AS_SAFETENSORS)
    raise CheckpointError(str(folder / SINGLE), "is missing", REMEDY)


def _sorted_out(
    folder: Path, stored: Mapping[str, Tensor], family: Family
) -> tuple[dict[str, Weight], dict[str, str]]:
    """Weights by our names; ignored tensors, and the reason for each.

    Models of other tasks have a part of the masked-LM head too, without its bias.
    """
    names = our_names(stored, family)
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    if twice:
        raise CheckpointError(str(folder), f"holds {twice[0]} twice, in two spellings", REMEDY)
    found = {
        ours: _weight(stored[name], f"{folder}: {in_brief(name)}") for name, ours in names.items()
    }
    head = family.head if family.word_bias in found else ()
    parts = (family.body, *NEXT_SENTENCE, *head)
    weights, ignored = {}, {}
    for name, ours in names.items():
        original = family.copies.get(ours)
        if ours in family.buffers:
            ignored[name] = "numbers that every model has"
        elif not ours.startswith(parts):
            ignored[name] = "no part of pre-training"
        elif original in found:
            _check_copy(found[ours], found[original], original)
            ignored[name] = f"equal to {original}"
        else:
            weights[ours] = found[ours]
    return weights, ignored


def _weight(tensor: Tensor, where: str) -> Weight:
    """A tensor of the file as a weight; numpy has no bfloat16, so that is read as float32."""
    is_brain = tensor.dtype == torch.bfloat16
    return Weight(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        load=lambda: (tensor.float() if is_brain else tensor).numpy(),
        where=where,
    )


def _check_copy(copy: Weight, original: Weight, name: str) -> None:
    if copy.shape != original.shape or not np.array_equal(copy.read(), original.read()):
        problem = f"is not equal to {name}, to which this program ties it"
        raise CheckpointError(copy.where, problem, "give a model with a tied decoder")


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, mapped. Raises CheckpointError if the file is missing or damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        file_size(path, _WHOLE)  # refuses a pipe, on which the library would wait
        return load_file(path)
    except DataError as error:
        raise CheckpointError(*error.args) from None
    except (OSError, SafetensorError) as error:
        problem = f"is no whole safetensors file ({error})"
        raise CheckpointError(str(path), problem, _WHOLE) from None
