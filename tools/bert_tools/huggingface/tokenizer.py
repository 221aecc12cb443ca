"""The vocabulary of weights, and our own as the tokenizer files that `transformers` reads.

`tokenizer.json` is the format of the `tokenizers` library, for cleaning, splitting and word pieces.
`vocabulary/word_pieces.py` differs from the library on some characters, named there.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mlperf_bert.config.sections import ModelSection
from mlperf_bert.errors import CheckpointError, ConfigError
from mlperf_bert.files import is_there, parse_json_object, read_json, reading
from mlperf_bert.vocabulary.any_vocabulary import (
    ROLES,
    AnyVocabulary,
    TokenizerFile,
    load_any_vocabulary,
    make_encoder,
)
from mlperf_bert.vocabulary.word_pieces import (
    MAX_WORD_CHARS,
    SPECIAL_TOKENS,
    VOCABULARY_FILES,
    Vocabulary,
    load_vocabulary,
)

MASK = "[MASK]"
_PROBE = f"a {MASK} a"

WORD_PIECES, TOKENIZER = VOCABULARY_FILES
TOKENIZER_CONFIG = "tokenizer_config.json"
LEVELS_ABOVE = 3  # folders above a checkpoint: its run's checkpoints, the run, its directory
_OF_ITS_DATA = "give the vocabulary of its data with --vocab"
_REMEDY = "give the vocabulary of these weights with --vocab"
# Settings of tokenizer.json equal to vocabulary/word_pieces.py; we write the first of each. Words
# end at 200 letters there, at 100 by the library's default; that difference is accepted.
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
            "type": ("WordPiece", None),  # missing in the first files
            "unk_token": ("[UNK]",),
            "continuing_subword_prefix": ("##",),
            "max_input_chars_per_word": (100, 200),
        },
    }
)
# Settings of tokenizer_config.json without which it keeps characters that our word pieces drop.
_DROPS = ("do_lower_case", "strip_accents", "tokenize_chinese_chars")


def tokens_of(text: str, vocabulary: AnyVocabulary, most: int) -> list[int]:
    """[CLS], the text's word pieces as `prepare` makes them, [SEP]; at most `most`.

    A mask is [MASK], or the vocabulary's own name for it. Raises ConfigError if the text has none,
    or is too long.
    """
    encoder = make_encoder(vocabulary)

    def encode(part: str) -> list[int]:
        ids: list[int] = np.frombuffer(encoder.encode(part), dtype=encoder.dtype).tolist()
        return ids

    # If white space belongs to the word after it, the space before a mask belongs to the mask.
    *before, last = text.replace(_own_mask(vocabulary), MASK).split(MASK)
    first, *others = [*(part.rstrip() for part in before), last]
    if not others:
        raise ConfigError("text", f"has no {MASK}", f"write {MASK} where a word is to be filled in")
    tokens = [vocabulary.cls_id, *encode(first)]
    for part in others:
        tokens += [vocabulary.mask_id, *encode(part)]
    tokens.append(vocabulary.sep_id)
    if len(tokens) > most:
        problem = f"has {len(tokens)} tokens, the model takes {most}"
        raise ConfigError("text", problem, "shorten it")
    return tokens


def _own_mask(vocabulary: AnyVocabulary) -> str:
    """The vocabulary's own name for [MASK]."""
    if isinstance(vocabulary, TokenizerFile):
        return str(vocabulary.tokenizer.id_to_token(vocabulary.mask_id))
    return MASK


def tokenizer_files(vocabulary: AnyVocabulary, model: ModelSection) -> dict[str, bytes]:
    """File name -> contents, for a model's limit in tokens and its inputs."""
    # This class uses tokenizer.json unchanged; BertTokenizer would end words at 100 letters.
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings["model_max_length"] = model.max_position_embeddings
    if isinstance(vocabulary, TokenizerFile):
        tokens = vocabulary.tokenizer.get_vocab(with_added_tokens=True)
        files: dict[str, bytes] = {TOKENIZER: _as_trained(vocabulary)}
    else:
        settings["do_lower_case"] = True  # for programs that read only vocab.txt
        settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
        tokens = vocabulary.ids
        files = {
            WORD_PIECES: vocabulary.contents,
            TOKENIZER: _json(word_piece_tokenizer(vocabulary)),
        }
    if model.architecture == "modern":  # its forward refuses token types
        settings["model_input_names"] = ["input_ids", "attention_mask"]
    for role, names in ROLES.items():
        settings |= {f"{role}_token": name for name in names[::-1] if name in tokens}
    return {**files, TOKENIZER_CONFIG: _json(settings)}


