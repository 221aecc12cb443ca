"""A checkpoint becomes a directory that `transformers` loads: weights, config and tokenizer.

Digests are checked first, tensors are copied one at a time, and the directory is complete or is not
there. Importing it again gives the same weights, bit for bit.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlperf_bert.checkpoint.huggingface.names import FIXED, NUMBERS, SIZES, WORD_BIAS, WORDS
from mlperf_bert.checkpoint.huggingface.reader import CONFIG, SINGLE, StoredTensor, read_safetensors
from mlperf_bert.checkpoint.huggingface.tokenizer import remarks_on, tokenizer_files
from mlperf_bert.checkpoint.huggingface.weights import parameter_shapes, rows_that_matter
from mlperf_bert.checkpoint.manifest import (
    ELSE,
    MODEL,
    STATE,
    read_config,
    read_manifest,
    resolve,
    verify_files,
)
from mlperf_bert.checkpoint.state import read_state
from mlperf_bert.checkpoint.tensor_file import write_one_by_one
from mlperf_bert.common.atomic import new_directory, write_file
from mlperf_bert.common.errors import CheckpointError
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.vocabulary.any_vocabulary import vocabulary_of

_SPARE_BYTES = 16 * 2**20  # of tokenizer files


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: class of `transformers`, tensors, their numbers, rows of words, remarks."""

    architecture: str
    out: str
    tensors: int
    parameters: int
    word_rows: int
    step: int
    remarks: tuple[str, ...]


def export_huggingface(
    checkpoint: Path, out: Path, vocabulary: Path | None, data: Path | None
) -> Exported:
    """Write `out`, which must not be there. Raises CheckpointError, ConfigError or DataError."""
    found = resolve(checkpoint)
    manifest = read_manifest(found)
    verify_files(found, manifest, (MODEL, STATE))
    state = read_state(found)
    words = vocabulary_of(found, manifest.vocabulary_sha256, vocabulary, data)
    model = read_config(found).model
    tensors = _tensors(found, model)
    num_rows = rows_that_matter(tensors[WORDS].read(), tensors[WORD_BIAS].read(), len(words))
    kinds = {
        name: (torch.float32, (num_rows, *tensor.shape[1:]) if _has_words(name) else tensor.shape)
        for name, tensor in tensors.items()
    }

    def weight(name: str) -> Tensor:
        values: NDArray[np.float32] = tensors[name].read()
        return torch.from_numpy(values[:num_rows] if _has_words(name) else values)

    architecture = "BertForPreTraining" if model.objective == "mlm_nsp" else "BertForMaskedLM"
    num_bytes = 4 * sum(math.prod(shape) for _, shape in kinds.values())
    metadata = {"format": "pt", "source": f"mlperf_bert {manifest.version}, step {state.step}"}
    with new_directory(out, num_bytes + _SPARE_BYTES) as folder:
        write_one_by_one(folder / SINGLE, kinds, weight, metadata)
        config = config_json(model, architecture, num_rows, words.pad_id)
        write_file(folder / CONFIG, config)
        files = tokenizer_files(words, model.max_position_embeddings)
        for name, contents in files.items():
            write_file(folder / name, contents)
    return Exported(
        architecture=architecture,
        out=str(out),
        tensors=len(kinds),
        parameters=num_bytes // 4,
        word_rows=num_rows,
        step=state.step,
        remarks=remarks_on(words, files),
    )


def _has_words(name: str) -> bool:
    return name in (WORDS, WORD_BIAS)


def _tensors(found: Path, model: ModelSection) -> dict[str, StoredTensor]:
    """Those of the model, exactly. Raises CheckpointError."""
    stored = read_safetensors(found / MODEL)
    shapes = parameter_shapes(model)
    if {name: (tensor.shape, tensor.dtype) for name, tensor in stored.items()} != {
        name: (shape, "float32") for name, shape in shapes.items()
    }:
        raise CheckpointError(str(found / MODEL), "does not hold the model of its config", ELSE)
    return stored


def config_json(model: ModelSection, architecture: str, num_rows: int, pad_token_id: int) -> bytes:
    """The contents of config.json for a word embedding of `num_rows`."""
    names = {**SIZES, **NUMBERS, "type_vocab_size": "type_vocab_size"}
    values = {
        "architectures": [architecture],
        **FIXED,
        **{theirs: getattr(model, ours) for theirs, ours in names.items()},
        "vocab_size": num_rows,
        "pad_token_id": pad_token_id,
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    return (json.dumps(values, indent=1, sort_keys=True) + "\n").encode("ascii")
