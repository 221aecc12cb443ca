"""A BERT in Hugging Face's form becomes a checkpoint: the same hidden states, nothing invented."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_cases import (
    NUM_WORDS,
    PADDED,
    a_batch,
    convert,
    load_ours,
    make_theirs,
    real_rows,
    save_theirs,
    tensors_of,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from mlperf_bert.__main__ import main
from mlperf_bert.convert.padding import PADDING_BIAS

FORMS = ("BertForPreTraining", "BertForMaskedLM", "BertModel")
WORDS, WORD_BIAS = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved BertForPreTraining, which tests must not change."""
    folder = tmp_path_factory.mktemp("plain") / "bert"
    save_theirs(folder, "BertForPreTraining")
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_hidden_states_and_scores_are_theirs(
    form: str, tmp_path: Path, words: Path, synthetic_data: Path
) -> None:
    theirs = save_theirs(tmp_path / "theirs", form)
    missing = "draw" if form == "BertModel" else "refuse"
    report = convert(tmp_path / "theirs", tmp_path / "ours", words, missing)
    ours = load_ours(tmp_path / "ours")
    batch, inputs = a_batch(synthetic_data)
    with torch.inference_mode():
        expected = theirs(**inputs, output_hidden_states=True)
        hidden = ours.bert(batch, None)
        scores = ours(batch)
    assert (hidden - real_rows(expected.hidden_states[-1], inputs)).abs().max() < 1e-5
    assert report.form == form and report.matched == len(tensors_of(tmp_path / "ours")) - len(
        report.drawn
    )
    if form == "BertModel":
        assert set(report.drawn.values()) == {"masked-LM head"}
        return
    assert not report.drawn
    mlm = expected.prediction_logits if form == "BertForPreTraining" else expected.logits
    wanted = real_rows(mlm, inputs)[batch.masked_token_index]
    assert (scores.mlm[:, :NUM_WORDS] - wanted).abs().max() < 1e-5
    if form == "BertForPreTraining":
        assert (scores.nsp - expected.seq_relationship_logits).abs().max() < 1e-5
    else:
        assert scores.nsp is None


def test_rows_that_pad_never_matter(plain: Path, tmp_path: Path, words: Path) -> None:
    report = convert(plain, tmp_path / "ours", words)
    assert (report.rows_in_source, report.rows) == (NUM_WORDS, PADDED)
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


def old_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As files of 2019 name them, copies and buffers among them."""
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


def only_copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The bias under its second name alone."""
    renamed = dict(tensors)
    renamed["cls.predictions.decoder.bias"] = renamed.pop(WORD_BIAS)
    return renamed


@pytest.mark.parametrize("change", [old_names, only_copies])
def test_other_names_are_the_same_weights(
    plain: Path, tmp_path: Path, words: Path, change: Any
) -> None:
    shutil.copytree(plain, tmp_path / "other")
    path = tmp_path / "other" / "model.safetensors"
    save_file(change(load_file(path)), path)
    report = convert(tmp_path / "other", tmp_path / "ours", words)
    convert(plain, tmp_path / "plain", words)
    assert_same(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "plain"))
    assert bool(report.copies) == (change is old_names) == bool(report.ignored)


def test_several_files_are_the_same_weights(plain: Path, tmp_path: Path, words: Path) -> None:
    make_theirs("BertForPreTraining").save_pretrained(tmp_path / "cut", max_shard_size="20KB")
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) > 2
    convert(tmp_path / "cut", tmp_path / "ours", words)
    convert(plain / "model.safetensors", tmp_path / "plain", words)
    assert_same(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "plain"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_other_widths(
    plain: Path, tmp_path: Path, words: Path, dtype: torch.dtype
) -> None:
    shutil.copytree(plain, tmp_path / "other")
    path = tmp_path / "other" / "model.safetensors"
    rounded = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    save_file(rounded, path)
    report = convert(tmp_path / "other", tmp_path / "ours", words)
    found = tensors_of(tmp_path / "ours")
    for name, tensor in rounded.items():
        assert torch.equal(found[name][: len(tensor)], tensor.float())
    assert list(report.dtypes) == [str(dtype).removeprefix("torch.")]


def test_the_vocabulary_beside_the_weights(plain: Path, tmp_path: Path, words: Path) -> None:
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
        assert (tmp_path / "out" / name / "vocab.txt").read_bytes() == given


def test_a_capital_vocabulary_is_remarked(plain: Path, tmp_path: Path, words: Path) -> None:
    shutil.copytree(plain, tmp_path / "cased")
    (tmp_path / "cased" / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    report = convert(tmp_path / "cased", tmp_path / "ours", words)
    assert any("capitals" in remark for remark in report.remarks)


def edit_config(folder: Path, **changes: Any) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | changes))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("model_type", "roberta"),
        ("hidden_act", "gelu_new"),
        ("position_embedding_type", "relative_key"),
        ("is_decoder", True),
        ("add_cross_attention", True),
        ("tie_word_embeddings", False),
        ("is_decoder", 0),
        ("layer_norm_eps", 2.0),
        ("layer_norm_eps", "small"),
        ("num_attention_heads", 5),
        ("num_hidden_layers", 3),
        ("hidden_size", 64),
        ("vocab_size", 70),
        ("quantization_config", {"bits": 8}),
        ("type_vocab_size", 1),
    ],
)
def test_another_model_is_refused(
    plain: Path, tmp_path: Path, words: Path, capsys: Any, setting: str, value: object
) -> None:
    shutil.copytree(plain, tmp_path / "other")
    edit_config(tmp_path / "other", **{setting: value})
    assert_refused(tmp_path, words, capsys, "other", "")


