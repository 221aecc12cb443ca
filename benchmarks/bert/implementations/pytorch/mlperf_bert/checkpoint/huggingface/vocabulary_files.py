"""The vocabulary of foreign weights: the one that is given, or what splits text beside them."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlperf_bert.common.errors import CheckpointError
from mlperf_bert.common.records import Record, read_record
from mlperf_bert.vocabulary.any_vocabulary import AnyVocabulary, load_any_vocabulary
from mlperf_bert.vocabulary.word_pieces import VOCABULARY_FILES, Vocabulary, load_vocabulary

WORD_PIECES, TOKENIZER = VOCABULARY_FILES
TOKENIZER_CONFIG = "tokenizer_config.json"
_REMEDY = "give the vocabulary of these weights with --vocab"
_MOST_TOKENS = 2**24
# How a tokenizer.json says what vocabulary/wordpiece.py does. Its words end at 200 letters, the
# library's at 100 where nobody asked for more: that is no other vocabulary.
_AS_OURS: Mapping[str, Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "normalizer": {
            "type": ("BertNormalizer",),
            "clean_text": (True,),
            "handle_chinese_chars": (True,),
            "strip_accents": (None, True),
            "lowercase": (True,),
        },
        "pre_tokenizer": {"type": ("BertPreTokenizer",)},
        "model": {
            "type": ("WordPiece", None),  # the first files did not say it
            "unk_token": ("[UNK]",),
            "continuing_subword_prefix": ("##",),
            "max_input_chars_per_word": (100, 200),
        },
    }
)
_DROPS = ("do_lower_case", "strip_accents", "tokenize_chinese_chars")


def find_vocabulary(folder: Path, given: Path | None) -> AnyVocabulary:
    """The one that was given, or that splits text as the tokenizer beside the weights does.

    That is vocab.txt, unless a tokenizer.json beside it splits text otherwise than word pieces do
    here, or is alone; then it is tokenizer.json. Raises DataError, ConfigError as
    `load_any_vocabulary`, or CheckpointError where there is none, or none that splits as theirs.
    """
    if given is not None:
        return load_any_vocabulary(given)
    has_words, has_tokenizer = (os.path.lexists(folder / name) for name in VOCABULARY_FILES)
    if not has_words and not has_tokenizer:
        problem = f"has no {' and no '.join(VOCABULARY_FILES)}"
        raise CheckpointError(str(folder), problem, _REMEDY)
    if not has_words:
        return load_any_vocabulary(folder / TOKENIZER)
    words = load_vocabulary(folder / WORD_PIECES)
    if has_tokenizer and not _splits_alike(folder / TOKENIZER, words):
        return load_any_vocabulary(folder / TOKENIZER)
    setting = setting_against_ours(folder)
    if setting:
        remedy = (
            "give its tokenizer.json with --vocab; where there is none, "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(OTHER) makes one"
        )
        problem = "is false, word pieces are split here as if it were true"
        raise CheckpointError(f"{folder / TOKENIZER_CONFIG}: {setting}", problem, remedy)
    return words


def setting_against_ours(folder: Path) -> str | None:
    """A setting by which the tokenizer keeps what word pieces drop here. Raises DataError."""
    if not os.path.lexists(folder / TOKENIZER_CONFIG):
        return None
    record = read_record(folder / TOKENIZER_CONFIG, missing="is missing", remedy=_REMEDY)
    return next((name for name in _DROPS if record.values.get(name) is False), None)


def _splits_alike(path: Path, words: Vocabulary) -> bool:
    """Whether a tokenizer.json has these words and splits as ours. Raises DataError."""
    record = read_record(path, missing="is missing", remedy=_REMEDY)
    for section, settings in _AS_OURS.items():
        values = record.values.get(section)
        if not isinstance(values, dict):
            return False
        if any(values.get(name) not in allowed for name, allowed in settings.items()):
            return False
    return _ids(record) == dict(words.ids)


def _ids(record: Record) -> dict[str, int]:
    """Token -> id of a tokenizer file, added ones too."""
    words = record.record("model").record("vocab")
    ids = {token: words.integer(token, high=_MOST_TOKENS) for token in words.values}
    if record.has("added_tokens"):
        for added in record.records("added_tokens"):
            ids[added.text("content")] = added.integer("id", high=_MOST_TOKENS)
    return ids
