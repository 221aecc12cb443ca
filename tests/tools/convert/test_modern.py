"""ModernBERT in Hugging Face's form, in and out: the same scores, both spellings of its config."""

import json
import shutil
from dataclasses import asdict

import pytest
import torch
from huggingface_cases import (
    MODERN,
    NUM_WORDS,
    PADDED,
    a_batch,
    config_for,
    convert,
    load_ours,
    real_rows,
    save_theirs,
    tensors_of,
    trained,
)
from safetensors.torch import load_file, save_file

from bert_tools.huggingface.export import export_huggingface
from bert_tools.huggingface.weights import PADDING_BIAS
from mlperf_bert.__main__ import main
from mlperf_bert.checkpoint.manifest import read_config
from mlperf_bert.config.files import load_config
from mlperf_bert.errors import CheckpointError
from support import refusal

WORDS, WORD_BIAS = "model.embeddings.tok_embeddings.weight", "decoder.bias"
PATTERN = {
    "architecture": "modern",
    "objective": "mlm",
    "num_layers": 4,
    "global_attention_every": 2,
    "attention_window": 4,
    "rope_base_global": 50.0,
    "rope_base_local": 20.0,
    "layer_norm_epsilon": 1e-4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
OLDER = {"global_attn_every_n_layers": 2, "global_rope_theta": 50.0, "local_rope_theta": 20}


@pytest.fixture(scope="module")
def modern(tmp_path_factory):
    """A saved ModernBertForMaskedLM, which tests must not change."""
    folder = tmp_path_factory.mktemp("modern") / "theirs"
    save_theirs(folder, "ModernBertForMaskedLM")
    return folder


def restated(modern, folder, without=(), **more):
    """The same weights under a config without some keys, and with others."""
    shutil.copytree(modern, folder)
    path = folder / "config.json"
    stated = {k: v for k, v in json.loads(path.read_text()).items() if k not in without}
    path.write_text(json.dumps(stated | more))
    return folder


@pytest.mark.parametrize(
    "form", ["ModernBertForMaskedLM", "ModernBertModel", "ModernBertForSequenceClassification"]
)
def test_hidden_states_and_scores_are_theirs(form, tmp_path, words, synthetic_data):
    theirs = save_theirs(tmp_path / "theirs", form)
    is_whole = form == "ModernBertForMaskedLM"
    if not is_whole:
        with pytest.raises(CheckpointError, match="has no masked-LM head"):
            convert(tmp_path / "theirs", tmp_path / "ours", words)
    found = convert(tmp_path / "theirs", tmp_path / "ours", words, "draw")
    ours = load_ours(tmp_path / "ours")
    assert {name: asdict(ours.config)[name] for name in PATTERN} == PATTERN
    assert found.source.form == form and set(found.drawn) == (
        set() if is_whole else {"decoder.bias", "head.dense.weight", "head.norm.weight"}
    )
    batch, inputs = a_batch(synthetic_data)
    del inputs["token_type_ids"]
    body = theirs if form == "ModernBertModel" else theirs.model
    with torch.inference_mode():
        expected = real_rows(body(**inputs).last_hidden_state, inputs)
        assert (ours.body(batch, None) - expected).abs().max() < 1e-5
        scores = ours(batch).mlm
        if is_whole:
            wanted = real_rows(theirs(**inputs).logits, inputs)[batch.masked_token_index]
            assert wanted.std() > 0.1
            assert (scores[:, :NUM_WORDS] - wanted).abs().max() < 1e-5
    assert not scores.softmax(-1)[:, NUM_WORDS:].any()
    written = tensors_of(tmp_path / "ours")
    assert not written[WORDS][NUM_WORDS:].any()
    assert written[WORD_BIAS][NUM_WORDS:].tolist() == [PADDING_BIAS] * (PADDED - NUM_WORDS)


@pytest.mark.parametrize(
    ("without", "more"),
    [
        (("global_attn_every_n_layers",), {}),
        (("layer_types", "rope_parameters"), OLDER),
        ((), OLDER | {"layer_norm_eps": 1e-5, "position_embedding_type": "absolute"}),
    ],
    ids=["of 5", "of 4.48", "both"],
)
def test_either_spelling_is_the_same_model(modern, tmp_path, words, without, more):
    convert(modern, tmp_path / "plain", words)
    convert(restated(modern, tmp_path / "other", without, **more), tmp_path / "ours", words)
    plain, ours = read_config(tmp_path / "plain"), read_config(tmp_path / "ours")
    assert plain.model == ours.model
    assert {name: asdict(ours.model)[name] for name in PATTERN} == PATTERN


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
    with pytest.raises(CheckpointError, match="its vocabulary 69"):
        convert(tmp_path / "wide", tmp_path / "none", words)


FULL, LOCAL = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        *((f"{name}_bias", True, "computes False only") for name in ("norm", "attention", "mlp")),
        ("classifier_bias", True, "computes False only"),
        ("decoder_bias", False, "computes True only"),
        ("tie_word_embeddings", False, "computes True only"),
        ("hidden_activation", "silu", "computes 'gelu' only"),
        ("classifier_activation", "relu", "computes 'gelu' only"),
        ("mlp_dropout", 0.1, "is 0.1, not 0.0 as elsewhere"),
        ("layer_types", [FULL, LOCAL, LOCAL, FULL], "is not full_attention in the first layer"),
        ("layer_types", [FULL, LOCAL], "is not full_attention in the first layer"),
        ("global_attn_every_n_layers", 3, "every 3 on"),
        ("global_attn_every_n_layers", 0, "is 0, not an integer of at least 1"),
        ("local_attention", 0, "is 0, not an integer of at least 1"),
        ("rope_parameters", {"rope_theta": 50.0}, "no kind of this model's layers"),
        ("rope_parameters", {FULL: {"rope_type": "yarn", "factor": 4.0}}, "does not compute"),
        ("rope_parameters", {FULL: {"rope_theta": -1.0}}, "rope_base_global"),
        ("rope_scaling", {"factor": 2.0}, "does not compute"),
        ("head_dim", 16, "does not compute"),
        ("norm_eps", 2.0, "layer_norm_epsilon: is 2.0"),
        ("intermediate_size", 64, "has the shape [96, 32], the model's is [128, 32]"),
        ("num_attention_heads", 5, "does not divide"),
        ("num_hidden_layers", 3, "is not full_attention in the first layer"),
        ("model_type", "modernbert-decoder", "not bert or modernbert"),
    ],
)
def test_another_model_is_refused(modern, tmp_path, words, capsys, setting, value, said):
    folder = restated(modern, tmp_path / "other", **{setting: value})
    options = ("--from", "huggingface", "--vocab", words, "--out", tmp_path / "ours")
    assert said in refusal(capsys, "convert", folder, *options)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"decoder.weight": torch.ones(NUM_WORDS, 32)}, "is not equal to"),
        ({"model.layers.1.attn_norm.bias": torch.ones(32)}, "is no part of the ModernBERT"),
        ({"model.layers.0.attn_norm.weight": torch.ones(32)}, "is no part of the ModernBERT"),
        ({"model.layers.1.mlp.Wi.weight": torch.ones(32, 96)}, "has the shape [32, 96]"),
        ({"head.dense.weight": None}, "head.dense.weight is missing"),
        ({"model.final_norm.weight": None}, "model.final_norm.weight is missing"),
        ({"decoder.bias": None}, "has no masked-LM head"),
    ],
)
def test_wrong_tensors_are_refused(modern, tmp_path, words, capsys, change, said):
    path = restated(modern, tmp_path / "other") / "model.safetensors"
    tensors = {**load_file(path), **change}
    save_file({name: each for name, each in tensors.items() if each is not None}, path)
    options = ("--from", "huggingface", "--vocab", words, "--out", tmp_path / "ours")
    assert said in refusal(capsys, "convert", tmp_path / "other", *options)


