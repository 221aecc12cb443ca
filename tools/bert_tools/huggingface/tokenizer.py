"""The vocabulary of weights, and our own as the tokenizer files that `transformers` reads.

`tokenizer.json` is the format of the `tokenizers` library, for cleaning, splitting and word pieces.
`vocabulary/word_pieces.py` differs from the library on some characters, named there.
"""

import json
import re
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mlperf_bert.config.sections import ModelSection
from mlperf_bert.errors import CheckpointError, ConfigError
from mlperf_bert.files import in_brief, is_there, parse_json_object, read_json, reading
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
    is_cjk,
    is_dropped,
    is_punctuation,
    is_space,
    load_vocabulary,
    parse_vocabulary,
)

MASK = "[MASK]"
_PROBE = f"a {MASK} a"

WORD_PIECES, TOKENIZER = VOCABULARY_FILES
TOKENIZER_CONFIG = "tokenizer_config.json"
ADDED_TOKENS = "added_tokens.json"
LEVELS_ABOVE = 3  # folders above a checkpoint: its run's checkpoints, the run, its directory
_OF_ITS_DATA = "give the vocabulary of its data with --vocab"
_REMEDY = "give the vocabulary of these weights with --vocab"
_TOKENIZER_FILE = (
    "give its tokenizer.json with --vocab; where there is none, "
    "AutoTokenizer.from_pretrained(DIR).save_pretrained(OTHER) makes one"
)
# Classes of transformers that split as BertTokenizer does, or that leave it to the files.
_OURS = re.compile(
    "(?:Bert|DistilBert|Electra|MobileBert|ConvBert|SqueezeBert|LayoutLM|Funnel|Lxmert|RetriBert)"
    "Tokenizer(?:Fast)?|PreTrainedTokenizer(?:Fast)?|TokenizersBackend"
)
# Settings of tokenizer.json that split as vocabulary/word_pieces.py does but for rare characters,
# which `_splitting`, in our exports, has right. Words end at 200 letters there, at 100 by the
# library's default; that difference is accepted.
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
    as_ours = {name: allowed[0] for name, allowed in _AS_OURS["model"].items()}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(
            (_added(token, words.ids[token]) for token in SPECIAL_TOKENS),
            key=lambda added: int(added["id"]),
        ),
        **_splitting(),
        "post_processor": _template({"[CLS]": words.cls_id}, {"[SEP]": words.sep_id}),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            **as_ours,
            "max_input_chars_per_word": MAX_WORD_CHARS,
            "vocab": words.ids,
        },
    }


def _splitting() -> dict[str, Any]:
    """The sections of tokenizer.json that clean and split text into words as training does.

    The library's own rules for BERT (`_AS_OURS`) differ on 7,000 characters: private use, some
    ideographs, and marks and punctuation that are younger than its tables. So every set of
    characters is written out, as this Python's Unicode has it.
    """
    spaces, dropped, marks, alone = _character_sets()
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                _replace(spaces, " "),
                _replace(dropped, ""),
                # Python's lower case of a sigma that ends its word.
                _replace("(?<=\\p{L}\\p{M}{0,9})\u03a3(?!\\p{M}*\\p{L})", "\u03c2"),
                {"type": "Lowercase"},
                {"type": "NFD"},
                _replace("\U00011938", "\U00011935\U00011930"),  # the library's NFD leaves it whole
                _replace(marks, ""),
            ],
        },
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "WhitespaceSplit"},
                {
                    "type": "Split",
                    "pattern": {"Regex": alone},
                    "behavior": "Isolated",
                    "invert": False,
                },
            ],
        },
    }


@cache
def _character_sets() -> tuple[str, str, str, str]:
    """Patterns for spaces, what is dropped, accents, and characters that are words."""
    chars = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    return (
        _any_of([char for char in chars if is_space(char)]),
        _any_of([char for char in chars if is_dropped(char)]),
        _any_of([char for char in chars if unicodedata.category(char) == "Mn"]),
        _any_of([char for char in chars if is_punctuation(char) or is_cjk(ord(char))]),
    )


def _replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def _any_of(chars: Sequence[str]) -> str:
    """A regular expression for one of these characters, which ascend."""
    codes = [ord(char) for char in chars]
    starts = [code for before, code in pairwise([-2, *codes]) if code != before + 1]
    ends = [code for code, after in pairwise([*codes, sys.maxunicode + 2]) if after != code + 1]
    ranges = (f"\\x{{{a:X}}}-\\x{{{b:X}}}" for a, b in zip(starts, ends, strict=True))
    return f"[{''.join(ranges)}]"


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
    added = added_tokens(folder, words)
    if added:
        lines = "".join(f"{token}\n" for token in added)
        contents = words.contents.removesuffix(b"\n") + b"\n" + lines.encode()
        words = parse_vocabulary(contents, f"{folder / WORD_PIECES} with added tokens")
    if not is_there(folder / TOKENIZER_CONFIG):
        return words
    values = read_json(folder / TOKENIZER_CONFIG, missing="is missing", remedy=_REMEDY)
    kind = values.get("tokenizer_class")
    if kind is not None and not _OURS.fullmatch(str(kind)):
        problem = f"is {in_brief(kind)}, whose words are not those of BERT's word pieces"
        where = f"{folder / TOKENIZER_CONFIG}: tokenizer_class"
        raise CheckpointError(where, problem, _TOKENIZER_FILE)
    for setting in _DROPS:
        if values.get(setting) is False:
            problem = "is false, word pieces are split here as if it were true"
            where = f"{folder / TOKENIZER_CONFIG}: {setting}"
            raise CheckpointError(where, problem, _TOKENIZER_FILE)
    return words


def added_tokens(folder: Path, words: Vocabulary) -> list[str]:
    """Tokens that files beside vocab.txt add after its own, in the order of their ids.

    They are words here, so one with capitals or punctuation is kept but not found in text. Raises
    CheckpointError if their ids do not follow, or a token has two.
    """
    found: dict[str, int] = {}
    path = folder / ADDED_TOKENS
    if is_there(path):
        values = read_json(path, missing="is missing", remedy=_REMEDY)
        with reading(path, _REMEDY):
            found |= {token: int(number) for token, number in values.items()}
    if is_there(folder / TOKENIZER_CONFIG):
        path = folder / TOKENIZER_CONFIG
        values = read_json(path, missing="is missing", remedy=_REMEDY)
        with reading(path, _REMEDY):
            added = values.get("added_tokens_decoder") or {}
            found |= {each["content"]: int(number) for number, each in added.items()}
    new = {token: number for token, number in found.items() if words.ids.get(token) != number}
    ordered = sorted(new, key=new.__getitem__)
    wanted = list(range(len(words), len(words) + len(new)))
    if [new[token] for token in ordered] != wanted or any(token in words.ids for token in new):
        problem = f"has added tokens whose ids do not follow the {len(words):,} of {WORD_PIECES}"
        raise CheckpointError(str(path), problem, _TOKENIZER_FILE)
    return ordered


def _splits_alike(path: Path, words: Vocabulary) -> bool:
    """True if a tokenizer.json has these words and splits like ours. Raises DataError."""
    found = read_json(path, missing="is missing", remedy=_REMEDY)
    for section, settings in _AS_OURS.items():
        values = found.get(section)
        if not isinstance(values, dict):
            return False
        if values == _splitting().get(section):
            continue
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
