"""ModernBERT in Hugging Face's form, in and out: the same scores, both spellings of its config."""

import json
from dataclasses import asdict

import pytest
import torch
from huggingface_cases import (
    MODERN,
    NUM_WORDS,
    PADDED,
    PATTERN,
    config_for,
    convert,
    restated,
    save_theirs,
    tensors_of,
)

from bert_tools.huggingface.export import export_huggingface
from checkpoint_cases import trained
from mlperf_bert.__main__ import main
from mlperf_bert.checkpoint.manifest import read_config
from mlperf_bert.errors import CheckpointError
from own_texts import save_byte_level
from support import refusal

WORDS, WORD_BIAS = "model.embeddings.tok_embeddings.weight", "decoder.bias"
OLDER = {"global_attn_every_n_layers": 2, "global_rope_theta": 50.0, "local_rope_theta": 20}


def test_either_spelling_is_the_same_model(modern, tmp_path, words):
    convert(modern, tmp_path / "plain", words)
    plain = read_config(tmp_path / "plain").model
    assert {name: asdict(plain)[name] for name in PATTERN} == PATTERN
    for number, (without, more) in enumerate(
        (
            (("global_attn_every_n_layers",), {}),  # of transformers 5
            (("layer_types", "rope_parameters"), OLDER),  # of 4.48
            ((), OLDER | {"layer_norm_eps": 1e-5, "position_embedding_type": "absolute"}),
        )
    ):
        ours = tmp_path / f"ours_{number}"
        convert(restated(modern, tmp_path / f"{number}", without, **more), ours, words)
        assert read_config(ours).model == plain
    export_huggingface(ours, tmp_path / "out")
    stated = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stated["layer_types"] == ["full_attention", "sliding_attention"] * 2
    assert {name: stated[name] for name in OLDER} == OLDER


def test_what_is_not_stated_is_as_published(modern, tmp_path, words):
    gone = ("layer_types", "rope_parameters", "global_attn_every_n_layers", "local_attention")
    folder = restated(modern, tmp_path / "other", (*gone, "norm_eps", "model_max_length"))
    convert(folder, tmp_path / "ours", words)
    model = read_config(tmp_path / "ours").model
    assert (model.global_attention_every, model.attention_window) == (3, 128)
    assert (model.rope_base_global, model.rope_base_local) == (160_000.0, 10_000.0)
    assert (model.layer_norm_epsilon, model.hidden_dropout) == (1e-5, 0.0)


def test_rows_that_no_token_has_are_dropped(tmp_path, words):
    """As the published model's: 50,280 words and special tokens, 50,368 rows."""
    save_theirs(tmp_path / "theirs", "ModernBertForMaskedLM", vocab_size=160)
    found = convert(tmp_path / "theirs", tmp_path / "ours", words)
    assert (found.word_rows, found.shapes[WORDS][0]) == (160, PADDED)
    theirs, ours = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "ours")
    assert all(torch.equal(ours[name], theirs[name][:PADDED]) for name in (WORDS, WORD_BIAS))
    save_theirs(tmp_path / "wide", "ModernBertForMaskedLM", vocab_size=NUM_WORDS + 1025)
    with pytest.raises(CheckpointError, match="the vocabulary has 69 tokens"):
        convert(tmp_path / "wide", tmp_path / "none", words)


def test_its_own_tokenizer_goes_in_and_out(tmp_path, capsys):
    """Pairs of bytes and BERT's special tokens after them, as published."""
    import transformers
    from tokenizers import AddedToken, Tokenizer

    path = save_byte_level(tmp_path / "tokenizer.json", ["the cat sat on the mat"] * 9, ())
    tokenizer = Tokenizer.from_file(str(path))
    roles = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")
    tokenizer.add_special_tokens([AddedToken(each, lstrip=each == "[MASK]") for each in roles])
    count = tokenizer.get_vocab_size()
    tokenizer.save(str(path))
    checkpoint = trained(tmp_path / "run", path, *MODERN, f"model.vocab_size={count}")
    export_huggingface(checkpoint, tmp_path / "out", path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    found = loaded("the [MASK] sat")
    assert sorted(found) == ["attention_mask", "input_ids"] and loaded.mask_token_id == count - 1
    assert len(convert(tmp_path / "out", tmp_path / "again", None).vocabulary) == count
    assert main(["fill", "the [MASK] sat", "--checkpoint", str(tmp_path / "again")]) == 0
    assert capsys.readouterr().out.count("\n") == 5


def test_it_fills_is_evaluated_and_a_run_begins_with_it(
    modern, tmp_path, words, synthetic_data, capsys
):
    folder = tmp_path / "ours"
    convert(modern, folder, words)
    assert main(["fill", "a [MASK] b [MASK]", "--checkpoint", str(folder)]) == 0
    assert capsys.readouterr().out.count("\n") == 12
    place = ["--checkpoint", str(folder), "--data", str(synthetic_data)]
    assert main(["evaluate", *place, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mlm_accuracy"] >= 0
    begin = ("--init-checkpoint", str(folder))
    choose = ("pretrain", __file__, "--only", "choose", "--out", "out", "--set", "run.device=cpu")
    assert main([*choose, *begin]) == 0
    said = capsys.readouterr().out
    assert '\narchitecture = "modern"\n' in said and "\nrope_base_local = 20.0\n" in said
    assert main([*choose[:-1], "run.device=cuda", *begin]) == 0  # whose config is plain BERT's
    said = capsys.readouterr().out
    assert "\nhidden_dropout = 0.0\n" in said and "\nattention_dropout = 0.0\n" in said
    config = config_for(folder, tmp_path / "fits.toml")
    options = ("--config", config, "--data", synthetic_data, "--run-dir", tmp_path / "run")
    train = [str(word) for word in ("train", *options, *begin, "--set")]
    assert "is 64, but the weights in" in refusal(capsys, *train, "model.attention_window=64")
    assert main([*train, "run.max_steps=2", "--set", "model.rope_base_local=30"]) == 3
    changed = "model.rope_base_local is 30.0, but the weights in "
    assert f"{changed}{folder} were trained with 20.0" in capsys.readouterr().out