def test_transformers_computes_the_same(tmp_path, words, synthetic_data):
    import transformers

    checkpoint = trained(tmp_path / "run", words, *MODERN)
    done = export_huggingface(checkpoint, tmp_path / "out", words)
    assert done.startswith("ModernBertForMaskedLM of") and f" {PADDED} rows of words" in done
    theirs, loaded = transformers.AutoModelForMaskedLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="sdpa"
    )
    assert not any(loaded.values()), loaded
    batch, inputs = a_batch(synthetic_data)
    assert inputs["attention_mask"].sum() < inputs["attention_mask"].numel()
    del inputs["token_type_ids"]
    with torch.inference_mode():
        ours = load_ours(checkpoint)(batch).mlm
        wanted = real_rows(theirs.eval()(**inputs).logits, inputs)[batch.masked_token_index]
    assert wanted.std() > 0.1 and (ours - wanted).abs().max() < 1e-5
    stated = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stated["layer_types"] == [FULL, LOCAL, FULL, LOCAL]
    assert {name: stated[name] for name in OLDER} == OLDER
    assert not (tmp_path / "out" / "README.md").exists()  # which own-text alone has facts for
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert sorted(tokenizer("the", "a")) == ["attention_mask", "input_ids"]
    assert tokenizer.model_max_length == 32


