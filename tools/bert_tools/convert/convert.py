"""Foreign weights become a checkpoint of ours: planned and checked whole, then written.

The checkpoint has the weights, a config that describes the model, the vocabulary, and its origin in
the manifest; no optimizer's state.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mlperf_bert import git_commit, package_version
from mlperf_bert.checkpoint.huggingface.tokenizer import find_vocabulary, setting_against_ours
from mlperf_bert.checkpoint.huggingface.weights import (
    MOST_SPARE_ROWS,
    PADDING_BIAS,
    WORD_BIAS,
    WORDS,
    Sizes,
    Source,
    check_floats,
    drawn_weight,
    missing_heads,
    parameter_shapes,
    sizes_of,
    with_rows,
)
from mlperf_bert.checkpoint.manifest import (
    MANIFEST,
    MODEL,
    STATE,
    CheckpointState,
    FileEntry,
    Manifest,
    read_manifest,
    step_of,
)
from mlperf_bert.checkpoint.tensors import write_tensors
from mlperf_bert.common.atomic import new_directory, write_file
from mlperf_bert.common.errors import CheckpointError, ConfigError
from mlperf_bert.config.files import config_from_tables, config_to_tables, load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.vocabulary.any_vocabulary import AnyVocabulary, file_name
from mlperf_bert.vocabulary.word_pieces import Vocabulary

Missing = Literal["refuse", "draw"]
USUAL_HEAD_SIZE = 64  # of every published BERT
_MOST_PREDICTIONS = 255  # that an index can hold
_PAIRS = "cls.seq_relationship.weight"
_WORD_PIECES_DROP = "`prepare --vocab vocab.txt` drops capitals and accents"
_SPARE_BYTES = 2**20  # of JSON and headers
_NEXT_SENTENCE = frozenset(
    f"{layer}.{part}"
    for layer in ("bert.pooler.dense", "cls.seq_relationship")
    for part in ("weight", "bias")
)
_FILLS = {WORDS: 0.0, WORD_BIAS: PADDING_BIAS}


@dataclass(frozen=True, slots=True)
class Conversion:
    """What is taken from where: made before anything is written.

    `shapes` are our parameters'; `drawn` those of them that the source has not; `unused` tensors of
    the source that this model has no place for, with the reason.
    """

    source: Source
    config: RunConfig
    vocabulary: AnyVocabulary
    shapes: Mapping[str, tuple[int, ...]]
    drawn: Mapping[str, str]
    unused: Mapping[str, str]
    word_rows: int
    remarks: tuple[str, ...]

    def weight(self, name: str) -> Tensor:
        """One of our parameters, float32 in our shape. Raises CheckpointError."""
        shape = self.shapes[name]
        if name in self.drawn:
            return drawn_weight(name, shape, self.config.model.initializer_range)
        found = self.source.weights[name].read()
        if name in _FILLS:
            found = with_rows(found, shape[0], _FILLS[name])
        return torch.from_numpy(found)


def plan_conversion(
    source: Source, given_vocabulary: Path | None, config_path: Path | None, missing: Missing
) -> Conversion:
    """Match every tensor and hold the settings against them; of the weights only copies are read.

    Raises CheckpointError, ConfigError or DataError.
    """
    check_floats(source)
    sizes = sizes_of(source)
    vocabulary = find_vocabulary(source.folder, given_vocabulary)
    _check_rows(source, sizes, vocabulary)
    config, remarks = _config_of(source, sizes, len(vocabulary), config_path)
    shapes = parameter_shapes(config.model)
    drawn = missing_heads(source, shapes)
    if drawn and missing == "refuse":
        heads = " and no ".join(dict.fromkeys(drawn.values()))
        remedy = "give weights that have it, or let it be drawn at random with --missing draw"
        raise CheckpointError(str(source.path), f"has no {heads}", remedy)
    unused = _unused(source, shapes, config.model.objective)
    _check_shapes(source, shapes)
    _check_copies(source)
    setting = setting_against_ours(source.folder)
    if setting and isinstance(vocabulary, Vocabulary):
        remarks = (*remarks, f"its tokenizer has no {setting}, {_WORD_PIECES_DROP}")
    remarks = (*source.remarks, *remarks)
    return Conversion(source, config, vocabulary, shapes, drawn, unused, sizes.word_rows, remarks)


def write_checkpoint(conversion: Conversion, out: Path, origin: Mapping[str, str]) -> None:
    """Write the checkpoint directory. Raises CheckpointError; then there is none."""
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
        heads = dict.fromkeys(conversion.drawn.values())
        manifest = Manifest(
            step=0,
            samples=0,
            vocabulary_sha256=vocabulary.sha256,
            version=package_version(),
            commit=git_commit(),
            config=config_to_tables(conversion.config),
            files=files,
            origin={**origin, **({"drawn": ", ".join(heads)} if heads else {})},
        )
        write_file(folder / MANIFEST, manifest.to_json())


def report_of(conversion: Conversion, out: Path) -> dict[str, Any]:
    """The JSON object of `convert`: what became of every tensor, read from `out` too.

    `weights_sha256` is what `run.init_checkpoint_sha256` may ask for. `parameters` are numbers
    taken over, padding not counted; `dtypes` tensors of the source by theirs; `copies` repeat
    another tensor, and are equal to it; `ignored` and `drawn` say why, and as part of which head;
    `rows` are the word embedding's here.
    """
    source, vocabulary = conversion.source, conversion.vocabulary
    taken = {name: source.weights[name] for name in conversion.shapes if name in source.weights}
    return {
        "schema_version": 1,
        "form": source.form,
        "out": str(out),
        "weights_sha256": read_manifest(out).files[MODEL].sha256,
        "matched": len(taken),
        "parameters": sum(math.prod(weight.shape) for weight in taken.values()),
        "dtypes": dict(Counter(weight.tensor.dtype for weight in taken.values())),
        "copies": list(source.copies),
        "model": config_to_tables(conversion.config)["model"],
        "vocabulary": {
            "file": file_name(vocabulary),
            "tokens": len(vocabulary),
            "sha256": vocabulary.sha256,
        },
        "rows_in_source": conversion.word_rows,
        "rows": conversion.shapes[WORDS][0],
        "remarks": list(conversion.remarks),
        "ignored": {**source.ignored, **conversion.unused},
        "drawn": dict(conversion.drawn),
    }


def in_words(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    model, vocabulary, rows = report["model"], report["vocabulary"], report["rows"]
    dtypes = ", ".join(f"{count} of {dtype}" for dtype, count in sorted(report["dtypes"].items()))
    added = rows - report["rows_in_source"]
    kept = "all kept"
    if added > 0:
        kept = f"and {added} that pad and never matter (decision 0019)"
    elif added < 0:
        kept = f"the last {-added} dropped: no token has them"
    lines = [
        f"{report['form']}: {report['matched']} tensors matched, {report['parameters']:,} weights "
        f"({dtypes})",
        f"model: {model['num_layers']} layers, hidden {model['hidden_size']}, "
        f"{model['num_heads']} heads, feed-forward {model['intermediate_size']}, "
        f"{model['max_position_embeddings']} positions, objective {model['objective']}",
        f"vocabulary: {vocabulary['tokens']:,} tokens, sha256 {vocabulary['sha256']}",
        f"word embedding: {report['rows_in_source']:,} rows, {kept}",
    ]
    if report["copies"]:
        lines.append(f"equal to their originals, as they must be: {', '.join(report['copies'])}")
    for why, count in Counter(report["ignored"].values()).items():
        first = next(name for name, reason in report["ignored"].items() if reason == why)
        others = f" and {count - 1} more" if count > 1 else ""
        lines.append(f"ignored, {why}: {first}{others}")
    for head, count in Counter(report["drawn"].values()).items():
        lines.append(f"NOT in the source, drawn at random: the {head} ({count} tensors)")
    lines += [f"note: {remark}" for remark in report["remarks"]]
    return [*lines, f"written: {report['out']}, weights of sha256 {report['weights_sha256']}"]


def _config_of(
    source: Source, sizes: Sizes, num_tokens: int, config_path: Path | None
) -> tuple[RunConfig, tuple[str, ...]]:
    """The complete config, and what had to be assumed.

    Everything but [model] is there because a config is complete; training takes its own. Raises
    ConfigError or CheckpointError where file, tensors and `config_path` contradict.
    """
    _check_stated(source, sizes)
    if config_path is not None:
        config = load_config(config_path)
        _check_given(config, source, sizes, num_tokens)
        return config, ()
    model: dict[str, Any] = {**source.settings, **sizes.settings, "vocab_size": num_tokens}
    model["objective"] = "mlm_nsp" if _PAIRS in source.weights else "mlm"
    remarks: tuple[str, ...] = ()
    if "num_heads" not in model:
        heads, rest = divmod(model["hidden_size"], USUAL_HEAD_SIZE)
        if rest or not heads:
            remedy = "give a config that says model.num_heads with --config"
            raise CheckpointError(str(source.path), "does not say how many heads it has", remedy)
        model["num_heads"] = heads
        remarks = (f"{heads} heads of {USUAL_HEAD_SIZE} are assumed, as the source does not say",)
    tables = {
        "model": model,
        "data": {
            "max_seq_length": min(model["max_position_embeddings"], 65_535),
            "max_predictions": _MOST_PREDICTIONS,
        },
        "parallel": {"local_batch_size": 1},
        "optim": {"name": "lamb", "learning_rate": 0.0},
        "schedule": {"decay_steps": 1},
        "eval": {"target_accuracy": 0.72},
    }
    return config_from_tables(tables, source.stated_in or str(source.path)), remarks


def _check_stated(source: Source, sizes: Sizes) -> None:
    """What the source's own config says must be what its tensors are."""
    found = {**sizes.settings, "vocab_size": sizes.word_rows}
    for name, value in found.items():
        stated = source.settings.get(name, value)
        if stated != value:
            problem = f"says {name} {stated}, the tensors have {value}"
            raise CheckpointError(source.stated_in, problem, "give config and weights of one model")


