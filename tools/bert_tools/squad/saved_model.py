"""Reads a fine-tuned model: what `squad train` wrote, or `transformers` in safetensors."""

from pathlib import Path

import numpy as np
import torch

from bert_tools.squad.model import parameter_shapes
from bert_tools.squad.weights import Start
from mlperf_bert.checkpoint.huggingface.reader import CONFIG, SINGLE
from mlperf_bert.checkpoint.huggingface.tokenizer import find_vocabulary
from mlperf_bert.checkpoint.huggingface.weights import (
    MOST_SPARE_ROWS,
    WORDS,
    read_settings,
    with_rows,
)
from mlperf_bert.checkpoint.tensors import StoredTensor, read_safetensors
from mlperf_bert.common.errors import CheckpointError
from mlperf_bert.common.records import read_record
from mlperf_bert.common.untrusted import file_sha256
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.vocabulary.any_vocabulary import AnyVocabulary

_REMEDY = "give the `model` directory of a run, or a BertForQuestionAnswering in safetensors"


def read_model(folder: Path, vocabulary: Path | None = None) -> tuple[Start, AnyVocabulary]:
    """The model and its vocabulary; `vocabulary` is read in the place of the one beside it.

    Raises CheckpointError, DataError or ConfigError where one of them is missing or damaged, or the
    weights are of another model.
    """
    config = read_record(folder / CONFIG, missing="is missing", remedy=_REMEDY)
    model = ModelSection(**read_settings(config), objective="mlm")
    stored = read_safetensors(folder / SINGLE)
    words = find_vocabulary(folder, vocabulary)
    if len(words) > model.padded_vocab_size:
        problem = f"has {len(words):,} tokens, the model {model.vocab_size:,}"
        raise CheckpointError(str(folder), problem, "give its own vocabulary with --vocab")
    weights = {}
    for name, shape in parameter_shapes(model).items():
        weights[name] = torch.from_numpy(_numbers(folder, stored.get(name), name, shape))
    return Start(model, weights, file_sha256(folder / SINGLE)), words


def _numbers(
    folder: Path, tensor: StoredTensor | None, name: str, shape: tuple[int, ...]
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    if tensor is None:
        raise CheckpointError(str(folder / SINGLE), f"has no {name}", _REMEDY)
    spare = shape[0] - tensor.shape[0] if name == WORDS and tensor.shape else 0
    fits = tensor.shape[1:] == shape[1:] and 0 <= spare <= MOST_SPARE_ROWS
    if tensor.shape != shape and not (spare and fits):
        problem = f"has {name} of {list(tensor.shape)}, its config says {list(shape)}"
        raise CheckpointError(str(folder / SINGLE), problem, "give config and weights of one model")
    if tensor.dtype.startswith("int"):
        raise CheckpointError(str(folder / SINGLE), f"has {name} in {tensor.dtype}", _REMEDY)
    found = np.ascontiguousarray(tensor.read(), dtype=np.float32)
    return with_rows(found, shape[0], 0.0) if spare else found
