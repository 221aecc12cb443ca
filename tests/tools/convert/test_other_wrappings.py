"""Weights, tokens and marks that other programs wrap otherwise: read, or named."""

import codecs
import json

import pytest
import torch
from huggingface_cases import SMALL, WORDS, convert, save_theirs, tensors_of
from safetensors.torch import save_file

from bert_tools.huggingface.tokenizer import find_vocabulary
from mlperf_bert.__main__ import main
from mlperf_bert.config.files import read_toml
from mlperf_bert.errors import CheckpointError, DataError
from mlperf_bert.files import read_json
from mlperf_bert.vocabulary.word_pieces import Tokenizer, load_vocabulary

LAYER = "encoder.layer.0."
WRAPPERS = {
    "DistributedDataParallel": lambda name: f"module.{name}",
    "torch.compile": lambda name: f"_orig_mod.{name}",
    "a module that holds it": lambda name: f"model.{name}",
    "all three": lambda name: f"module._orig_mod.model.{name}",
    "FSDP, within": lambda name: name.replace(LAYER, "encoder.layer.0._fsdp_wrapped_module."),
    "a compiled layer": lambda name: name.replace(LAYER, "encoder.layer.0._orig_mod."),
}


def rename(folder, change):
    tensors = {change(name): tensor.clone() for name, tensor in tensors_of(folder).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("form", ["BertForPreTraining", "BertModel", "ModernBertForMaskedLM"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_of_wrappers_go(tmp_path, words, form, wrapper):
    for name in ("plain", "wrapped"):
        save_theirs(tmp_path / name, form)
    rename(tmp_path / "wrapped", WRAPPERS[wrapper])
    for name in ("plain", "wrapped"):
        convert(tmp_path / name, tmp_path / f"{name}_converted", words, "draw")
    found, expected = (tensors_of(tmp_path / f"{name}_converted") for name in ("wrapped", "plain"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_name_in_doubt_is_named(tmp_path, words):
    save_theirs(tmp_path / "two", "BertForPreTraining")
    rename(tmp_path / "two", lambda name: f"teacher.{name}" if name == WORDS else name)
    with pytest.raises(CheckpointError, match=rf"{WORDS} is missing \(found .*teacher.{WORDS}'"):
        convert(tmp_path / "two", tmp_path / "out", words)


def test_the_only_token_type_is_that_of_both_segments(tmp_path, words):
    save_theirs(tmp_path / "one", "BertForPreTraining", type_vocab_size=1)
    convert(tmp_path / "one", tmp_path / "out", words)
    name = "bert.embeddings.token_type_embeddings.weight"
    found, (only,) = tensors_of(tmp_path / "out")[name], tensors_of(tmp_path / "one")[name]
    assert torch.equal(found, torch.stack([only, only]))


def with_tokens(folder, words, size, **files):
    """A model of `size` words beside vocab.txt and JSON files."""
    save_theirs(folder, "BertForPreTraining", vocab_size=size)
    (folder / "vocab.txt").write_bytes(words.read_bytes())
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


SIZE = SMALL["vocab_size"]
ADDED = {
    "added_tokens": {"added_tokens": {"[ENT]": SIZE, "sarscov": SIZE + 1, "[PAD]": 0}},
    "decoder": {
        "tokenizer_config": {
            "tokenizer_class": "BertTokenizer",
            "added_tokens_decoder": {
                "0": {"content": "[PAD]"},
                str(SIZE + 1): {"content": "sarscov"},
                str(SIZE): {"content": "[ENT]"},
            },
        }
    },
}


@pytest.mark.parametrize("where", ADDED)
def test_added_tokens_are_kept_with_their_rows(tmp_path, words, where):
    folder = with_tokens(tmp_path / "added", words, SIZE + 2, **ADDED[where])
    assert (
        main(["convert", "--from", "huggingface", str(folder), "--out", str(tmp_path / "o")]) == 0
    )
    found = load_vocabulary(tmp_path / "o" / "vocab.txt")
    assert (found.ids["[ENT]"], found.ids["sarscov"], len(found)) == (SIZE, SIZE + 1, SIZE + 2)
    assert Tokenizer(found).encode(["Sarscov"]) == [bytes([SIZE + 1, 0])]
    rows = tensors_of(tmp_path / "o")[WORDS]
    assert torch.equal(rows[: SIZE + 2], tensors_of(folder)[WORDS])


@pytest.mark.parametrize(
    "files",
    [
        {"added_tokens": {"[ENT]": SIZE + 1}},
        {"added_tokens": {"w1": SIZE}},
        {"added_tokens": {"[ENT]": "many"}},
        {"tokenizer_config": {"added_tokens_decoder": {"69": {"name": "[ENT]"}}}},
        {"tokenizer_config": {"tokenizer_class": "BertJapaneseTokenizer"}},
        {"tokenizer_config": {"tokenizer_class": "XLMRobertaTokenizer"}},
        {"tokenizer_config": {"tokenizer_class": 3}},
    ],
)
def test_tokens_that_are_not_ours_are_refused(tmp_path, words, files):
    folder = with_tokens(tmp_path / "added", words, SIZE + 2, **files)
    with pytest.raises((CheckpointError, DataError)) as caught:
        find_vocabulary(folder, None)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_byte_order_marks_are_no_part_of_what_they_precede(tmp_path, words):
    marked = {"vocab.txt": words.read_bytes(), "a.toml": b"a = 1\n", "a.json": b'{"a": 1}'}
    for name, contents in marked.items():
        (tmp_path / name).write_bytes(codecs.BOM_UTF8 + contents)
    assert load_vocabulary(tmp_path / "vocab.txt") == load_vocabulary(words)
    assert read_toml(tmp_path / "a.toml") == {"a": 1}
    assert read_json(tmp_path / "a.json", missing="", remedy="") == {"a": 1}


def test_a_list_for_sentencepiece_is_refused(tmp_path):
    pieces = [f"\u2581w{number}" for number in range(40)]
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]) + "\n")
    with pytest.raises(DataError, match=r"SentencePiece vocabulary \(40 of .*; pass the tokenizer"):
        load_vocabulary(path)
