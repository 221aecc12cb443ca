"""Refusals of files that only look like a Hugging Face BERT: one line, and nothing written."""

import errno
import json
import os
import shutil

import pytest
import torch
from huggingface_cases import WORD_BIAS, WORDS, make_theirs, save_theirs
from safetensors.torch import load_file, save_file

from bert_tools.huggingface.reader import read_safetensors
from mlperf_bert.__main__ import main
from mlperf_bert.errors import CheckpointError


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("model_type", "roberta"),
        ("hidden_act", "gelu_new"),
        ("position_embedding_type", "relative_key"),
        ("is_decoder", True),
        ("add_cross_attention", True),
        ("tie_word_embeddings", False),
        ("layer_norm_eps", 2.0),
        ("layer_norm_eps", "small"),
        ("num_attention_heads", 5),
        ("num_hidden_layers", 3),
        ("hidden_size", 64),
        ("type_vocab_size", 1),
    ],
)
def test_another_model_is_refused(plain, tmp_path, words, capsys, setting, value):
    shutil.copytree(plain, tmp_path / "other")
    path = tmp_path / "other" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {setting: value}))
    assert_refused(tmp_path, words, capsys, "other", "")


def without(part):
    return lambda tensors: {name: tensors[name] for name in tensors if part not in name}


def with_one(name, make):
    return lambda tensors: {**tensors, name: make(tensors)}


def a_third_sentence(tensors):
    third = {"cls.seq_relationship.third.bias": torch.ones(2)}
    return without("cls.seq_relationship.")(tensors) | third


DENSE = "bert.encoder.layer.1.output.dense.weight"
WRONG_TENSORS = {
    "untied": (with_one("cls.predictions.decoder.weight", lambda t: t[WORDS] + 1e-3), "not equal"),
    "diverged": (with_one(WORD_BIAS, lambda t: t[WORD_BIAS] / 0), "not finite"),
    "quantised": (with_one(WORD_BIAS, lambda t: t[WORD_BIAS].to(torch.int8)), "int8"),
    "adapted": (
        with_one("bert.encoder.layer.0.adapter.weight", lambda _: torch.ones(3)),
        "adapter",
    ),
    "a second pooler": (
        with_one("bert.pooler.second.weight", lambda _: torch.ones(32, 32)),
        "is no part of the BERT",
    ),
    "a third sentence": (a_third_sentence, "cls.seq_relationship.weight is missing"),
    "halved": (with_one(DENSE, lambda t: t[DENSE][:16].clone()), "[16, 48]"),
    "without a bias": (without(WORD_BIAS), "missing"),
    "without a layer": (without("layer.0"), "is missing"),
    "without words": (without(WORDS), f"{WORDS} is missing"),
}


@pytest.mark.parametrize(("change", "problem"), WRONG_TENSORS.values(), ids=WRONG_TENSORS)
def test_wrong_tensors_are_refused(plain, tmp_path, words, capsys, change, problem):
    shutil.copytree(plain, tmp_path / "other")
    path = tmp_path / "other" / "model.safetensors"
    save_file(change(load_file(path)), path)
    assert_refused(tmp_path, words, capsys, "other", problem)


def test_other_words_are_refused(plain, tmp_path, words, capsys):
    more = tmp_path / "more.txt"
    more.write_text(words.read_text() + "another\n")
    shutil.copytree(plain, tmp_path / "bert")
    assert_refused(tmp_path, more, capsys, "bert", "its vocabulary 70")


def test_a_pickle_is_refused(plain, tmp_path, words, capsys):
    shutil.copytree(plain, tmp_path / "old")
    (tmp_path / "old" / "model.safetensors").rename(tmp_path / "old" / "pytorch_model.bin")
    assert_refused(tmp_path, words, capsys, "old", "is a pickle")


def test_a_head_is_not_invented(tmp_path, words, capsys):
    save_theirs(tmp_path / "bare", "BertModel")
    assert_refused(tmp_path, words, capsys, "bare", "--missing draw")


def test_several_files_are_refused(tmp_path, words, capsys):
    make_theirs("BertForPreTraining").save_pretrained(tmp_path / "cut", max_shard_size="20KB")
    assert_refused(tmp_path, words, capsys, "cut", "model.safetensors: is missing")


def test_what_is_there_is_not_written_over(plain, tmp_path, words, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").write_text("kept")
    options = ["--from", "huggingface", "--vocab", str(words), "--out", str(tmp_path / "out")]
    assert main(["convert", str(plain), *options]) == 2
    assert "is there already" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["kept"]


def test_a_full_disk_leaves_nothing(plain, tmp_path, words, capsys, monkeypatch):
    def fail(path, *_):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("bert_tools.huggingface.conversion.write_tensors", fail)
    shutil.copytree(plain, tmp_path / "bert")
    assert_refused(tmp_path, words, capsys, "bert", "No space left")


@pytest.mark.timeout(60)
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_safetensors(tmp_path / "pipe")


def test_truncations_are_refused(tmp_path):
    path = tmp_path / "t.safetensors"
    save_file({"full": torch.ones(4, 3), "half": torch.ones(7).half()}, path)
    contents = path.read_bytes()
    for size in {*range(64), *range(0, len(contents), 7), len(contents) - 1}:
        path.write_bytes(contents[:size])
        with pytest.raises(CheckpointError):
            read_safetensors(path)
    path.write_bytes(contents + b"\0")
    with pytest.raises(CheckpointError, match="is no whole safetensors file"):
        read_safetensors(path)


def assert_refused(folder, words, capsys, name, problem):
    """One line, status 2, and nothing new in the folder."""
    before = sorted(path.name for path in folder.iterdir())
    capsys.readouterr()
    options = ["--from", "huggingface", "--vocab", str(words), "--out", str(folder / "ours")]
    assert main(["convert", str(folder / name), *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and problem in error, error
    assert sorted(path.name for path in folder.iterdir()) == before
