"""A BERT in Hugging Face's form becomes a checkpoint: the same hidden states, nothing invented."""

import json
import shutil

import pytest
import torch
from huggingface_cases import (
    NUM_WORDS,
    PADDED,
    WORD_BIAS,
    WORDS,
    a_batch,
    convert,
    load_ours,
    real_rows,
    save_theirs,
    tensors_of,
)
from safetensors.torch import load_file, save_file

from bert_tools.huggingface.weights import PADDING_BIAS
from mlperf_bert.__main__ import main
from mlperf_bert.errors import CheckpointError

FORMS = ("BertForPreTraining", "BertForMaskedLM", "BertModel")


@pytest.mark.parametrize("form", FORMS)
def test_hidden_states_and_scores_are_theirs(form, tmp_path, words, synthetic_data):
    theirs = save_theirs(tmp_path / "theirs", form)
    missing = "draw" if form == "BertModel" else "refuse"
    found = convert(tmp_path / "theirs", tmp_path / "ours", words, missing)
    ours = load_ours(tmp_path / "ours")
    batch, inputs = a_batch(synthetic_data)
    with torch.inference_mode():
        expected = theirs(**inputs, output_hidden_states=True)
        hidden = ours.bert(batch, None)
        scores = ours(batch)
    assert (hidden - real_rows(expected.hidden_states[-1], inputs)).abs().max() < 1e-5
    assert found.source.form == form
    if form == "BertModel":
        assert len(found.drawn) == 5
        assert all(name.startswith("cls.predictions.") for name in found.drawn)
        return
    assert not found.drawn
    mlm = expected.prediction_logits if form == "BertForPreTraining" else expected.logits
    wanted = real_rows(mlm, inputs)[batch.masked_token_index]
    assert (scores.mlm[:, :NUM_WORDS] - wanted).abs().max() < 1e-5
    if form == "BertForPreTraining":
        assert (scores.nsp - expected.seq_relationship_logits).abs().max() < 1e-5
    else:
        assert scores.nsp is None


def test_rows_that_pad_never_matter(plain, tmp_path, words):
    found = convert(plain, tmp_path / "ours", words)
    assert (found.word_rows, found.shapes[WORDS][0]) == (NUM_WORDS, PADDED)
    ours = load_ours(tmp_path / "ours").train()
    table = ours.bert.embeddings.word_embeddings.weight
    hidden = torch.randn(50, 32)
    logits = ours.cls.predictions(hidden, table)
    probabilities = logits.softmax(-1)
    assert not probabilities[:, NUM_WORDS:].any()
    torch.nn.functional.cross_entropy(logits, torch.arange(50)).backward()
    bias = ours.cls.predictions.bias
    assert table.grad is not None and table.grad[:NUM_WORDS].any()
    assert bias.grad is not None and bias.grad[:NUM_WORDS].all()
    assert not table.grad[NUM_WORDS:].any() and not bias.grad[NUM_WORDS:].any()
    assert not table[NUM_WORDS:].any() and (bias[NUM_WORDS:] == PADDING_BIAS).all()


def old_names(tensors):
    """As bert-base-uncased is published, with copies and buffers as other files have them."""
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in tensors.items()
    }
    renamed["cls.predictions.decoder.weight"] = tensors[WORDS].clone()
    renamed["cls.predictions.decoder.bias"] = tensors[WORD_BIAS].clone()
    renamed["bert.embeddings.position_ids"] = torch.arange(32)[None]
    return renamed


def test_older_names_are_the_same_weights(plain, tmp_path, words):
    shutil.copytree(plain, tmp_path / "other")
    path = tmp_path / "other" / "model.safetensors"
    save_file(old_names(load_file(path)), path)
    found = convert(tmp_path / "other", tmp_path / "ours", words)
    convert(plain, tmp_path / "plain", words)
    assert_same(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "plain"))
    assert len(found.ignored) == 3


def test_one_weight_in_two_spellings_is_refused(plain, tmp_path, words):
    shutil.copytree(plain, tmp_path / "other")
    path = tmp_path / "other" / "model.safetensors"
    tensors = load_file(path)
    name = "bert.embeddings.LayerNorm.weight"
    tensors[name.replace("weight", "gamma")] = tensors[name] + 1
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=f"holds {name} twice"):
        convert(tmp_path / "other", tmp_path / "ours", words)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_other_widths(plain, tmp_path, words, dtype):
    shutil.copytree(plain, tmp_path / "other")
    path = tmp_path / "other" / "model.safetensors"
    rounded = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    save_file(rounded, path)
    convert(tmp_path / "other", tmp_path / "ours", words)
    found = tensors_of(tmp_path / "ours")
    for name, tensor in rounded.items():
        assert torch.equal(found[name][: len(tensor)], tensor.float())


def test_the_vocabulary_beside_the_weights(plain, tmp_path, words):
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece

    given = words.read_bytes()
    ids = {word: number for number, word in enumerate(given.decode().split())}
    for name in ("list", "file"):
        shutil.copytree(plain, tmp_path / name)
    (tmp_path / "list" / "vocab.txt").write_bytes(given)
    Tokenizer(WordPiece(ids, unk_token="[UNK]")).save(str(tmp_path / "file" / "tokenizer.json"))
    for name in ("list", "file"):
        options = ["--from", "huggingface", "--out", str(tmp_path / "out" / name)]
        assert main(["convert", str(tmp_path / name), *options]) == 0
    assert (tmp_path / "out" / "list" / "vocab.txt").read_bytes() == given
    kept = (tmp_path / "out" / "file" / "tokenizer.json").read_bytes()
    assert kept == (tmp_path / "file" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("named", "form"),
    [(None, "Bert"), ([], "Bert"), ("BertModel", "Bert"), (["\x1b[31m"], "\\x1b[31m")],
)
def test_a_form_is_one_line_and_told_by_the_model_where_it_has_no_name(
    plain, tmp_path, words, named, form
):
    shutil.copytree(plain, tmp_path / "other")
    path = tmp_path / "other" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": named}))
    assert convert(tmp_path / "other", tmp_path / "ours", words).source.form == form


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