def _check_given(config: RunConfig, source: Source, sizes: Sizes, num_tokens: int) -> None:
    """A config that a user gives must describe these weights."""
    given = asdict(config.model)
    names = ("num_heads", "layer_norm_epsilon")
    stated = {name: source.settings[name] for name in names if name in source.settings}
    for name, value in {**sizes.settings, **stated, "vocab_size": num_tokens}.items():
        if given[name] != value:
            problem = f"is {given[name]}, the weights in {source.path} have {value}"
            raise ConfigError(f"model.{name}", problem, "set it to theirs")


def _check_rows(source: Source, sizes: Sizes, vocabulary: AnyVocabulary) -> None:
    rows, tokens = sizes.word_rows, len(vocabulary)
    if not tokens <= rows <= tokens + MOST_SPARE_ROWS:
        problem = f"has {rows:,} words, its vocabulary {tokens:,}"
        remedy = "give the vocabulary that it was trained with by --vocab"
        raise CheckpointError(str(source.path), problem, remedy)


def _unused(source: Source, shapes: Mapping[str, object], objective: str) -> dict[str, str]:
    """Raises CheckpointError for a tensor that changes what the model computes."""
    unused = {}
    may_lack_use = _NEXT_SENTENCE if objective == "mlm" else frozenset()
    for name, weight in source.weights.items():
        if name in shapes or name in source.copies:
            continue
        if name not in may_lack_use:
            problem = "is no part of the BERT that this program computes"
            raise CheckpointError(weight.where or name, problem, "give the weights of a plain BERT")
        unused[name] = "not used without next-sentence prediction"
    return unused


def _check_shapes(source: Source, shapes: Mapping[str, tuple[int, ...]]) -> None:
    words = source.weights[WORDS].shape[0]
    for name, shape in shapes.items():
        if name not in source.weights:
            continue
        weight = source.weights[name]
        wanted = (words, *shape[1:]) if name in _FILLS else shape
        if weight.shape != wanted:
            problem = f"has the shape {list(weight.shape)}, the model's is {list(wanted)}"
            raise CheckpointError(weight.where, problem, "give the weights of a plain BERT")


def _check_copies(source: Source) -> None:
    for copy, original in source.copies.items():
        ours, theirs = source.weights[original], source.weights[copy]
        if ours.shape != theirs.shape or not np.array_equal(ours.read(), theirs.read()):
            problem = f"is not equal to {original}, to which this program ties it"
            raise CheckpointError(theirs.where, problem, "give a BERT with a tied decoder")
