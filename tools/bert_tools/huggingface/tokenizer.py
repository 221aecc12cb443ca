"""Vocabularies in the format of Hugging Face, which this module finds, loads and exports.

`tokenizer.json` is the format of the `tokenizers` library. It describes how to clean text and split
it into words and word pieces. Our own word pieces differ from the library's for some characters,
which `vocabulary/word_pieces.py` lists.
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
    load_new_vocabulary,
    make_encoder,
)
from mlperf_bert.vocabulary.word_pieces import (
    MAX_WORD_CHARS,
    SPECIAL_TOKENS,
    VOCABULARY_FILES,
    Vocabulary,
    check_uncased,
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
LEVELS_ABOVE = 3  # directories above a checkpoint: checkpoints, run_0, and the --run-dir
_OF_ITS_DATA = "pass the vocabulary of its training data with --vocab"
_REMEDY = "pass the vocabulary of these weights with --vocab"
_TOKENIZER_FILE = (
    "pass its tokenizer.json with --vocab (if there is none, "
    "AutoTokenizer.from_pretrained(DIR).save_pretrained(OTHER) writes one)"
)
# Classes of transformers that split like BertTokenizer, or as the files say.
_OURS = re.compile(
    "(?:Bert|DistilBert|Electra|MobileBert|ConvBert|SqueezeBert|LayoutLM|Funnel|Lxmert|RetriBert)"
    "Tokenizer(?:Fast)?|PreTrainedTokenizer(?:Fast)?|TokenizersBackend"
)
# Settings of tokenizer.json that split like vocabulary/word_pieces.py, except for rare characters.
# (`_splitting`, which our exports use, splits these correctly.) There, words of more than 200
# letters are unknown. In the library, the default limit is 100. That difference is accepted.
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
            "type": ("WordPiece", None),  # the oldest files do not have this key
            "unk_token": ("[UNK]",),
            "continuing_subword_prefix": ("##",),
            "max_input_chars_per_word": (100, 200),
        },
    }
)
# Settings of tokenizer_config.json that must not be false, because our word pieces always do this.
_MUST_NOT_BE_FALSE = ("do_lower_case", "strip_accents", "tokenize_chinese_chars")


def tokens_of(text: str, vocabulary: AnyVocabulary, most: int) -> list[int]:
    """Return the token ids of a text with masked words, between those of [CLS] and [SEP].

    The text is encoded as `prepare` does. A masked word is written as [MASK] or as the vocabulary's
    own mask token. Raises ConfigError if the text has no masked word, or if there are more than
    `most` tokens.
    """
    encoder = make_encoder(vocabulary)

    def encode(part: str) -> list[int]:
        ids: list[int] = np.frombuffer(encoder.encode([part])[0], dtype=encoder.dtype).tolist()
        return ids

    # In vocabularies where a space belongs to the next word, the space before a mask belongs to
    # the masked word.
    *before, last = text.replace(_own_mask(vocabulary), MASK).split(MASK)
    first, *others = [*(part.rstrip() for part in before), last]
    if not others:
        raise ConfigError("text", f"has no {MASK}", f"write {MASK} for each word to predict")
    tokens = [vocabulary.cls_id, *encode(first)]
    for part in others:
        tokens += [vocabulary.mask_id, *encode(part)]
    tokens.append(vocabulary.sep_id)
    if len(tokens) > most:
        problem = f"has {len(tokens)} tokens, but the model reads at most {most}"
        raise ConfigError("text", problem, "shorten it")
    return tokens


def _own_mask(vocabulary: AnyVocabulary) -> str:
    """Return the text of the vocabulary's mask token, such as [MASK] or <mask>."""
    if isinstance(vocabulary, TokenizerFile):
        return str(vocabulary.tokenizer.id_to_token(vocabulary.mask_id))
    return MASK


