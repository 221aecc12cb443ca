"""Read a vocabulary, which is a word-piece list or a tokenizer file, and encode text with it.

A tokenizer file (`tokenizer.json` of Hugging Face's `tokenizers` library) can be used instead of a
word-piece list. Its special tokens are found by their role, such as the mask token. The
`tokenizers` package, an optional dependency, splits the text. Errors of the package are reported in
one line.
"""

import hashlib
import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mlperf_bert.errors import DataError
from mlperf_bert.extras import require_packages
from mlperf_bert.files import in_brief, parse_json_object, read_regular_file
from mlperf_bert.vocabulary.word_pieces import (
    Tokenizer,
    Vocabulary,
    VocabularyFile,
    check_uncased,
    load_vocabulary,
    token_dtype,
)

if TYPE_CHECKING:
    import tokenizers

# Names of each role's token in the BERT and RoBERTa families. The first name present is used.
ROLES: dict[str, tuple[str, ...]] = {
    "pad": ("[PAD]", "<pad>", "<|pad|>", "<|padding|>"),
    "unk": ("[UNK]", "<unk>", "<|unk|>"),
    "cls": ("[CLS]", "<s>", "<cls>", "<bos>", "<|begin_of_text|>"),
    "sep": ("[SEP]", "</s>", "<sep>", "<eos>", "<|end_of_text|>"),
    "mask": ("[MASK]", "<mask>", "<|mask|>"),
}
REMEDY = "pass the tokenizer.json of a masked language model"
# `tokenizers` raises plain Exception, and a panic in its Rust code raises another BaseException.
# All of them are caused by the file, except these.
_NOT_CAUSED_BY_FILE = (KeyboardInterrupt, SystemExit, MemoryError)
_MAX_BYTES = 64 * 2**20  # the largest files in use, with 250,000 words, are 17 MB
_MAX_TOKENS = 2**22


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """A tokenizer from a file, with the properties that determine the examples made with it.

    `sha256` is the digest of the file's bytes. Byte-level vocabularies need no token for unknown
    words. If a vocabulary has no such token, `unk_id` equals `pad_id`, which never occurs in
    encoded text.
    """

    path: Path
    tokenizer: "tokenizers.Tokenizer"
    vocab_size: int
    sha256: str
    contents: bytes
    pad_id: int
    unk_id: int
    cls_id: int
    sep_id: int
    mask_id: int

    def __len__(self) -> int:
        return self.vocab_size


class FileEncoder:
    """An encoder that converts text to token ids with a tokenizer file."""

    def __init__(self, file: TokenizerFile) -> None:
        self.dtype = token_dtype(len(file))
        self._path = file.path
        self._encode = file.tokenizer.encode
        ids = (file.pad_id, file.cls_id, file.sep_id, file.mask_id)
        self._special = sorted(set(ids))

    def encode(self, sentences: Sequence[str]) -> list[bytes]:
        """Encode the sentences of a document, of which there is at least one, to token ids.

        The document is split as a whole, as its text will be when the model is used. Many
        tokenizers put a space before a text, which must not happen before each sentence. A token
        belongs to the sentence in which its text begins. Returns the bytes of one array of `dtype`
        for each sentence.

        Special tokens that are written in the text are encoded as ordinary text. If the result
        still contains a special token, because it is in the vocabulary but not among the added
        tokens, that token is dropped.

        Raises DataError if the tokenizer cannot split the text, which can happen if the tokenizer
        file is inconsistent.
        """
        joints = ["", *map(_joint_after, sentences[:-1])]
        parts = [joint + sentence for joint, sentence in zip(joints, sentences, strict=True)]
        ends = list(accumulate(map(len, parts)))
        found = self._split("".join(parts))
        ids = np.array(found.ids, dtype=self.dtype)
        # Tokens that a normalizer added may have the offset 0.
        starts = np.maximum.accumulate(np.array([start for start, _ in found.offsets], np.int64))
        is_text = ~np.isin(ids, self._special)
        sentence_of = np.searchsorted(ends, starts, side="right")[is_text]
        bounds = np.searchsorted(sentence_of, np.arange(1, len(sentences)))
        return [part.tobytes() for part in np.split(ids[is_text], bounds)]

    def _split(self, line: str) -> "tokenizers.Encoding":
        try:
            return self._encode(line, add_special_tokens=False)
        except _NOT_CAUSED_BY_FILE:
            raise
        except BaseException as error:
            problem = f"the tokenizer cannot split this text ({in_brief(str(error))})"
            raise DataError(str(self._path), problem, REMEDY) from None


def _joint_after(sentence: str) -> str:
    """Return the text to insert between this sentence of a document and the next one.

    It is a space, because a line break counts as white space. Chinese and Japanese text has no
    spaces between sentences. Its last letter is wide, or its last character is a wide full stop.
    """
    end = sentence[-1]
    last = next((each for each in reversed(sentence) if each.isalnum()), end)
    if unicodedata.name(last, "").startswith("HANGUL"):
        return " "
    is_stop = unicodedata.category(end).startswith("P")
    wide = [unicodedata.east_asian_width(each) in ("W", "F", "H") for each in (last, end)]
    return "" if (wide[0] and last.isalnum()) or (wide[1] and is_stop) else " "


