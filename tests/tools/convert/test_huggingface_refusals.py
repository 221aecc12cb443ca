"""Refusals of files that only look like a BERT of Hugging Face: one line, and nothing written."""

import errno
import os
import shutil

import pytest
import torch
from huggingface_cases import NUM_WORDS, WORD_BIAS, WORDS, make_theirs, restated, with_tensors
from safetensors.torch import save_file

from bert_tools.huggingface.reader import read_safetensors
from mlperf_bert.errors import CheckpointError
from support import refusal


@pytest.fixture
def assert_refused(tmp_path, words, capsys):
    """That a folder below `tmp_path` is refused in a line with these words, and nothing new there.

    `out` and `vocabulary` are given to the command.
    """

    def check(problem, name="other", out="ours", vocabulary=words):
        before = sorted(tmp_path.rglob("*"))
        options = ("--from", "huggingface", "--vocab", vocabulary, "--out", tmp_path / out)
        assert problem in refusal(capsys, "convert", tmp_path / name, *options)
        assert sorted(tmp_path.rglob("*")) == before

    return check


FULL, LOCAL = "full_attention", "sliding_attention"
PATTERN = "layer_types must be full_attention in the first"
OTHER_MODELS = (
    ("plain", "model_type", "roberta", "must be bert or modernbert"),
    ("plain", "hidden_act", "gelu_new", "supports only 'gelu'"),
    ("plain", "position_embedding_type", "relative_key", "supports only 'absolute'"),
    ("plain", "is_decoder", True, "supports only False"),
    ("plain", "add_cross_attention", True, "supports only False"),
    ("plain", "tie_word_embeddings", False, "supports only True"),
    ("plain", "layer_norm_eps", 2.0, "layer_norm_epsilon must be from 0 to 1"),
    ("plain", "num_attention_heads", 5, "does not divide"),
    ("plain", "num_hidden_layers", 3, "is missing"),
    ("plain", "hidden_size", 64, "the shape is"),
    ("plain", "type_vocab_size", 3, "type_vocab_size"),
    *(
        ("modern", f"{name}_bias", True, "supports only False")
        for name in ("norm", "attention", "mlp", "classifier")
    ),
    ("modern", "decoder_bias", False, "supports only True"),
    ("modern", "tie_word_embeddings", False, "supports only True"),
    ("modern", "hidden_activation", "silu", "supports only 'gelu'"),
    ("modern", "classifier_activation", "relu", "supports only 'gelu'"),
    ("modern", "norm_eps", 2.0, "layer_norm_epsilon must be from 0 to 1"),
    ("modern", "mlp_dropout", 0.1, "embedding_dropout and mlp_dropout must be equal"),
    ("modern", "layer_types", [FULL, LOCAL, LOCAL, FULL], PATTERN),
    ("modern", "global_attn_every_n_layers", 3, "every 3 layers"),
    ("modern", "global_attn_every_n_layers", 0, "must be an integer of at least 1, not 0"),
    ("modern", "local_attention", 0, "must be an integer of at least 1, not 0"),
    ("modern", "rope_parameters", {"rope_theta": 50.0}, "no layers of that kind"),
    ("modern", "rope_parameters", {FULL: {"rope_type": "yarn", "factor": 4.0}}, "not support"),
    ("modern", "rope_parameters", {FULL: {"rope_theta": -1.0}}, "rope_base_global"),
    ("modern", "rope_scaling", {"factor": 2.0}, "does not support"),
    ("modern", "head_dim", 16, "does not support"),
    ("modern", "intermediate_size", 64, "the shape is [96, 32], but the model needs [128, 32]"),
    ("modern", "model_type", "modernbert-decoder", "must be bert or modernbert"),
)


@pytest.mark.parametrize(("source", "setting", "value", "said"), OTHER_MODELS)
def test_another_model_is_refused(request, tmp_path, assert_refused, source, setting, value, said):
    restated(request.getfixturevalue(source), tmp_path / "other", **{setting: value})
    assert_refused(said)


def without(part):
    return lambda tensors: {name: tensors[name] for name in tensors if part not in name}


def with_one(name, make):
    return lambda tensors: {**tensors, name: make(tensors)}


def with_ones(name, *shape):
    return with_one(name, lambda _: torch.ones(shape))


