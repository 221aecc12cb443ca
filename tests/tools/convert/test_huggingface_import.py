"""A BERT in Hugging Face's form becomes a checkpoint: the same hidden states, nothing invented."""

import json

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
    restated,
    save_theirs,
    tensors_of,
    with_tensors,
)
from safetensors.torch import save_file

from bert_tools.huggingface.export import export_huggingface
from bert_tools.huggingface.weights import FAMILIES, PADDING_BIAS
from mlperf_bert.errors import CheckpointError


@pytest.mark.parametrize(
    "form",
    [
        "BertForPreTraining",
        "BertForMaskedLM",
        "BertModel",
        "ModernBertForMaskedLM",
        "ModernBertModel",
        "ModernBertForSequenceClassification",
    ],
)
def test_hidden_states_and_scores_are_theirs_and_it_goes_out_as_it_came(
    form, tmp_path, words, synthetic_data
):
    source, out = tmp_path / "theirs", tmp_path / "ours"
    theirs = save_theirs(source, form)
    family = FAMILIES["modern" if form.startswith("Modern") else "bert"]
    is_whole = form.endswith(("ForPreTraining", "ForMaskedLM"))
    if not is_whole:
        with pytest.raises(CheckpointError, match="has no masked-LM head"):
            convert(source, out, words)
    found = convert(source, out, words, "refuse" if is_whole else "draw")
    assert found.source.form == form
    written = tensors_of(out)
    heads = {name for name in written if name.startswith(family.head)}
    assert set(found.drawn) == (set() if is_whole else heads)
    assert not written[family.words][NUM_WORDS:].any()
    assert written[family.word_bias][NUM_WORDS:].tolist() == [PADDING_BIAS] * (PADDED - NUM_WORDS)
    ours = load_ours(out)
    batch, inputs = a_batch(synthetic_data, form)
    with torch.inference_mode():
        hidden = real_rows(theirs.base_model(**inputs).last_hidden_state, inputs)
        assert (ours.body(batch, None) - hidden).abs().max() < 1e-5
        scores, expected = ours(batch), theirs(**inputs)
    assert not scores.mlm.softmax(-1)[:, NUM_WORDS:].any()
    if form == "BertForPreTraining":
        assert (scores.nsp - expected.seq_relationship_logits).abs().max() < 1e-5
    if not is_whole:
        return
    wanted = real_rows(expected[0], inputs)[batch.masked_token_index]
    assert wanted.std() > 0.1
    assert (scores.mlm[:, :NUM_WORDS] - wanted).abs().max() < 1e-5
    assert (scores.nsp is None) is ("MaskedLM" in form)
    export_huggingface(out, tmp_path / "out")
    assert_same(tensors_of(tmp_path / "out"), tensors_of(source))
    stated, given = (
        json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "out")
    )
    assert given["vocab_size"] == NUM_WORDS
    if form.startswith("Modern"):
        stated |= {f"{role}_token_id": None for role in ("bos", "eos", "cls", "sep")}
    assert {key: stated.get(key, value) for key, value in given.items()} == given


def old_names(tensors):
    """As bert-base-uncased is published, with copies and buffers as other files have them."""
    older = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {}
    for name, tensor in tensors.items():
        end = ".".join(name.split(".")[-2:])
        renamed[name.removesuffix(end) + older.get(end, end)] = tensor
    renamed["cls.predictions.decoder.weight"] = tensors[WORDS].clone()
    renamed["cls.predictions.decoder.bias"] = tensors[WORD_BIAS].clone()
    renamed["bert.embeddings.position_ids"] = torch.arange(32)[None]
    return renamed


def test_older_names_and_other_widths_are_the_same_weights(plain, tmp_path, words):
    other = with_tensors(plain, tmp_path / "other", old_names)
    found = convert(other, tmp_path / "ours", words)
    convert(plain, tmp_path / "plain", words)
    assert_same(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "plain"))
    assert len(found.ignored) == 3
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        narrow = {name: tensor.to(dtype) for name, tensor in tensors_of(plain).items()}
        save_file(narrow, other / "model.safetensors")
        convert(other, tmp_path / str(dtype), words)
        ours = tensors_of(tmp_path / str(dtype))
        for name, tensor in narrow.items():
            assert torch.equal(ours[name][: len(tensor)], tensor.float())


@pytest.mark.parametrize(
    ("named", "form"),
    [(None, "Bert"), ([], "Bert"), ("BertModel", "Bert"), (["\x1b[31m"], "\\x1b[31m")],
)
def test_a_form_is_one_line_and_told_by_the_model_where_it_has_no_name(
    plain, tmp_path, words, named, form
):
    other = restated(plain, tmp_path / "other", architectures=named)
    assert convert(other, tmp_path / "ours", words).source.form == form


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
