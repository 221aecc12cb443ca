"""First and last weights of fine-tuning: made, read and written."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bert_tools.huggingface.export import config_json
from bert_tools.huggingface.reader import (
    CONFIG,
    SINGLE,
    StoredTensor,
    read_safetensors,
)
from bert_tools.huggingface.tokenizer import find_vocabulary, tokenizer_files
from bert_tools.huggingface.weights import (
    FAMILIES,
    MOST_SPARE_ROWS,
    read_settings,
    with_rows,
)
from bert_tools.squad.model import draw_weights, parameter_shapes
from mlperf_bert import package_version
from mlperf_bert.checkpoint.manifest import (
    ELSE,
    MODEL,
    STATE,
    read_config,
    read_manifest,
    resolve,
    verify_files,
)
from mlperf_bert.checkpoint.tensors import write_tensors
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.errors import CheckpointError, ConfigError
from mlperf_bert.files import file_sha256, new_directory, read_json, reading, write_file
from mlperf_bert.vocabulary.any_vocabulary import AnyVocabulary

_SPARE_BYTES = 16 * 2**20  # limit on tokenizer files
_HEADS = ("qa_outputs.", "classifier.")  # weights for pre-training have all else
_REMEDY = "give the `model` directory of a run, or a model for questions in safetensors"


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a run: the model, its weights (float32, on the host), and their origin.

    `origin` is the digest of a checkpoint's weights, or "random".
    """

    model: ModelSection
    weights: Mapping[str, Tensor]
    origin: str


def start_from(checkpoint: Path, vocabulary_sha256: str, seed: int) -> Start:
    """The body of a checkpoint of this program, of any size, with a new head.

    Raises CheckpointError if it is damaged, incomplete, or its vocabulary is not that of the
    windows. `seed` is for the head.
    """
    found = resolve(checkpoint)
    manifest = read_manifest(found)
    if manifest.vocabulary_sha256 != vocabulary_sha256:
        problem, remedy = "was trained with another vocabulary", "give its own with --vocab"
        raise CheckpointError(str(found), problem, remedy)
    verify_files(found, manifest, (MODEL, STATE))
    model = read_config(found).model
    drawn = draw_weights(model, seed)
    try:
        stored = load_file(found / MODEL)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(str(found / MODEL), f"unreadable ({error})", ELSE) from None
    weights = {name: drawn[name] if name.startswith(_HEADS) else stored.get(name) for name in drawn}
    checked: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if tensor is None or tensor.shape != drawn[name].shape:
            problem = f"does not hold {name} of {list(drawn[name].shape)}"
            raise CheckpointError(str(found / MODEL), problem, ELSE)
        checked[name] = tensor.float()
    # Attention and kernels are chosen for this machine, not the checkpoint's.
    plain = replace(model, attention="auto", kernels="auto", precision="fp32")
    return Start(plain, checked, manifest.files[MODEL].sha256)


def check_fits(model: ModelSection, num_tokens: int, max_length: int) -> None:
    """Raise ConfigError for a vocabulary or windows that are too large for a model."""
    if num_tokens > model.padded_vocab_size:
        problem = f"has {num_tokens:,} tokens, the model {model.padded_vocab_size:,}"
        raise ConfigError("--vocab", problem, "give the model's own")
    if max_length > model.max_position_embeddings:
        problem = f"is {max_length}, the model reads {model.max_position_embeddings} tokens at most"
        raise ConfigError("--max-length", problem, "lower it")


def save_for_transformers(
    out: Path, model: ModelSection, weights: Mapping[str, Tensor], vocabulary: AnyVocabulary
) -> None:
    """Write, in one step, a directory that `transformers` loads as a model for questions.

    `weights` are those of the whole model on the host, written as float32 beside the vocabulary's
    files. Raises CheckpointError if `out` exists or cannot be written.
    """
    tensors = {name: each.to(torch.float32).contiguous() for name, each in weights.items()}
    assert {name: tuple(each.shape) for name, each in tensors.items()} == parameter_shapes(model)
    num_bytes = 4 * sum(math.prod(each.shape) for each in tensors.values())
    metadata = {"format": "pt", "source": f"mlperf_bert squad train, {package_version()}"}
    with new_directory(out, num_bytes + _SPARE_BYTES) as folder:
        write_tensors(folder / SINGLE, tensors, metadata)
        architecture = f"{FAMILIES[model.architecture].class_name}ForQuestionAnswering"
        contents = config_json(model, architecture, model.padded_vocab_size, vocabulary.pad_id)
        write_file(folder / CONFIG, contents)
        for name, file in tokenizer_files(vocabulary, model).items():
            write_file(folder / name, file)


def read_model(folder: Path, vocabulary: Path | None = None) -> tuple[Start, AnyVocabulary]:
    """Read a model and its vocabulary; `vocabulary` replaces the one beside the model.

    Raises CheckpointError, DataError or ConfigError if one of them is missing or damaged, or the
    weights belong to another model.
    """
    config = read_json(folder / CONFIG, missing="is missing", remedy=_REMEDY)
    with reading(folder / CONFIG, _REMEDY):
        model = ModelSection(**read_settings(config), objective="mlm")
    stored = read_safetensors(folder / SINGLE)
    words = find_vocabulary(folder, vocabulary)
    if len(words) > model.padded_vocab_size:
        problem = f"has {len(words):,} tokens, the model {model.vocab_size:,}"
        raise CheckpointError(str(folder), problem, "give its own vocabulary with --vocab")
    weights = {}
    table = FAMILIES[model.architecture].words
    for name, shape in parameter_shapes(model).items():
        spare = MOST_SPARE_ROWS if name == table else 0
        weights[name] = torch.from_numpy(_numbers(folder, stored.get(name), name, shape, spare))
    return Start(model, weights, file_sha256(folder / SINGLE)), words


def _numbers(
    folder: Path, tensor: StoredTensor | None, name: str, shape: tuple[int, ...], most_spare: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    if tensor is None:
        raise CheckpointError(str(folder / SINGLE), f"has no {name}", _REMEDY)
    spare = shape[0] - tensor.shape[0] if most_spare and tensor.shape else 0
    fits = tensor.shape[1:] == shape[1:] and 0 <= spare <= most_spare
    if tensor.shape != shape and not (spare and fits):
        problem = f"has {name} of {list(tensor.shape)}, its config says {list(shape)}"
        raise CheckpointError(str(folder / SINGLE), problem, "give config and weights of one model")
    if tensor.dtype.startswith("int"):
        raise CheckpointError(str(folder / SINGLE), f"has {name} in {tensor.dtype}", _REMEDY)
    found = np.ascontiguousarray(tensor.read(), dtype=np.float32)
    return with_rows(found, shape[0], 0.0) if spare else found
