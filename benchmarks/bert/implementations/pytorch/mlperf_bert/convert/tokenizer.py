"""The tokenizer files that `transformers` reads, made of our vocabulary; names and keys as data.

`tokenizer.json` is the format of the `tokenizers` library: cleaning, splitting and word pieces as
`prepare/wordpiece.py` does them, which differs from the library on some characters only (there).
"""

import json
from collections.abc import Mapping
from typing import Any

from mlperf_bert.convert.vocabulary_files import TOKENIZER, WORD_PIECES
from mlperf_bert.prepare.any_vocabulary import AnyVocabulary
from mlperf_bert.prepare.tokenizer_file import ROLES, TokenizerFile
from mlperf_bert.prepare.vocabulary import SPECIAL_TOKENS, Vocabulary
from mlperf_bert.prepare.wordpiece import MAX_WORD_CHARS

TOKENIZER_CONFIG = "tokenizer_config.json"


def tokenizer_files(vocabulary: AnyVocabulary, max_length: int) -> dict[str, bytes]:
    """File name -> contents; `max_length` in tokens is what the model can read."""
    # The class that takes tokenizer.json as it is: to BertTokenizer words end at 100 letters.
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings["model_max_length"] = max_length
    if isinstance(vocabulary, TokenizerFile):
        tokens = vocabulary.tokenizer.get_vocab(with_added_tokens=True)
        files = {TOKENIZER: vocabulary.contents}
    else:
        settings["do_lower_case"] = True  # for who reads vocab.txt alone
        settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
        tokens = vocabulary.ids
        files = {
            WORD_PIECES: vocabulary.contents,
            TOKENIZER: _json(word_piece_tokenizer(vocabulary)),
        }
    for role, names in ROLES.items():
        settings |= {f"{role}_token": name for name in names[::-1] if name in tokens}
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


def _added(token: str, number: int) -> dict[str, object]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": token, **plain, "special": True}


def _special(token: str, segment: int) -> dict[str, Any]:
    return {"SpecialToken": {"id": token, "type_id": segment}}


def _sequence(name: str, segment: int) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": segment}}


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode("utf-8")
