"""Tokenizer files that blow a text up are refused before the library splits anything."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, trainers

from mlperf_bert.common.errors import DataError
from mlperf_bert.vocabulary import tokenizer_file

TEXT = "\u00e9\u4e00 a text, and a \ufdfa"
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
BYTE_LEVEL = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}
BERT = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}


def byte_level(count: int) -> dict[str, Any]:
    """So many byte level steps."""
    return in_turn("pretokenizers", *[{"type": "ByteLevel", **BYTE_LEVEL}] * count)


def in_turn(key: str, *steps: object) -> dict[str, Any]:
    """Steps one after the other."""
    return {"type": "Sequence", key: list(steps)}


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    """A step that exchanges text."""
    return {"type": "Replace", "pattern": pattern, "content": content}


def charsmap(*texts: str) -> dict[str, Any]:
    """A character map of these replacements, and a tree of four empty bytes."""
    contents = b"".join(text.encode() + b"\0" for text in texts)
    tree = (4).to_bytes(4, "little") + bytes(4)
    encoded = base64.b64encode(tree + contents).decode()
    return {"type": "Precompiled", "precompiled_charsmap": encoded}


def written(path: Path, **members: object) -> Path:
    """A tokenizer of a few dozen tokens with these members."""
    made = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=SPECIAL, show_progress=False)
    made.train_from_iterator([TEXT] * 3, trainer)
    values = {**json.loads(made.to_str()), **members}
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


WIDE = replace({"String": "a"}, "aa")
HOSTILE: dict[str, dict[str, Any]] = {
    "byte level, again and again": {"pre_tokenizer": byte_level(101)},
    "nested": {"pre_tokenizer": in_turn("pretokenizers", *[byte_level(3)] * 4)},
    "without a type": {
        "normalizer": {"normalizers": [{"pattern": {"String": "a"}, "content": "aa"}] * 9}
    },
    "as normalizers": {"normalizer": in_turn("normalizers", *[{"type": "ByteLevel"}] * 9)},
    "a letter as two": {"normalizer": in_turn("normalizers", *[WIDE] * 9)},
    "one long text": {"normalizer": replace({"String": "a"}, "x" * 300)},
    "an expression that finds nothing": {"normalizer": replace({"Regex": "x*"}, "x" * 300)},
    "an empty string": {"normalizer": replace({"String": ""}, "x" * 300)},
    "before each piece": {"normalizer": {"type": "Prepend", "prepend": "x" * 300}},
    "a character map": {"normalizer": charsmap("a", "x" * 300)},
    "two of them": {"normalizer": in_turn("normalizers", *[charsmap("x" * 30)] * 2)},
    "both together": {
        "normalizer": in_turn("normalizers", *[WIDE] * 5),
        "pre_tokenizer": byte_level(3),
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_steps_that_multiply_a_text_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "tokenizer.json", **HOSTILE[name])
    with pytest.raises(DataError) as caught:
        tokenizer_file.load(path)
    message = str(caught.value)
    assert message.isprintable()
    assert f"{path}: normalizer and pre_tokenizer" in message
    assert "longer" in message


IN_USE: dict[str, dict[str, Any]] = {
    "as GPT-2's": {"pre_tokenizer": {"type": "ByteLevel", **BYTE_LEVEL}},
    "as Llama's of 2023": {
        "normalizer": in_turn(
            "normalizers",
            {"type": "Prepend", "prepend": "\u2581"},
            replace({"String": " "}, "\u2581"),
        )
    },
    "as ALBERT's": {
        "normalizer": in_turn(
            "normalizers",
            replace({"String": "``"}, '"'),
            replace({"String": "''"}, '"'),
            {"type": "NFKD"},
            {"type": "StripAccents"},
            {"type": "Lowercase"},
            replace({"Regex": " {2,}"}, " "),
        ),
        "pre_tokenizer": in_turn("pretokenizers", {"type": "WhitespaceSplit"}, METASPACE),
    },
    "as BERT's": {
        "normalizer": {"type": "BertNormalizer", **BERT},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
    },
    "many splits": {
        "pre_tokenizer": in_turn(
            "pretokenizers",
            *[{"type": "Digits", "individual_digits": True}] * 20,
            {"type": "ByteLevel", **BYTE_LEVEL},
        )
    },
}


@pytest.mark.parametrize("name", IN_USE)
def test_steps_of_tokenizers_in_use_are_accepted(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "tokenizer.json", **IN_USE[name])
    theirs = Tokenizer.from_file(str(path)).encode(TEXT, add_special_tokens=False).ids
    (ids,) = tokenizer_file.load(path).encode_lines([TEXT])
    assert ids.tolist() == theirs


def test_a_template_that_repeats_the_text_does_not_count(tmp_path: Path) -> None:
    text, other = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    template = {"single": [text] * 50, "pair": [text, other], "special_tokens": {}}
    plain = tokenizer_file.load(written(tmp_path / "plain.json")).encode_lines([TEXT])[0]
    members = {"post_processor": {"type": "TemplateProcessing", **template}}
    path = written(tmp_path / "tokenizer.json", **members)
    assert tokenizer_file.load(path).encode_lines([TEXT])[0].tolist() == plain.tolist()
