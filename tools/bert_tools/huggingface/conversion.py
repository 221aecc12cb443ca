"""Conversion of another program's weights to a checkpoint.

A conversion is planned and checked completely before anything is written. The checkpoint contains
the weights, a config that describes the model, and the vocabulary. Its manifest records the origin
of the weights. A converted checkpoint contains no optimizer state.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from bert_tools.huggingface.tokenizer import find_vocabulary
from bert_tools.huggingface.weights import MOST_SPARE_ROWS, Source, with_rows
from mlperf_bert import git_commit, package_version
from mlperf_bert.checkpoint.first_weights import RATE_TO_CONTINUE, settings_of
from mlperf_bert.checkpoint.manifest import (
    MANIFEST,
    MODEL,
    STATE,
    CheckpointState,
    FileEntry,
    Manifest,
    step_of,
)
from mlperf_bert.checkpoint.tensors import NEXT_SENTENCE, write_tensors
from mlperf_bert.config.files import (
    config_from_tables,
    config_to_tables,
    find_config,
    read_toml,
    tables_to_toml,
)
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import ARCHITECTURES, ModelSection
from mlperf_bert.errors import CheckpointError
from mlperf_bert.files import in_brief, new_directory, write_file
from mlperf_bert.model.bert import BertForPretraining, initial_weights
from mlperf_bert.seeds import derive_seed
from mlperf_bert.vocabulary.any_vocabulary import AnyVocabulary, file_name

Missing = Literal["refuse", "draw"]
HEAD = "masked-LM head"
STARTING = "train.toml"
_ABOUT_STARTING = """\
# A config to continue training the weights in this directory. [model] describes these weights. The
# other sections are those of pretrain_cpu, except that the learning rate is a tenth, which is not
# tuned. Set the number of steps and the batch size to fit your data.
"""
_SPARE_BYTES = 2**20  # for JSON and headers


@dataclass(frozen=True, slots=True)
class Conversion:
    """The plan of a conversion, made before anything is written.

    `shapes` maps the names of our parameters to shapes. `drawn` names the parameters to initialize
    randomly, which are those of the masked-LM head if the source has none. `ignored` names the
    tensors of the source that are not used.
    """

    source: Source
    config: RunConfig
    vocabulary: AnyVocabulary
    shapes: Mapping[str, tuple[int, ...]]
    drawn: tuple[str, ...]
    ignored: Sequence[str]

    @property
    def word_rows(self) -> int:
        """Number of rows in the source's word embedding."""
        return self.source.weights[self.source.family.words].shape[0]

    def weight(self, name: str) -> Tensor:
        """Return one of our parameters as a float32 tensor in our shape.

        The parameter is read from the source, or randomly initialized if it is in `drawn`. Raises
        CheckpointError if the source is damaged, or if a value is not finite.
        """
        shape, family = self.shapes[name], self.source.family
        if name not in self.drawn:
            found = self.source.weights[name].read()
        elif name == family.word_bias:
            found = np.zeros(self.word_rows, np.float32)
        else:
            generator = torch.Generator().manual_seed(derive_seed(0, f"drawn {name}"))
            return initial_weights(name, torch.Size(shape), self.config.model, generator)
        if name == family.segments and len(found) == 1:
            found = np.repeat(found, shape[0], axis=0)  # both segments get the only embedding
        if name in family.fills:
            found = with_rows(found, shape[0], family.fills[name])
        return torch.from_numpy(found)


def plan_conversion(source: Source, given_vocabulary: Path | None, missing: Missing) -> Conversion:
    """Plan a conversion by matching every tensor to a parameter and checking its shape.

    The weights are not read. `missing` decides whether a missing masked-LM head is initialized
    randomly or is an error. Raises CheckpointError, ConfigError or DataError if the source or its
    vocabulary cannot be used.
    """
    words = source.family.words
    if words not in source.weights:
        raise _incomplete(source, words)
    vocabulary = find_vocabulary(source.folder, given_vocabulary)
    rows, tokens = source.weights[words].shape[0], len(vocabulary)
    if not tokens <= rows <= tokens + MOST_SPARE_ROWS:
        problem = f"the word embedding has {rows:,} rows, but the vocabulary has {tokens:,} tokens"
        remedy = "use --vocab to pass the vocabulary that the model was trained with"
        raise CheckpointError(str(source.folder), problem, remedy)
    config = _config_of(source, tokens)
    shapes = parameter_shapes(config.model)
    return Conversion(
        source=source,
        config=config,
        vocabulary=vocabulary,
        shapes=shapes,
        drawn=_drawn(source, shapes, missing),
        ignored=[*source.ignored, *_unused(source, shapes, config.model.objective)],
    )


def parameter_shapes(model: ModelSection) -> dict[str, tuple[int, ...]]:
    """Return the shape of each of our parameters, by name.

    The parameters are on the meta device, so they need no memory.
    """
    parameters = BertForPretraining(model, torch.device("meta")).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in parameters.items()}


def _incomplete(source: Source, name: str) -> CheckpointError:
    """Return the error for a source that lacks the tensor `name`.

    The message lists the tensors that have a similar name.
    """
    tail = name.removeprefix(source.family.body)
    similar = [in_brief(each) for each in (*source.weights, *source.ignored) if each.endswith(tail)]
    problem = f"{name} is missing" + (f" (found {', '.join(similar)})" if similar else "")
    return CheckpointError(str(source.folder), problem, "pass all weights of a BERT model")