def load_tokenizer_file(path: Path) -> TokenizerFile:
    """Read and check a tokenizer.json file.

    Raises ConfigError if the `tokenizers` package is not installed. Raises DataError if the file is
    missing, too large or not a tokenizer, if it splits text randomly, or if it lacks a special
    token for one of the roles.
    """
    try:
        contents = read_regular_file(path, _MAX_BYTES)
        values = parse_json_object(contents)
    except OSError as error:
        raise DataError(str(path), error.strerror or "cannot be read", REMEDY) from None
    except ValueError as error:
        raise DataError(str(path), f"is not valid JSON ({error})", REMEDY) from None
    model = values.get("model")
    if not isinstance(model, dict):
        raise DataError(f"{path}: model", "must be a JSON object", REMEDY)
    if model.get("dropout"):
        problem = (
            f"must be null, not {in_brief(model['dropout'])}, because dropout would split the same "
            "text differently each time"
        )
        raise DataError(f"{path}: model: dropout", problem, "set dropout to null in this file")
    tokenizer = _tokenizer(path, values)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    vocab_size = max(ids.values(), default=-1) + 1
    if not len(ROLES) < vocab_size <= _MAX_TOKENS:
        problem = (
            f"the vocabulary must have {len(ROLES) + 1} to {_MAX_TOKENS:,} tokens, not "
            f"{vocab_size:,}"
        )
        raise DataError(str(path), problem, REMEDY)
    return TokenizerFile(
        path=path,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        sha256=hashlib.sha256(contents).hexdigest(),
        contents=contents,
        **_ids_by_role(path, ids),
    )


def _tokenizer(path: Path, values: dict[str, Any]) -> "tokenizers.Tokenizer":
    """Build the tokenizer of a file, of which only the tokens with a role are special."""
    require_packages(str(path), "tokenizers", "tokenizers", otherwise="pass a vocab.txt")
    import tokenizers

    roles = {name for names in ROLES.values() for name in names}
    for token in values.get("added_tokens") or ():
        if isinstance(token, dict) and token.get("content") not in roles:
            token["special"] = False  # It is a word of the text, such as <url>.
    try:
        found = tokenizers.Tokenizer.from_str(json.dumps(values))
    except _NOT_CAUSED_BY_FILE:
        raise
    except BaseException as error:
        problem = f"not a tokenizer ({in_brief(str(error))})"
        raise DataError(str(path), problem, REMEDY) from None
    found.no_truncation()
    found.no_padding()
    # The post-processor would add special tokens, which must not be added here, and it can repeat
    # the text.
    found.post_processor = None
    # If "</s>" occurs in the text, its author wrote it, and it must not end a segment.
    found.encode_special_tokens = True
    return found


def _ids_by_role(path: Path, ids: Mapping[str, int]) -> dict[str, int]:
    found = {}
    for role, names in ROLES.items():
        present = [ids[name] for name in names if name in ids]
        if present:
            found[f"{role}_id"] = present[0]
        elif role != "unk":
            problem = f"the {role} token is missing ({' or '.join(names[:2])})"
            raise DataError(str(path), problem, REMEDY)
    found.setdefault("unk_id", found["pad_id"])
    return found


AnyVocabulary = Vocabulary | TokenizerFile


class Encoder(Protocol):
    """The interface of objects that encode lines of text to token ids."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the token ids, uint16 or uint32."""

    def encode(self, sentences: Sequence[str]) -> list[bytes]:
        """Encode a document's sentences. Returns the bytes of an array of `dtype` for each."""


def load_any_vocabulary(path: Path) -> AnyVocabulary:
    """Read a vocab.txt file, or a tokenizer.json file if the name ends in .json.

    Raises the errors of `load_vocabulary` and `load_tokenizer_file`, which are DataError and
    ConfigError.
    """
    return load_tokenizer_file(path) if path.suffix == ".json" else load_vocabulary(path)


def load_new_vocabulary(path: Path) -> AnyVocabulary:
    """Read a vocabulary with which nothing was prepared or trained yet.

    Raises the errors of `load_any_vocabulary` and of `check_uncased`.
    """
    vocabulary = load_any_vocabulary(path)
    if isinstance(vocabulary, Vocabulary):
        check_uncased(vocabulary, str(path))
    return vocabulary


def make_encoder(vocabulary: AnyVocabulary) -> Encoder:
    """Create the encoder that uses a vocabulary."""
    if isinstance(vocabulary, TokenizerFile):
        return FileEncoder(vocabulary)
    return Tokenizer(vocabulary)


def file_name(vocabulary: AnyVocabulary) -> VocabularyFile:
    """Return the name that a vocabulary's file has in a prepared set."""
    return "tokenizer.json" if isinstance(vocabulary, TokenizerFile) else "vocab.txt"
