"""A checkpoint that TensorFlow wrote becomes one of ours: every weight, and nothing else."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import tensorflow_cases as cases
from bert_tools.convert.tensorflow_source import PUBLISHED
from mlperf_bert.__main__ import main
from mlperf_bert.checkpoint.huggingface.weights import PADDING_BIAS
from mlperf_bert.checkpoint.manifest import read_config, read_manifest
from mlperf_bert.cli.evaluate import MLPERF_CHECKPOINTS
from mlperf_bert.model.tensor_names import tensorflow_name

SETTINGS = {
    "vocab_size": cases.VOCAB_SIZE,
    "hidden_size": cases.HIDDEN,
    "num_hidden_layers": cases.LAYERS,
    "num_attention_heads": cases.HEADS,
    "intermediate_size": cases.INTERMEDIATE,
    "max_position_embeddings": cases.POSITIONS,
    "hidden_act": "gelu",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The checkpoint with vocabulary and config beside it, as it is published."""
    shutil.copytree(cases.V2.parent, tmp_path / "published")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *(f"w{number}" for number in range(cases.VOCAB_SIZE - 5))]
    (tmp_path / "published" / "vocab.txt").write_text("\n".join(words) + "\n")
    (tmp_path / "published" / "bert_config.json").write_text(json.dumps(SETTINGS))
    return tmp_path / "published"


def convert(source: Path, out: Path, *options: str) -> int:
    return main(["convert", "--from", "tensorflow", str(source), "--out", str(out), *options])


@pytest.mark.parametrize("given", ["", cases.V2.name, f"{cases.V2.name}.index"])
def test_every_weight_is_there(source: Path, tmp_path: Path, given: str, capsys: Any) -> None:
    assert convert(source / given, tmp_path / "ours", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    values, shapes = cases.bert_values(), cases.weight_shapes()
    found = load_file(tmp_path / "ours" / "model.safetensors")
    assert {tensorflow_name(name) for name in found} == shapes.keys()
    assert report["matched"] == len(shapes) and not report["drawn"] and not report["remarks"]
    for name, ours in found.items():
        theirs = values[tensorflow_name(name)]
        theirs = theirs.T if tensorflow_name(name).endswith("/kernel") else theirs
        assert np.array_equal(ours[: len(theirs)], theirs)
    padding = found["cls.predictions.bias"][cases.VOCAB_SIZE :]
    assert len(padding) == 3 and (padding == PADDING_BIAS).all()
    ignored = report["ignored"]
    assert ignored.keys() == values.keys() - shapes.keys()
    manifest = read_manifest(tmp_path / "ours")
    assert manifest.origin["name"] == cases.V2.name and "published" not in manifest.origin
    model = read_config(tmp_path / "ours").model
    assert (model.num_heads, model.vocab_size) == (cases.HEADS, cases.VOCAB_SIZE)


def test_the_published_one_is_known_by_its_digest(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = (source / f"{cases.V2.name}.index").read_bytes()
    digest = hashlib.md5(table).hexdigest()
    published = {(len(table), digest): folder for folder in PUBLISHED.values()}
    monkeypatch.setattr("bert_tools.convert.tensorflow_source.PUBLISHED", published)
    assert convert(source, tmp_path / "ours") == 0
    assert read_manifest(tmp_path / "ours").origin["published"] in MLPERF_CHECKPOINTS
    assert tuple(f"MLPerf {folder}" for folder in PUBLISHED.values()) == MLPERF_CHECKPOINTS


def test_objects_are_the_same_weights(source: Path, tmp_path: Path) -> None:
    other = cases.OBJECTS
    shutil.copytree(other.parent, tmp_path / "other")
    for name in ("bert_config.json", "vocab.txt"):
        shutil.copy(source / name, tmp_path / "other")
    assert convert(source, tmp_path / "a") == 0
    assert convert(tmp_path / "other" / other.name, tmp_path / "b") == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert weights[0] == weights[1]


def test_heads_are_not_guessed(source: Path, tmp_path: Path, capsys: Any) -> None:
    (source / "bert_config.json").unlink()
    assert convert(source, tmp_path / "ours") == 2
    error = capsys.readouterr().err
    assert "--config" in error and error.count("\n") == 1
    config = tmp_path / "given.toml"
    config.write_text(
        f"""
        [model]
        vocab_size = {cases.VOCAB_SIZE}
        hidden_size = {cases.HIDDEN}
        num_layers = {cases.LAYERS}
        num_heads = 4
        intermediate_size = {cases.INTERMEDIATE}
        max_position_embeddings = {cases.POSITIONS}
        [data]
        max_seq_length = 16
        [parallel]
        local_batch_size = 8
        [optim]
        name = "lamb"
        learning_rate = 1e-3
        [schedule]
        decay_steps = 9
        [eval]
        target_accuracy = 0.5
        """
    )
    assert convert(source, tmp_path / "ours", "--config", str(config)) == 0
    assert read_config(tmp_path / "ours").model.num_heads == 4
    wider = tmp_path / "wider.toml"
    wider.write_text(config.read_text().replace("hidden_size = 8", "hidden_size = 16"))
    assert convert(source, tmp_path / "other", "--config", str(wider)) == 2
    assert "model.hidden_size" in capsys.readouterr().err


def test_what_is_no_bert_is_refused(source: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["--vocab", str(source / "vocab.txt")]
    assert convert(cases.V2_SHARDS, tmp_path / "ours", *words) == 2
    assert "give the weights of a BERT" in capsys.readouterr().err
    assert convert(source / "vocab.txt", tmp_path / "ours", *words) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "ours").exists()