def test_its_own_tokenizer_goes_in_and_out(tmp_path, capsys):
    """Pairs of bytes and BERT's special tokens after them, as published."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
    roles = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")
    tokenizer.add_special_tokens([AddedToken(each, lstrip=each == "[MASK]") for each in roles])
    ends = [(each, tokenizer.token_to_id(each)) for each in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    path, count = tmp_path / "tokenizer.json", tokenizer.get_vocab_size()
    tokenizer.save(str(path))
    checkpoint = trained(tmp_path / "run", path, *MODERN, f"model.vocab_size={count}")
    export_huggingface(checkpoint, tmp_path / "out", path)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == path.read_bytes()
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    found = loaded("the [MASK] sat")
    assert sorted(found) == ["attention_mask", "input_ids"] and loaded.mask_token_id == count - 1
    assert len(convert(tmp_path / "out", tmp_path / "again", None).vocabulary) == count
    assert main(["fill", "the [MASK] sat", "--checkpoint", str(tmp_path / "again")]) == 0
    assert capsys.readouterr().out.count("\n") == 5


def test_sentence_transformers_loads_an_export(tmp_path, words):
    package = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    export_huggingface(trained(tmp_path / "run", words, *MODERN), tmp_path / "out", words)
    encoder = Transformer(str(tmp_path / "out"))
    pooling = Pooling(encoder.get_embedding_dimension(), pooling_mode="mean")
    embedder = package.SentenceTransformer(modules=[encoder, pooling], device="cpu")
    found = embedder.encode(["w0 w1 " * 40, "w2"])
    assert found.shape == (2, 32) and abs(found).min() > 0


def test_out_and_in_again_is_bit_for_bit(tmp_path, words):
    checkpoint = trained(tmp_path / "run", words, *MODERN)
    export_huggingface(checkpoint, tmp_path / "out", words)
    found = convert(tmp_path / "out", tmp_path / "again", words)
    name = "model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (checkpoint / name).read_bytes()
    assert not found.drawn and not found.ignored
    assert read_config(tmp_path / "again").model == read_config(checkpoint).model


def test_in_and_out_again_is_bit_for_bit(modern, tmp_path, words):
    convert(modern, tmp_path / "ours", words)
    export_huggingface(tmp_path / "ours", tmp_path / "out")
    before, after = tensors_of(modern), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    stated = json.loads((modern / "config.json").read_text())
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    ids = {f"{role}_token_id": None for role in ("bos", "eos", "cls", "sep")}
    assert {key: stated.get(key, value) for key, value in written.items()} | ids == written


def test_it_fills_and_is_evaluated(modern, tmp_path, words, synthetic_data, capsys):
    convert(modern, tmp_path / "ours", words)
    assert main(["fill", "a [MASK] b [MASK]", "--checkpoint", str(tmp_path / "ours")]) == 0
    assert capsys.readouterr().out.count("\n") == 12
    place = ["--checkpoint", str(tmp_path / "ours"), "--data", str(synthetic_data)]
    assert main(["evaluate", *place, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mlm_accuracy"] >= 0


def test_a_run_begins_with_it(modern, tmp_path, words, synthetic_data, capsys):
    folder = tmp_path / "ours"
    convert(modern, folder, words)
    config = config_for(folder, tmp_path / "fits.toml")
    found = load_config(config, (), folder)
    assert {name: asdict(found.model)[name] for name in PATTERN if "dropout" not in name} == {
        name: value for name, value in PATTERN.items() if "dropout" not in name
    }
    theirs = tensors_of(modern)
    for name, each in load_ours(folder).state_dict().items():
        assert torch.equal(each[: len(theirs[name])], theirs[name]), name
    place = ("--data", synthetic_data, "--run-dir", tmp_path / "run", "--init-checkpoint", folder)
    shared = ("train", "--config", config, *place, "--set")
    assert "is 64, the weights in" in refusal(capsys, *shared, "model.attention_window=64")
    given = ["--init-checkpoint", str(folder), "--set", "run.device=cpu"]
    assert main(["own-text", __file__, "--only", "choose", "--out", "out", *given]) == 0
    said = capsys.readouterr().out
    assert "\nmodel.architecture=modern\n" in said and "\nmodel.rope_base_local=20.0\n" in said
    assert main(list(map(str, (*shared, "run.max_steps=2")))) == 3