def tokenizer_files(vocabulary: AnyVocabulary, model: ModelSection) -> dict[str, bytes]:
    """Return the contents of a model's tokenizer files, by file name."""
    # This class uses tokenizer.json unchanged. BertTokenizer would limit words to 100 letters.
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings["model_max_length"] = model.max_position_embeddings
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    if model.architecture == "modern":  # ModernBERT has no token types
        inputs.remove("token_type_ids")
    settings["model_input_names"] = inputs
    if isinstance(vocabulary, TokenizerFile):
        tokens = vocabulary.tokenizer.get_vocab(with_added_tokens=True)
        files: dict[str, bytes] = {TOKENIZER: _as_trained(vocabulary)}
    else:
        settings["do_lower_case"] = True  # for programs that do not read tokenizer.json
        tokens = vocabulary.ids
        files = {
            WORD_PIECES: vocabulary.contents,
            TOKENIZER: _json(word_piece_tokenizer(vocabulary)),
        }
    for role, names in ROLES.items():
        settings |= {f"{role}_token": name for name in names[::-1] if name in tokens}
    return {**files, TOKENIZER_CONFIG: _json(settings)}


def _as_trained(file: TokenizerFile) -> bytes:
    """Return the contents of a tokenizer.json that adds special tokens in the same way as training.

    Training sequences have a special token at both ends, and one between the segments of a pair,
    whose tokens have the types 0 and 1. In vocabularies that keep spaces, a mask replaces a word
    together with the space before it. The file is returned unchanged if it already encodes text
    this way.
    """
    cls, sep, mask = (
        str(file.tokenizer.id_to_token(token)) for token in (file.cls_id, file.sep_id, file.mask_id)
    )
    # Loaded again because `file.tokenizer` does not recognize special tokens in a text.
    theirs = type(file.tokenizer).from_str(file.contents.decode("utf-8"))
    wanted = tokens_of(_PROBE, file, len(_PROBE) + 2)
    segment = theirs.encode("a", add_special_tokens=False).ids
    pair = theirs.encode("a", "a")
    ids = [file.cls_id, *segment, file.sep_id, *segment, file.sep_id]
    types = [*([0] * (len(segment) + 2)), *([1] * (len(segment) + 1))]
    is_same_pair = (pair.ids, pair.type_ids) == (ids, types)
    if is_same_pair and theirs.encode(_PROBE.replace(MASK, mask)).ids == wanted:
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
    """Return the post-processor that adds special tokens to one or two texts.

    A text A becomes [CLS] A [SEP], and two texts A and B become [CLS] A [SEP] B [SEP].
    """
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
    """Return the contents of a tokenizer.json for a list of word pieces, as a JSON object."""
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
    """Return the sections of tokenizer.json that clean text and split it into words.

    The sections produce the same words as in training. The library's own rules (`_AS_OURS`) differ
    for 7,000 characters, for example for private-use characters, some ideographs, and recent marks
    and punctuation that its tables lack. Therefore the sections list every set of characters
    explicitly, according to the Unicode version of this Python.
    """
    spaces, dropped, marks, alone = _character_sets()
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                _replace(spaces, " "),
                _replace(dropped, ""),
                # Python's lower case of a sigma at the end of a word.
                _replace("(?<=\\p{L}\\p{M}{0,9})\u03a3(?!\\p{M}*\\p{L})", "\u03c2"),
                {"type": "Lowercase"},
                {"type": "NFD"},
                # The library's NFD does not decompose this character.
                _replace("\U00011938", "\U00011935\U00011930"),
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
    """Return regular expressions for four sets of characters.

    The sets are spaces, characters to drop, accents, and characters that are words of their own.
    """
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
    """Return a regular expression that matches any one of `chars`.

    The characters must be in ascending order.
    """
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
    """Load the given vocabulary, or the one next to the weights.

    The vocabulary next to the weights is vocab.txt if the model's tokenizer splits text like our
    word pieces, and otherwise tokenizer.json. Raises DataError or ConfigError as
    `load_any_vocabulary` does. Raises CheckpointError if there is no vocabulary, or if none splits
    text like the model's tokenizer.
    """
    if given is not None:
        return load_new_vocabulary(given)
    has_words, has_tokenizer = (is_there(folder / name) for name in VOCABULARY_FILES)
    if not has_words and not has_tokenizer:
        problem = f"has neither {' nor '.join(VOCABULARY_FILES)}"
        raise CheckpointError(str(folder), problem, _REMEDY)
    if not has_words:
        return load_any_vocabulary(folder / TOKENIZER)
    words = load_vocabulary(folder / WORD_PIECES)
    if has_tokenizer and not _splits_alike(folder / TOKENIZER, words):
        return load_any_vocabulary(folder / TOKENIZER)
    if not has_tokenizer:
        check_uncased(words, str(folder / WORD_PIECES))
    added = added_tokens(folder, words)
    if added:
        lines = "".join(f"{token}\n" for token in added)
        contents = words.contents.removesuffix(b"\n") + b"\n" + lines.encode()
        words = parse_vocabulary(contents, f"{folder / WORD_PIECES} with added tokens")
    if is_there(folder / TOKENIZER_CONFIG):
        _check_settings(folder / TOKENIZER_CONFIG)
    return words


