"""`fill`: the words for [MASK] are those of the model's own logits, and mistakes are one line."""

import math
import re
from dataclasses import replace

import pytest
import torch

from bert_tools.huggingface.fill import fill
from bert_tools.huggingface.tokenizer import tokens_of
from checkpoint_cases import CPU, trained
from mlperf_bert.__main__ import main
from mlperf_bert.config.files import load_config
from mlperf_bert.errors import ConfigError
from mlperf_bert.model.bert import make_model
from mlperf_bert.vocabulary.any_vocabulary import load_any_vocabulary
from mlperf_bert.vocabulary.word_pieces import load_vocabulary
from model_cases import hugging_face_twin
from own_texts import save_byte_level
from support import refusal

SPECIAL = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}


@pytest.fixture
def config(tiny_config):
    return load_config(tiny_config)


@pytest.fixture
def vocabulary(synthetic_data):
    return load_vocabulary(synthetic_data / "words.txt")


@pytest.fixture
def model(config):
    wider = replace(config, model=replace(config.model, initializer_range=0.5))
    return make_model(wider, 3, CPU).eval()


def test_candidates_are_those_of_transformers(model, vocabulary):
    theirs = hugging_face_twin(model).eval()
    tokens = tokens_of("w3 [MASK] w7 w9 [MASK]", vocabulary, 32)
    with torch.inference_mode():
        logits = theirs(torch.tensor([tokens])).prediction_logits[0]
    places = [place for place, token in enumerate(tokens) if token == vocabulary.mask_id]
    every = len(vocabulary) - len(SPECIAL)
    for top, shown in ((5, 5), (1000, every)):
        found = fill(model, vocabulary, "w3 [MASK] w7 w9 [MASK]", top)
        assert len(found) == len(places) == 2
        for place, candidates in zip(places, found, strict=True):
            values = logits[place].softmax(-1)
            by_token = {token: values[id_].item() for token, id_ in vocabulary.ids.items()}
            expected = sorted(by_token.keys() - SPECIAL, key=by_token.__getitem__, reverse=True)
            assert [each.token for each in candidates[:5]] == expected[:5]
            assert {each.token for each in candidates} == set(expected[:shown])
            for each in candidates:
                assert math.isclose(each.probability, by_token[each.token], rel_tol=1e-4)


def test_tokens_are_those_of_prepare(vocabulary):
    words = ["[CLS]", "w1", "[MASK]", "w2", "[UNK]", "[MASK]", "[SEP]"]
    text = " w1 [MASK]w2 else[MASK] "
    assert [vocabulary.tokens[token] for token in tokens_of(text, vocabulary, 7)] == words
    for other, longest, said in (
        (text, 6, "has 7 tokens, but the model reads at most 6"),
        ("w1 [mask]", 32, r"has no \[MASK\]"),
    ):
        with pytest.raises(ConfigError, match=said):
            tokens_of(other, vocabulary, longest)


def test_command(tmp_path, vocabulary, synthetic_data, capsys):
    """With a checkpoint as training leaves it."""
    saved = trained(tmp_path / "run_0", synthetic_data / "words.txt")
    checkpoint = saved.parent
    (checkpoint / "LATEST").write_text(saved.name)
    given = ("fill", "w1 [MASK] w2", "--checkpoint", str(checkpoint), "--device", "cpu")
    missing = "nor any above it has vocab.txt or tokenizer.json"
    assert missing in refusal(capsys, *given)
    (checkpoint.parents[1] / "vocab.txt").write_bytes(vocabulary.contents + b"more\n")
    assert "this is not the vocabulary that the checkpoint" in refusal(capsys, *given)
    assert "--top: must be from 1 to 1000, not 0" in refusal(capsys, *given, "--top", 0)
    assert main([*given, "--vocab", str(synthetic_data / "train/vocab.txt")]) == 0
    expected = capsys.readouterr().out
    (checkpoint.parents[1] / "vocab.txt").write_bytes(vocabulary.contents)
    assert main([*given]) == 0
    shown = capsys.readouterr().out
    assert shown == expected and shown.count("\n") == 5
    assert all(re.fullmatch(r"0\.[0-9]{4}  w[0-9]+", line) for line in shown.splitlines())


def test_a_byte_level_vocabulary(config, tmp_path):
    save_byte_level(tmp_path / "tokenizer.json", ["one two"])
    vocabulary = load_any_vocabulary(tmp_path / "tokenizer.json")
    wanted = tokens_of("one [MASK] two", vocabulary, 32)
    assert wanted.count(vocabulary.mask_id) == 1
    assert tokens_of("one <mask> two", vocabulary, 32) == wanted
    sized = replace(config, model=replace(config.model, vocab_size=len(vocabulary)))
    (found,) = fill(make_model(sized, 3, CPU).eval(), vocabulary, "<mask>", 1000)
    shown = [candidate.token for candidate in found]
    assert len(shown) == len(vocabulary) - 4 > 256
    assert all(shown) and "\u0120" in shown  # the space's name
