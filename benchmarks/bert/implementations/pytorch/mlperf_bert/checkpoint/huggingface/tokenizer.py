"""The tokenizer files that `transformers` reads, made of our vocabulary; names and keys as data.

`tokenizer.json` is the format of the `tokenizers` library: cleaning, splitting and word pieces as
`vocabulary/wordpiece.py` does them, which differs from the library on some characters only (there).
"""

import json
from collections.abc import Mapping
from typing import Any

from mlperf_bert.checkpoint.huggingface.vocabulary_files import (
    TOKENIZER,
    TOKENIZER_CONFIG,
    WORD_PIECES,
)
from mlperf_bert.common.untrusted import parse_json_object
from mlperf_bert.vocabulary.any_vocabulary import MASK, AnyVocabulary, tokens_of
from mlperf_bert.vocabulary.tokenizer_file import ROLES, TokenizerFile
from mlperf_bert.vocabulary.word_pieces import SPECIAL_TOKENS, Vocabulary
from mlperf_bert.vocabulary.wordpiece import MAX_WORD_CHARS

_PROBE = f"a {MASK} a"
_COMPLETED = (
    "tokenizer.json puts special tokens around a text now, as training had them: "
    "to convert this directory again, give the tokenizer that was trained with by --vocab"
)


def tokenizer_files(vocabulary: AnyVocabulary, max_length: int) -> dict[str, bytes]:
    """File name -> contents; `max_length` in tokens is what the model can read."""
    # The class that takes tokenizer.json as it is: to BertTokenizer words end at 100 letters.
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings["model_max_length"] = max_length
    if isinstance(vocabulary, TokenizerFile):
        tokens = vocabulary.tokenizer.get_vocab(with_added_tokens=True)
        files: dict[str, bytes] = {TOKENIZER: _as_trained(vocabulary)}
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


def remarks_on(vocabulary: AnyVocabulary, files: Mapping[str, bytes]) -> tuple[str, ...]:
    """What a user should know of the files, in lines."""
    is_as_given = not isinstance(vocabulary, TokenizerFile) or (
        files[TOKENIZER] == vocabulary.contents
    )
    return () if is_as_given else (_COMPLETED,)


def _as_trained(file: TokenizerFile) -> bytes:
    """The tokenizer's bytes; where it leaves out what every sequence of training has, with that.

    That is a special token at either end, and no space before a mask, which stands for the word
    and its space in vocabularies that keep it.
    """
    cls, sep, mask = (
        str(file.tokenizer.id_to_token(token)) for token in (file.cls_id, file.sep_id, file.mask_id)
    )
    # As the library reads it: `file.tokenizer` takes special tokens in a text for text.
    theirs = type(file.tokenizer).from_str(file.contents.decode("utf-8"))
    wanted = tokens_of(_PROBE, file, len(_PROBE) + 2)
    if theirs.encode(_PROBE.replace(MASK, mask)).ids == wanted:
        return file.contents
    values = parse_json_object(file.contents)
    added = [each for each in values.get("added_tokens") or [] if each["content"] != mask]
    added.append({**_added(mask, file.mask_id), "lstrip": True})
    values |= {
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added, key=lambda each: int(each["id"])),
        "post_processor": _template({cls: file.cls_id}, {sep: file.sep_id}),
    }
    return _json(values)


def _template(cls: Mapping[str, int], sep: Mapping[str, int]) -> dict[str, Any]:
    """[CLS] A [SEP], and [CLS] A [SEP] B [SEP]."""
    (first,), (last,) = cls, sep
    single = (_special(first, 0), _sequence("A", 0), _special(last, 0))
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": (*single, _sequence("B", 1), _special(last, 1)),
        "special_tokens": {
            token: {"id": token, "ids": [number], "tokens": [token]}
            for token, number in {**cls, **sep}.items()
        },
    }


def word_piece_tokenizer(words: Vocabulary) -> dict[str, Any]:
    """`tokenizer.json` of a list of word pieces."""
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
        "post_processor": _template({"[CLS]": words.cls_id}, {"[SEP]": words.sep_id}),
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