def _config_of(source: Source, num_tokens: int) -> RunConfig:
    """Return a config whose section [model] describes the source.

    The other sections have arbitrary values, because training from the checkpoint uses another
    config. Raises ConfigError if this program does not support the model.
    """
    model = dict(source.settings)
    model["vocab_size"] = num_tokens
    has_pairs = any(name.startswith(NEXT_SENTENCE[1]) for name in source.weights)
    model["objective"] = "mlm_nsp" if has_pairs else "mlm"
    longest = min(model["max_position_embeddings"], 65_535)
    tables = {
        "model": model,
        "data": {
            "max_seq_length": longest,
            "max_predictions": longest,  # so that data with any number of masks fits
        },
        "parallel": {"local_batch_size": 1},
        "optim": {"name": "lamb", "learning_rate": 0.0},
        "schedule": {"decay_steps": 1},
        "eval": {"target_accuracy": 0.72},
    }
    return config_from_tables(tables, str(source.stated_in))


def _drawn(
    source: Source, shapes: Mapping[str, tuple[int, ...]], missing: Missing
) -> tuple[str, ...]:
    """Return the names of the parameters to initialize randomly.

    These are all parameters of the masked-LM head if the source has none of them, otherwise none.
    Raises CheckpointError if `missing` is "refuse" and the head is missing, or if any other
    parameter is missing.
    """
    head = source.family.head
    absent = tuple(name for name in shapes if name not in source.weights)
    has_part = any(name.startswith(head) for name in source.weights)
    for name in absent:
        if has_part or not name.startswith(head):
            raise _incomplete(source, name)
    if absent and missing == "refuse":
        remedy = "pass weights with this head, or add --missing draw to initialize it at random"
        raise CheckpointError(str(source.folder), f"has no {HEAD}", remedy)
    return absent


def _unused(source: Source, shapes: Mapping[str, tuple[int, ...]], objective: str) -> list[str]:
    """Return the names of the tensors that our model does not use.

    Raises CheckpointError if ignoring a tensor would change the model's results, or if a tensor has
    the wrong shape.
    """
    unused, kind = [], ARCHITECTURES[source.family.architecture]
    remedy = f"pass a standard {kind} model with the config that belongs to its weights"
    rows = source.weights[source.family.words].shape[0]
    for name, weight in source.weights.items():
        if name not in shapes:
            if objective != "mlm" or not name.startswith(NEXT_SENTENCE):
                problem = f"this tensor is not part of {kind} as this program implements it"
                raise CheckpointError(weight.where, problem, remedy)
            unused.append(name)
            continue
        shape = shapes[name]
        wanted = (rows, *shape[1:]) if name in source.family.fills else shape
        is_only_type = name == source.family.segments and weight.shape == (1, *shape[1:])
        if weight.shape != wanted and not is_only_type:
            problem = f"the shape is {list(weight.shape)}, but the model needs {list(wanted)}"
            raise CheckpointError(weight.where, problem, remedy)
    return unused


def write_checkpoint(conversion: Conversion, out: Path, origin: Mapping[str, str]) -> None:
    """Write the checkpoint directory `out` of a conversion.

    `origin` is recorded in the manifest. After a CheckpointError, no files are left.
    """
    if step_of(out) > 0:
        problem = "this is the name of a later training step, but these weights belong to step 0"
        raise CheckpointError(str(out), problem, "choose another name")
    num_bytes = 4 * sum(math.prod(shape) for shape in conversion.shapes.values())
    vocabulary = conversion.vocabulary
    state = CheckpointState(
        step=0, samples=0, seed=0, mlm_accuracy=None, vocabulary_sha256=vocabulary.sha256
    )
    with new_directory(out, num_bytes + _SPARE_BYTES) as folder:
        weights = {name: conversion.weight(name) for name in conversion.shapes}
        files = {MODEL: write_tensors(folder / MODEL, weights)}
        for name, contents in (
            (STATE, state.to_json()),
            (file_name(vocabulary), vocabulary.contents),
        ):
            write_file(folder / name, contents)
            files[name] = FileEntry(len(contents), hashlib.sha256(contents).hexdigest())
        write_file(folder / STARTING, _starting_config(conversion.config.model).encode())
        manifest = Manifest(
            step=0,
            samples=0,
            vocabulary_sha256=vocabulary.sha256,
            version=package_version(),
            commit=git_commit(),
            config=config_to_tables(conversion.config),
            files=files,
            origin={**origin, **({"drawn": HEAD} if conversion.drawn else {})},
        )
        write_file(folder / MANIFEST, manifest.to_json())


def _starting_config(model: ModelSection) -> str:
    """Return the text of a config for training from the converted weights.

    The config is pretrain_cpu, with this model and a learning rate for further training.
    """
    tables = read_toml(find_config("pretrain_cpu"))
    tables["model"] |= settings_of(model)
    length = min(tables["data"]["max_seq_length"], model.max_position_embeddings)
    tables["data"]["max_seq_length"] = length
    tables["optim"]["learning_rate"] = RATE_TO_CONTINUE
    return f"{_ABOUT_STARTING}\n{tables_to_toml(tables)}"
