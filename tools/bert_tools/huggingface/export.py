"""Export of a checkpoint to a directory that `transformers` loads: weights, config, tokenizer.

Digests are checked first, and the directory is complete or absent. Importing it again gives the
same weights, bit for bit. If the accuracy is known, a model card is added.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from bert_tools.huggingface.card import CARD, model_card, read_facts
from bert_tools.huggingface.conversion import parameter_shapes
from bert_tools.huggingface.reader import CONFIG, SINGLE
from bert_tools.huggingface.tokenizer import tokenizer_files
from bert_tools.huggingface.weights import (
    FAMILIES,
    rows_that_matter,
    stated_settings,
)
from mlperf_bert.checkpoint.manifest import (
    ELSE,
    INITIALIZED_FROM,
    MODEL,
    STATE,
    read_config,
    read_manifest,
    read_state,
    resolve,
    verify_files,
)
from mlperf_bert.checkpoint.tensors import (
    read_tensors,
    write_tensors,
)
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.errors import CheckpointError
from mlperf_bert.files import new_directory, write_file
from mlperf_bert.vocabulary.any_vocabulary import vocabulary_of

_SPARE_BYTES = 16 * 2**20  # of tokenizer files


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export: class of `transformers`, and counts."""

    architecture: str
    out: str
    tensors: int
    parameters: int
    word_rows: int
    step: int


def export_huggingface(checkpoint: Path, out: Path, vocabulary: Path | None = None) -> Exported:
    """Write `out`, which must not exist. Raises CheckpointError, ConfigError or DataError."""
    found = resolve(checkpoint)
    manifest = read_manifest(found)
    verify_files(found, manifest, (MODEL, STATE))
    state = read_state(found)
    words = vocabulary_of(found, manifest.vocabulary_sha256, vocabulary)
    run_config = read_config(found)
    model = run_config.model
    facts = read_facts(found.absolute().parents[1], state)
    tensors = read_tensors(found / MODEL)
    if {name: (tuple(each.shape), each.dtype) for name, each in tensors.items()} != {
        name: (shape, torch.float32) for name, shape in parameter_shapes(model).items()
    }:
        raise CheckpointError(str(found / MODEL), "does not hold the model of its config", ELSE)
    family = FAMILIES[model.architecture]
    table, bias = (tensors[name].numpy() for name in family.fills)
    num_rows = rows_that_matter(table, bias, len(words))
    for name in family.fills:
        tensors[name] = tensors[name][:num_rows]
    task = "PreTraining" if model.objective == "mlm_nsp" else "MaskedLM"
    architecture = f"{family.class_name}For{task}"
    num_bytes = sum(each.nbytes for each in tensors.values())
    metadata = {"format": "pt", "source": f"mlperf_bert {manifest.version}, step {state.step}"}
    with new_directory(out, num_bytes + _SPARE_BYTES) as folder:
        write_tensors(folder / SINGLE, tensors, metadata)
        config = config_json(model, architecture, num_rows, words.pad_id)
        files = tokenizer_files(words, model)
        if facts is not None:
            origin = manifest.origin.get(INITIALIZED_FROM, run_config.run.init_checkpoint)
            files[CARD] = model_card(run_config, architecture, state.samples, facts, origin)
        for name, contents in {CONFIG: config, **files}.items():
            write_file(folder / name, contents)
    return Exported(
        architecture=architecture,
        out=str(out),
        tensors=len(tensors),
        parameters=num_bytes // 4,
        word_rows=num_rows,
        step=state.step,
    )


def config_json(model: ModelSection, architecture: str, num_rows: int, pad_token_id: int) -> bytes:
    """The contents of config.json for a word embedding of `num_rows`."""
    values = {
        "architectures": [architecture],
        **stated_settings(model),
        "vocab_size": num_rows,
        "pad_token_id": pad_token_id,
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    return (json.dumps(values, indent=1, sort_keys=True) + "\n").encode("ascii")
