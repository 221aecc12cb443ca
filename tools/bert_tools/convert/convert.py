"""Converter of foreign weights to a checkpoint of ours: all planned and checked, then written.

The checkpoint has the weights, a config that describes the model, the vocabulary, and its origin in
the manifest; no optimizer's state.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlperf_bert import git_commit, package_version
from mlperf_bert.checkpoint.first_weights import RATE_TO_CONTINUE, settings_of
from mlperf_bert.checkpoint.huggingface.conversion import Conversion
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
from mlperf_bert.common.errors import CheckpointError, typed
from mlperf_bert.config.files import config_to_tables, read_toml, tables_to_toml
from mlperf_bert.config.options import find_config
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.vocabulary.any_vocabulary import file_name

STARTING = "train.toml"
_ABOUT_STARTING = """\
# To go on training the weights beside this file: [model] is theirs, the rest own_text_cpu's but for
# the learning rate, a tenth of it, not tuned. Steps and batch are yours to set.
"""
_SPARE_BYTES = 2**20  # of JSON and headers


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


def _starting_config(model: ModelSection) -> str:
    """The recipe of own_text_cpu for this model, with a learning rate for further training."""
    tables = read_toml(find_config("own_text_cpu"))
    tables["model"] |= settings_of(model)
    length = min(tables["data"]["max_seq_length"], model.max_position_embeddings)
    tables["data"]["max_seq_length"] = length
    tables["optim"]["learning_rate"] = RATE_TO_CONTINUE
    return f"{_ABOUT_STARTING}\n{tables_to_toml(tables)}"


def report_of(conversion: Conversion, out: Path) -> dict[str, Any]:
    """The JSON object of `convert`: the fate of every tensor, also read back from `out`.

    `weights_sha256` is the value for `run.init_checkpoint_sha256`. `parameters` counts numbers
    taken over, without padding; `dtypes` counts the source's tensors by dtype; `copies` are equal
    to another tensor; `ignored` and `drawn` give the reason, and the head; `rows` are those of the
    word embedding here.
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
        "rows": conversion.shapes[source.family.words][0],
        "remarks": list(conversion.remarks),
        "config": str(out / STARTING),
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
    lines.append(f"written: {report['out']}, weights of sha256 {report['weights_sha256']}")
    for words in (
        ("own-text", "TEXT", "--out", "NEW"),
        ("train", "--data", "DATA", "--config", report["config"]),
    ):
        lines.append(f"to go on from it: {typed(*words, '--init-checkpoint', report['out'])}")
    return lines
