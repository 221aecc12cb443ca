"""A checkpoint that TensorFlow wrote becomes one of ours: every weight, and nothing else."""

import hashlib
import shutil

import numpy as np
import pytest
import torch
from huggingface_cases import load_ours
from safetensors.numpy import load_file

import tensorflow_cases as cases
from bert_tools.convert.tensorflow import PUBLISHED
from bert_tools.huggingface.weights import PADDING_BIAS
from mlperf_bert.__main__ import main
from mlperf_bert.checkpoint.manifest import read_config, read_manifest
from mlperf_bert.data.batch import make_batch
from mlperf_bert.data.shards import Samples
from mlperf_bert.model.bert import tensorflow_name
from support import refusal


@pytest.fixture
def source(tmp_path):
    """The checkpoint with vocabulary and config beside it, as it is published."""
    cases.write_published(tmp_path / "published")
    return tmp_path / "published"


def convert(source, out, *options):
    return main(["convert", "--from", "tensorflow", str(source), "--out", str(out), *options])


@pytest.mark.parametrize("given", ["", cases.V2.name])
def test_every_weight_is_there_and_scores_are_those_of_tensorflow(source, tmp_path, given, capsys):
    """So every name, transpose and padding is the right one, not only of the right shape."""
    assert convert(source / given, tmp_path / "ours") == 0
    said = capsys.readouterr().out
    values, shapes = cases.bert_values(), cases.weight_shapes()
    found = load_file(tmp_path / "ours" / "model.safetensors")
    assert {tensorflow_name(name) for name in found} == shapes.keys()
    assert said.startswith(f"converted TensorFlow checkpoint: {len(shapes)} tensors with ")
    for name, ours in found.items():
        theirs = values[tensorflow_name(name)]
        theirs = theirs.T if tensorflow_name(name).endswith("/kernel") else theirs
        assert np.array_equal(ours[: len(theirs)], theirs)
    padding = found["cls.predictions.bias"][cases.VOCAB_SIZE :]
    assert len(padding) == 3 and (padding == PADDING_BIAS).all()
    assert f"without {len(values) - len(shapes)} tensors that this model does not use\n" in said
    manifest = read_manifest(tmp_path / "ours")
    assert manifest.origin["name"] == cases.V2.name and "published" not in manifest.origin
    model = read_config(tmp_path / "ours").model
    assert (model.num_heads, model.vocab_size) == (cases.HEADS, cases.VOCAB_SIZE)
    expected = np.load(cases.SCORES)
    is_there = cases.inputs()["input_mask"] == 1
    with torch.no_grad():
        scores = load_ours(tmp_path / "ours").double()(whole_batch())
    words = scores.mlm[:, : cases.VOCAB_SIZE].numpy()
    np.testing.assert_allclose(words, expected["mlm"][is_there], rtol=0, atol=1e-10)
    np.testing.assert_allclose(scores.nsp.numpy(), expected["nsp"], rtol=0, atol=1e-10)
    assert expected["mlm"].std() > 0.1 and expected["nsp"].std() > 0.01


def whole_batch():
    """The two sequences, with every position asked for."""
    arrays = cases.inputs()
    is_there = arrays["input_mask"] == 1
    lengths = is_there.sum(axis=1)
    samples = Samples(
        input_ids=arrays["input_ids"][is_there],
        lengths=lengths,
        segment_b_start=lengths - arrays["segment_ids"].sum(axis=1),
        masked_positions=np.nonzero(is_there)[1],
        masked_ids=np.full(lengths.sum(), 5),
        masked_counts=lengths,
        next_sentence_label=np.zeros(2, np.int64),
    )
    return make_batch(samples, np.arange(2), mlm_denominator=1.0, nsp_denominator=1.0)


def test_the_published_one_is_known_by_its_digest(source, tmp_path, monkeypatch, capsys):
    for size, digest in PUBLISHED:
        assert size > 1000 and len(digest) == 32 and int(digest, 16)
    table = (source / f"{cases.V2.name}.index").read_bytes()
    published = {(len(table), hashlib.md5(table).hexdigest()): "tf1_ckpt"}
    monkeypatch.setattr("bert_tools.convert.tensorflow.PUBLISHED", published)
    assert convert(source, tmp_path / "ours") == 0
    assert read_manifest(tmp_path / "ours").origin["published"] == "MLPerf tf1_ckpt"
    assert "checkpoint, published as MLPerf tf1_ckpt: " in capsys.readouterr().out


def test_what_is_no_bert_is_refused(source, tmp_path, capsys):
    (tmp_path / "model.index").mkdir()
    shutil.copytree(cases.V2_SHARDS.parent, tmp_path / "others")
    shutil.copy(source / "bert_config.json", tmp_path / "others")
    shutil.copytree(source, tmp_path / "alone")
    (tmp_path / "alone" / "bert_config.json").unlink()
    words = ("--vocab", source / "vocab.txt", "--out", tmp_path / "ours")
    for given, problem in (
        (tmp_path / "others", "pass all weights of a BERT"),
        (source / "vocab.txt", "because vocab.txt.index is missing"),
        (tmp_path / "model", "not a regular file"),
        (tmp_path / "alone", "copy the bert_config.json"),
        (cases.OBJECTS, "object-based checkpoint of TensorFlow 2"),
    ):
        error = refusal(capsys, "convert", "--from", "tensorflow", given, *words)
        assert problem in error
        assert ("tf1_ckpt" in error) >= (given == cases.OBJECTS)
    assert not (tmp_path / "ours").exists()
