"""The tokenizer files that `transformers` reads, made of our vocabulary; names and keys as data.

`tokenizer.json` is the format of the `tokenizers` library: cleaning, splitting and word pieces as
`prepare/wordpiece.py` does them, which differs from the library on some characters only (there).
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mlperf_bert.convert.vocabulary_files import TOKENIZER, WORD_PIECES, VocabularyFile
from mlperf_bert.prepare.vocabulary import SPECIAL_TOKENS, Vocabulary, parse_vocabulary
from mlperf_bert.prepare.wordpiece import MAX_WORD_CHARS
from mlperf_bert.untrusted import parse_json_object

TOKENIZER_CONFIG = "tokenizer_config.json"

_ROLES = MappingProxyType(
    dict(zip(("pad", "unk", "cls", "sep", "mask"), SPECIAL_TOKENS, strict=True))
)
# Names of the same roles in tokenizers of other models.
_OTHER_ROLES = MappingProxyType(
    {
        "pad": ("<pad>",),
        "unk": ("<unk>", "<|unk|>"),
        "cls": ("<s>", "<cls>", "<|cls|>"),
        "sep": ("</s>", "<sep>", "<|sep|>"),
        "mask": ("<mask>", "<|mask|>"),
    }
)


def tokenizer_files(vocabulary: VocabularyFile, max_length: int) -> dict[str, bytes]:
    """File name -> contents; `max_length` in tokens is what the model can read."""
    if vocabulary.name == TOKENIZER:
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        settings |= _special_tokens(vocabulary)
        files = {TOKENIZER: vocabulary.contents}
    else:
        words = parse_vocabulary(vocabulary.contents, WORD_PIECES)
        settings = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": True,
            "strip_accents": None,
            "tokenize_chinese_chars": True,
            **{f"{role}_token": token for role, token in _ROLES.items()},
        }
        files = {
            WORD_PIECES: vocabulary.contents,
            TOKENIZER: _json(word_piece_tokenizer(words)),
        }
    settings["model_max_length"] = max_length
    return {**files, TOKENIZER_CONFIG: _json(settings)}


def word_piece_tokenizer(words: Vocabulary) -> dict[str, Any]:
    """`tokenizer.json` of a list of word pieces."""
    pair = (_special("[CLS]", 0), _sequence("A", 0), _special("[SEP]", 0))
    second = (_sequence("B", 1), _special("[SEP]", 1))
    ends = {
        token: {"id": token, "ids": [words.ids[token]], "tokens": [token]}
        for token in ("[CLS]", "[SEP]")
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(
            (_added(token, words.ids[token]) for token in SPECIAL_TOKENS),
            key=lambda added: int(added["id"]),
        ),
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": pair,
            "pair": (*pair, *second),
            "special_tokens": ends,
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": MAX_WORD_CHARS,
            "vocab": words.ids,
        },
    }


def pad_id(vocabulary: VocabularyFile) -> int:
    """Id of the padding token, 0 where a tokenizer file has none by that name."""
    if vocabulary.name == WORD_PIECES:
        return parse_vocabulary(vocabulary.contents, WORD_PIECES).pad_id
    names = ("[PAD]", *_OTHER_ROLES["pad"])
    return next((number for name, number in _added_ids(vocabulary).items() if name in names), 0)


def _special_tokens(vocabulary: VocabularyFile) -> dict[str, str]:
    """The roles that a tokenizer file's added tokens have by their names."""
    added = _added_ids(vocabulary)
    found = {}
    for role, token in _ROLES.items():
        name = next((name for name in (token, *_OTHER_ROLES[role]) if name in added), None)
        if name is not None:
            found[f"{role}_token"] = name
    return found


def _added_ids(vocabulary: VocabularyFile) -> dict[str, int]:
    values = parse_json_object(vocabulary.contents)
    return {added["content"]: added["id"] for added in values.get("added_tokens") or ()}


def _added(token: str, number: int) -> dict[str, object]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": token, **plain, "special": True}


def _special(token: str, segment: int) -> dict[str, Any]:
    return {"SpecialToken": {"id": token, "type_id": segment}}


def _sequence(name: str, segment: int) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": segment}}


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode("utf-8")