def _as_trained(file: TokenizerFile) -> bytes:
    """The tokenizer's bytes, completed with the special tokens of training sequences.

    Those are a special token at either end. In vocabularies that keep spaces no space stands before
    a mask, which replaces the word and its space.
    """
    cls, sep, mask = (
        str(file.tokenizer.id_to_token(token)) for token in (file.cls_id, file.sep_id, file.mask_id)
    )
    # As the library reads it: `file.tokenizer` treats special tokens in a text as text.
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
    """The template for [CLS] A [SEP], and [CLS] A [SEP] B [SEP]."""
    (first,), (last,) = cls, sep
    ends = (_piece("SpecialToken", first, 0), _piece("SpecialToken", last, 0))
    single = (ends[0], _piece("Sequence", "A", 0), ends[1])
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": (*single, _piece("Sequence", "B", 1), _piece("SpecialToken", last, 1)),
        "special_tokens": {
            token: {"id": token, "ids": [number], "tokens": [token]}
            for token, number in {**cls, **sep}.items()
        },
    }


def word_piece_tokenizer(words: Vocabulary) -> dict[str, Any]:
    """The `tokenizer.json` of a list of word pieces."""
    as_ours = {
        section: {name: allowed[0] for name, allowed in settings.items()}
        for section, settings in _AS_OURS.items()
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(
            (_added(token, words.ids[token]) for token in SPECIAL_TOKENS),
            key=lambda added: int(added["id"]),
        ),
        "normalizer": as_ours["normalizer"],
        "pre_tokenizer": as_ours["pre_tokenizer"],
        "post_processor": _template({"[CLS]": words.cls_id}, {"[SEP]": words.sep_id}),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            **as_ours["model"],
            "max_input_chars_per_word": MAX_WORD_CHARS,
            "vocab": words.ids,
        },
    }


def _added(token: str, number: int) -> dict[str, object]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": token, **plain, "special": True}


def _piece(kind: str, name: str, segment: int) -> dict[str, Any]:
    return {kind: {"id": name, "type_id": segment}}


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode("utf-8")


def find_vocabulary(folder: Path, given: Path | None) -> AnyVocabulary:
    """The given vocabulary, or the one that splits text like the tokenizer beside the weights.

    That is tokenizer.json if it is alone or splits text differently from our word pieces, else
    vocab.txt. Raises DataError and ConfigError like `load_any_vocabulary`, and CheckpointError if
    no vocabulary is found or none splits like theirs.
    """
    if given is not None:
        return load_any_vocabulary(given)
    has_words, has_tokenizer = (is_there(folder / name) for name in VOCABULARY_FILES)
    if not has_words and not has_tokenizer:
        problem = f"has no {' and no '.join(VOCABULARY_FILES)}"
        raise CheckpointError(str(folder), problem, _REMEDY)
    if not has_words:
        return load_any_vocabulary(folder / TOKENIZER)
    words = load_vocabulary(folder / WORD_PIECES)
    if has_tokenizer and not _splits_alike(folder / TOKENIZER, words):
        return load_any_vocabulary(folder / TOKENIZER)
    if not is_there(folder / TOKENIZER_CONFIG):
        return words
    values = read_json(folder / TOKENIZER_CONFIG, missing="is missing", remedy=_REMEDY)
    for setting in _DROPS:
        if values.get(setting) is False:
            remedy = (
                "give its tokenizer.json with --vocab; where there is none, "
                "AutoTokenizer.from_pretrained(DIR).save_pretrained(OTHER) makes one"
            )
            problem = "is false, word pieces are split here as if it were true"
            raise CheckpointError(f"{folder / TOKENIZER_CONFIG}: {setting}", problem, remedy)
    return words


def _splits_alike(path: Path, words: Vocabulary) -> bool:
    """True if a tokenizer.json has these words and splits like ours. Raises DataError."""
    found = read_json(path, missing="is missing", remedy=_REMEDY)
    for section, settings in _AS_OURS.items():
        values = found.get(section)
        if not isinstance(values, dict):
            return False
        if any(values.get(name) not in allowed for name, allowed in settings.items()):
            return False
    with reading(path, _REMEDY):
        ids = dict(found["model"]["vocab"])
        ids |= {added["content"]: added["id"] for added in found.get("added_tokens") or ()}
    return ids == dict(words.ids)


def vocabulary_of(checkpoint: Path, sha256: str, given: Path | None) -> AnyVocabulary:
    """The vocabulary in `given`, or else in the checkpoint or above it.

    Raises CheckpointError if there is none or its digest differs; DataError and ConfigError like
    `load_any_vocabulary`.
    """
    path = given or vocabulary_file(checkpoint)
    vocabulary = load_any_vocabulary(path)
    if vocabulary.sha256 != sha256:
        problem = "is not the vocabulary that the checkpoint was trained with"
        raise CheckpointError(str(path), problem, _OF_ITS_DATA)
    return vocabulary


def vocabulary_file(checkpoint: Path) -> Path:
    """The first vocabulary in the checkpoint or above it. Raises CheckpointError if none is."""
    directories = [checkpoint, *checkpoint.absolute().parents[:LEVELS_ABOVE]]
    places = (directory / name for directory in directories for name in VOCABULARY_FILES)
    path = next((place for place in places if place.exists()), None)
    if path is None:
        problem = f"no {' and no '.join(VOCABULARY_FILES)} in it nor above it"
        raise CheckpointError(str(checkpoint), problem, _OF_ITS_DATA)
    return path