def _check_settings(path: Path) -> None:
    """Raise CheckpointError if a tokenizer_config.json is not for word pieces like ours."""
    values = read_json(path, missing="no such file", remedy=_REMEDY)
    kind = values.get("tokenizer_class")
    if kind is not None and not _OURS.fullmatch(str(kind)):
        problem = f"{in_brief(kind)} does not split text as BERT's tokenizer does"
        where = f"{path}: tokenizer_class"
        raise CheckpointError(where, problem, _TOKENIZER_FILE)
    for setting in _MUST_NOT_BE_FALSE:
        if values.get(setting) is False:
            problem = "must not be false, because this program uses vocab.txt as if it were true"
            where = f"{path}: {setting}"
            raise CheckpointError(where, problem, _TOKENIZER_FILE)


def added_tokens(folder: Path, words: Vocabulary) -> list[str]:
    """Return the tokens that other files add to vocab.txt, in the order of their ids.

    The vocabulary keeps these as ordinary words. A word with capital letters or punctuation never
    matches, because text is first converted to lower case and split at punctuation. Raises
    CheckpointError if the ids do not directly follow those of vocab.txt, or if a token has two ids.
    """
    found: dict[str, int] = {}
    path = folder / ADDED_TOKENS
    if is_there(path):
        values = read_json(path, missing="no such file", remedy=_REMEDY)
        with reading(path, _REMEDY):
            found |= {token: int(number) for token, number in values.items()}
    if is_there(folder / TOKENIZER_CONFIG):
        path = folder / TOKENIZER_CONFIG
        values = read_json(path, missing="no such file", remedy=_REMEDY)
        with reading(path, _REMEDY):
            added = values.get("added_tokens_decoder") or {}
            found |= {each["content"]: int(number) for number, each in added.items()}
    new = {token: number for token, number in found.items() if words.ids.get(token) != number}
    ordered = sorted(new, key=new.__getitem__)
    wanted = list(range(len(words), len(words) + len(new)))
    if [new[token] for token in ordered] != wanted or any(token in words.ids for token in new):
        problem = f"adds tokens whose ids do not follow the {len(words):,} ids of {WORD_PIECES}"
        raise CheckpointError(str(path), problem, _TOKENIZER_FILE)
    return ordered


def _splits_alike(path: Path, words: Vocabulary) -> bool:
    """Return whether a tokenizer.json has these words and splits text as our word pieces do.

    Raises DataError if the file is damaged.
    """
    found = read_json(path, missing="no such file", remedy=_REMEDY)
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
    """Load the vocabulary that a checkpoint was trained with.

    The file is `given` or, if that is None, in the checkpoint or in a directory above the
    checkpoint. Raises CheckpointError if there is no file, or if its digest is not `sha256`. Raises
    DataError or ConfigError as `load_any_vocabulary` does.
    """
    path = given or vocabulary_file(checkpoint)
    vocabulary = load_any_vocabulary(path)
    if vocabulary.sha256 != sha256:
        problem = "this is not the vocabulary that the checkpoint was trained with"
        raise CheckpointError(str(path), problem, _OF_ITS_DATA)
    return vocabulary


def vocabulary_file(checkpoint: Path) -> Path:
    """Return the path of a checkpoint's vocabulary file.

    If the checkpoint itself contains none, the closest directory above it with a vocabulary file
    counts. Raises CheckpointError if there is none.
    """
    directories = [checkpoint, *checkpoint.absolute().parents[:LEVELS_ABOVE]]
    paths = (directory / name for directory in directories for name in VOCABULARY_FILES)
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        problem = f"neither this directory nor any above it has {' or '.join(VOCABULARY_FILES)}"
        raise CheckpointError(str(checkpoint), problem, _OF_ITS_DATA)
    return path
