"""Conversion of foreign weights to a checkpoint of ours: all planned and checked, then written.

The checkpoint has the weights, a config that describes the model, the vocabulary, and its origin in
the manifest; no optimizer's state.
"""

import hashlib
import math
from collections.abc import Mapping
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
# To go on training the weights beside this file: [model] is theirs, the rest pretrain_cpu's but for
# the learning rate, a tenth of it, not tuned. Steps and batch are yours to set.
"""
_SPARE_BYTES = 2**20  # of JSON and headers


@dataclass(frozen=True, slots=True)
class Conversion:
    """The plan of a conversion, made before anything is written.

    `shapes` has our parameters; `drawn` those of the masked-LM head if the source has none;
    `ignored` the tensors of the source without a place in this model, with the reason.
    """

    source: Source
    config: RunConfig
    vocabulary: AnyVocabulary
    shapes: Mapping[str, tuple[int, ...]]
    drawn: tuple[str, ...]
    ignored: Mapping[str, str]

    @property
    def word_rows(self) -> int:
        """Rows of the source's word embedding."""
        return self.source.weights[self.source.family.words].shape[0]

    def weight(self, name: str) -> Tensor:
        """One of our parameters, float32 in our shape. Raises CheckpointError."""
        shape, family = self.shapes[name], self.source.family
        if name not in self.drawn:
            found = self.source.weights[name].read()
        elif name == family.word_bias:
            found = np.zeros(self.word_rows, np.float32)
        else:
            generator = torch.Generator().manual_seed(derive_seed(0, f"drawn {name}"))
            return initial_weights(name, torch.Size(shape), self.config.model, generator)
        if name == family.segments and len(found) == 1:
            found = np.repeat(found, shape[0], axis=0)  # both segments as the only one
        if name in family.fills:
            found = with_rows(found, shape[0], family.fills[name])
        return torch.from_numpy(found)


def plan_conversion(source: Source, given_vocabulary: Path | None, missing: Missing) -> Conversion:
    """Match every tensor and check its shape; no weights are read.

    Raises CheckpointError, ConfigError or DataError.
    """
    words = source.family.words
    if words not in source.weights:
        raise _incomplete(source, words)
    vocabulary = find_vocabulary(source.folder, given_vocabulary)
    rows, tokens = source.weights[words].shape[0], len(vocabulary)
    if not tokens <= rows <= tokens + MOST_SPARE_ROWS:
        problem = f"has {rows:,} words, its vocabulary {tokens:,}"
        remedy = "give the vocabulary that it was trained with by --vocab"
        raise CheckpointError(str(source.folder), problem, remedy)
    config = _config_of(source, tokens)
    shapes = parameter_shapes(config.model)
    return Conversion(
        source=source,
        config=config,
        vocabulary=vocabulary,
        shapes=shapes,
        drawn=_drawn(source, shapes, missing),
        ignored={**source.ignored, **_unused(source, shapes, config.model.objective)},
    )


def parameter_shapes(model: ModelSection) -> dict[str, tuple[int, ...]]:
    """Shapes of our parameters by name; no memory is allocated for them."""
    parameters = BertForPretraining(model, torch.device("meta")).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in parameters.items()}


def _incomplete(source: Source, name: str) -> CheckpointError:
    tail = name.removeprefix(source.family.body)
    others = (each for each in (*source.weights, *source.ignored) if each.endswith(tail))
    problem = f"{name} is missing" + "".join(f", {in_brief(other)} is there" for other in others)
    return CheckpointError(str(source.folder), problem, "give the weights of a BERT, all of them")


def _config_of(source: Source, num_tokens: int) -> RunConfig:
    """A complete config with the source's model. Raises ConfigError.

    Sections other than [model] only complete the config; training uses its own.
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
            "max_predictions": longest,  # takes data with any masks
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
    """Names of the masked-LM head, if the source has none of it.

    Raises CheckpointError if it is to be refused, or if something else is missing.
    """
    head = source.family.head
    lacking = tuple(name for name in shapes if name not in source.weights)
    has_part = any(name.startswith(head) for name in source.weights)
    for name in lacking:
        if has_part or not name.startswith(head):
            raise _incomplete(source, name)
    if lacking and missing == "refuse":
        remedy = "give weights that have it, or let it be drawn at random with --missing draw"
        raise CheckpointError(str(source.folder), f"has no {HEAD}", remedy)
    return lacking


def _unused(
    source: Source, shapes: Mapping[str, tuple[int, ...]], objective: str
) -> dict[str, str]:
    """Tensors without a place in our model, and why.

    Raises CheckpointError for one that would change the model's results, or has another shape.
    """
    unused, kind = {}, ARCHITECTURES[source.family.architecture]
    remedy = f"give config and weights of one model, a plain {kind}"
    rows = source.weights[source.family.words].shape[0]
    for name, weight in source.weights.items():
        if name not in shapes:
            if objective != "mlm" or not name.startswith(NEXT_SENTENCE):
                problem = f"is no part of the {kind} that this program computes"
                raise CheckpointError(weight.where, problem, remedy)
            unused[name] = "not used without next-sentence prediction"
            continue
        shape = shapes[name]
        wanted = (rows, *shape[1:]) if name in source.family.fills else shape
        is_only_type = name == source.family.segments and weight.shape == (1, *shape[1:])
        if weight.shape != wanted and not is_only_type:
            problem = f"has the shape {list(weight.shape)}, the model's is {list(wanted)}"
            raise CheckpointError(weight.where, problem, remedy)
    return unused


def write_checkpoint(conversion: Conversion, out: Path, origin: Mapping[str, str]) -> None:
    """Write the checkpoint directory. Raises CheckpointError, and then leaves none."""
    if step_of(out) > 0:
        problem = "names a step, these weights are of step 0"
        raise CheckpointError(str(out), problem, "name it otherwise")
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
    """The recipe of pretrain_cpu for this model, with a learning rate for further training."""
    tables = read_toml(find_config("pretrain_cpu"))
    tables["model"] |= settings_of(model)
    length = min(tables["data"]["max_seq_length"], model.max_position_embeddings)
    tables["data"]["max_seq_length"] = length
    tables["optim"]["learning_rate"] = RATE_TO_CONTINUE
    return f"{_ABOUT_STARTING}\n{tables_to_toml(tables)}"