def untied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "cls.predictions.decoder.weight": tensors[WORDS] + 1e-3}


def diverged(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, WORD_BIAS: torch.full_like(tensors[WORD_BIAS], float("nan"))}


def quantised(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, WORD_BIAS: tensors[WORD_BIAS].to(torch.int8)}


def adapted(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "bert.encoder.layer.0.adapter.weight": torch.ones(3)}


def halved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    name = "bert.encoder.layer.1.output.dense.weight"
    return {**tensors, name: tensors[name][:16].clone()}


def without_a_bias(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != WORD_BIAS}


def without_a_layer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if "layer.0" not in name}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (untied, "not equal"),
        (diverged, "not finite"),
        (quantised, "int8"),
        (adapted, "adapter"),
        (halved, "[16, 48]"),
        (without_a_bias, "missing"),
        (without_a_layer, "1 layers"),
    ],
)
def test_wrong_tensors_are_refused(
    plain: Path, tmp_path: Path, words: Path, capsys: Any, change: Any, problem: str
) -> None:
    shutil.copytree(plain, tmp_path / "other")
    path = tmp_path / "other" / "model.safetensors"
    save_file(change(load_file(path)), path)
    assert_refused(tmp_path, words, capsys, "other", problem)


def test_other_words_are_refused(plain: Path, tmp_path: Path, words: Path, capsys: Any) -> None:
    more = tmp_path / "more.txt"
    more.write_text(words.read_text() + "another\n")
    shutil.copytree(plain, tmp_path / "bert")
    assert_refused(tmp_path, more, capsys, "bert", "its vocabulary 70")


def test_a_pickle_is_refused(plain: Path, tmp_path: Path, words: Path, capsys: Any) -> None:
    shutil.copytree(plain, tmp_path / "old")
    (tmp_path / "old" / "model.safetensors").rename(tmp_path / "old" / "pytorch_model.bin")
    assert_refused(tmp_path, words, capsys, "old", "save_pretrained")


def test_a_head_is_not_invented(tmp_path: Path, words: Path, capsys: Any) -> None:
    save_theirs(tmp_path / "bare", "BertModel")
    assert_refused(tmp_path, words, capsys, "bare", "--missing draw")


def test_an_index_that_lies_is_refused(tmp_path: Path, words: Path, capsys: Any) -> None:
    make_theirs("BertForPreTraining").save_pretrained(tmp_path / "cut", max_shard_size="20KB")
    path = tmp_path / "cut" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    true_file = index["weight_map"][WORDS]
    for wrong in ("../x.safetensors", "pytorch_model.bin", "none.safetensors"):
        index["weight_map"][WORDS] = wrong
        path.write_text(json.dumps(index))
        assert_refused(tmp_path, words, capsys, "cut", "")
    index["weight_map"] = {**index["weight_map"], WORDS: true_file, "another": true_file}
    path.write_text(json.dumps(index))
    assert_refused(tmp_path, words, capsys, "cut", "another")


def test_what_is_there_is_not_written_over(
    plain: Path, tmp_path: Path, words: Path, capsys: Any
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").write_text("kept")
    options = ["--from", "huggingface", "--vocab", str(words), "--out", str(tmp_path / "out")]
    assert main(["convert", str(plain), *options]) == 2
    assert "is there already" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["kept"]


def assert_refused(folder: Path, words: Path, capsys: Any, name: str, problem: str) -> None:
    """One line, status 2, and nothing new in the folder."""
    before = sorted(path.name for path in folder.iterdir())
    capsys.readouterr()
    options = ["--from", "huggingface", "--vocab", str(words), "--out", str(folder / "ours")]
    assert main(["convert", str(folder / name), *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and problem in error, error
    assert sorted(path.name for path in folder.iterdir()) == before


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