def a_third_sentence(tensors):
    return with_ones("cls.seq_relationship.third.bias", 2)(
        without("cls.seq_relationship.")(tensors)
    )


DENSE = "bert.encoder.layer.1.output.dense.weight"
NORM = "bert.embeddings.LayerNorm"
NO_PART = "this tensor is not part of"
WRONG_TENSORS = {
    "plain": {
        "untied": (
            with_one("cls.predictions.decoder.weight", lambda t: t[WORDS] + 1e-3),
            "differs from",
        ),
        "diverged": (with_one(WORD_BIAS, lambda t: t[WORD_BIAS] / 0), "not finite"),
        "quantised": (with_one(WORD_BIAS, lambda t: t[WORD_BIAS].to(torch.int8)), "int8"),
        "a second pooler": (with_ones("bert.pooler.second.weight", 32, 32), f"{NO_PART} BERT"),
        "a third sentence": (a_third_sentence, "cls.seq_relationship.weight is missing"),
        "two spellings": (
            with_one(f"{NORM}.gamma", lambda t: t[f"{NORM}.weight"] + 1),
            f"contains two tensors for {NORM}.weight",
        ),
        "halved": (with_one(DENSE, lambda t: t[DENSE][:16].clone()), "[16, 48]"),
        "without a bias": (without(WORD_BIAS), "missing"),
        "without words": (without(WORDS), f"{WORDS} is missing"),
        "without a head": (without("cls."), "--missing draw"),
    },
    "modern": {
        "untied": (with_ones("decoder.weight", NUM_WORDS, 32), "differs from"),
        "a bias": (with_ones("model.layers.1.attn_norm.bias", 32), f"{NO_PART} ModernBERT"),
        "a first norm": (with_ones("model.layers.0.attn_norm.weight", 32), f"{NO_PART} ModernBERT"),
        "half a head": (without("head.dense.weight"), "head.dense.weight is missing"),
        "without the last norm": (without("final_norm"), "model.final_norm.weight is missing"),
        "without a bias": (without("decoder.bias"), "has no masked-LM head"),
    },
}


@pytest.mark.parametrize(
    ("source", "name"),
    [(source, name) for source, cases in WRONG_TENSORS.items() for name in cases],
)
def test_wrong_tensors_are_refused(request, tmp_path, assert_refused, source, name):
    change, said = WRONG_TENSORS[source][name]
    with_tensors(request.getfixturevalue(source), tmp_path / "other", change)
    assert_refused(said)


def test_other_files_are_refused(plain, tmp_path, words, assert_refused, monkeypatch):
    shutil.copytree(plain, tmp_path / "bert")
    more = tmp_path / "more.txt"
    more.write_text(words.read_text() + "another\n")
    assert_refused("the vocabulary has 70 tokens", "bert", vocabulary=more)
    remedy = f"did you mean {tmp_path / 'bert'}?"
    assert_refused(f"{tmp_path / 'bret'}: no such directory; {remedy}", "bret")
    make_theirs("BertForPreTraining").save_pretrained(tmp_path / "cut", max_shard_size="20KB")
    assert_refused("lists weights in several files, but only model.safetensors is read", "cut")
    assert_refused("already exists", "bert", out="cut")
    (tmp_path / "cut" / "model.safetensors.index.json").unlink()
    assert_refused("model.safetensors: no such file; pass a directory", "cut")

    def fail(path, *_):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("bert_tools.huggingface.conversion.write_tensors", fail)
        assert_refused("No space left", "bert")
    (tmp_path / "bert" / "model.safetensors").rename(tmp_path / "bert" / "pytorch_model.bin")
    assert_refused("this file is a pickle", "bert")


@pytest.mark.timeout(60)
def test_truncations_are_refused_and_a_pipe_is_not_waited_for(tmp_path):
    path = tmp_path / "t.safetensors"
    save_file({"full": torch.ones(4, 3), "half": torch.ones(7).half()}, path)
    contents = path.read_bytes()
    for size in {*range(64), *range(0, len(contents), 7), len(contents) - 1}:
        path.write_bytes(contents[:size])
        with pytest.raises(CheckpointError):
            read_safetensors(path)
    path.write_bytes(contents + b"\0")
    with pytest.raises(CheckpointError, match=r"cannot be read \("):
        read_safetensors(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_safetensors(tmp_path / "pipe")
