"""Vocabularies of either kind, word pieces or a tokenizer file: reading, encoding.

A tokenizer file (tokenizer.json of Hugging Face's library) stands in place of word pieces. Its
special tokens are found by their role. The `tokenizers` package does the splitting; it is an
optional extra, and its errors are passed on in one line.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mlperf_bert.errors import ConfigError, DataError
from mlperf_bert.files import in_brief, parse_json_object, read_regular_file
from mlperf_bert.vocabulary.word_pieces import (
    Tokenizer,
    Vocabulary,
    VocabularyFile,
    load_vocabulary,
    token_dtype,
)

if TYPE_CHECKING:
    import tokenizers

# Names of each role's token in BERT's and RoBERTa's families; the first one present is used.
ROLES: dict[str, tuple[str, ...]] = {
    "pad": ("[PAD]", "<pad>", "<|pad|>", "<|padding|>"),
    "unk": ("[UNK]", "<unk>", "<|unk|>"),
    "cls": ("[CLS]", "<s>", "<cls>", "<bos>", "<|begin_of_text|>"),
    "sep": ("[SEP]", "</s>", "<sep>", "<eos>", "<|end_of_text|>"),
    "mask": ("[MASK]", "<mask>", "<|mask|>"),
}
REMEDY = "give the tokenizer.json of a masked language model"
# `tokenizers` raises plain Exception, and its panics are not even that; the file causes all.
_NOT_THE_FILES = (KeyboardInterrupt, SystemExit, MemoryError)
_MAX_BYTES = 64 * 2**20  # the largest in use, of 250,000 words, have 17 MB
_MOST_TOKENS = 2**22


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """A tokenizer, and its settings that decide examples; `sha256` digests the file's bytes.

    If no token stands for unknown words, as in byte-level vocabularies, which need none, `unk_id`
    is `pad_id`: it never occurs.
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
    """An encoder of lines to token ids, like `word_pieces.Tokenizer`."""

    # Between two sentences of a document: the line break stands for white space, and in
    # vocabularies that keep white space a word after it is a different token.
    joint = " "

    def __init__(self, file: TokenizerFile) -> None:
        self.dtype = token_dtype(len(file))
        self._path = file.path
        self._encode = file.tokenizer.encode
        ids = (file.pad_id, file.cls_id, file.sep_id, file.mask_id)
        self._special = frozenset(ids)

    def encode(self, line: str) -> bytes:
        """Token ids of one line as the bytes of an array of `dtype`.

        Special tokens written in the text are text; one that only the vocabulary knows is left out.
        Raises DataError if the file contradicts itself, which shows only now.
        """
        ids = self._split(line).ids
        if not self._special.isdisjoint(ids):
            ids = [token for token in ids if token not in self._special]
        return np.array(ids, dtype=self.dtype).tobytes()

    def _split(self, line: str) -> "tokenizers.Encoding":
        try:
            return self._encode(line, add_special_tokens=False)
        except _NOT_THE_FILES:
            raise
        except BaseException as error:
            problem = f"cannot split text ({in_brief(str(error))})"
            raise DataError(str(self._path), problem, REMEDY) from None


def load_tokenizer_file(path: Path) -> TokenizerFile:
    """Read a tokenizer.json.

    Raises ConfigError if the `tokenizers` package is not installed. Raises DataError for a file
    that is missing, too large or no tokenizer, that splits text at random, or that lacks a token
    for a role.
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
        raise DataError(f"{path}: model", "is not an object", REMEDY)
    if model.get("dropout"):
        problem = (
            f"is {in_brief(model['dropout'])}: the same text would give other tokens each time"
        )
        raise DataError(f"{path}: model: dropout", problem, "set it to null")
    tokenizer = _tokenizer(path, contents)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    vocab_size = max(ids.values(), default=-1) + 1
    if not len(ROLES) < vocab_size <= _MOST_TOKENS:
        problem = f"has {vocab_size:,} tokens, not {len(ROLES) + 1} .. {_MOST_TOKENS:,}"
        raise DataError(str(path), problem, REMEDY)
    return TokenizerFile(
        path=path,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        sha256=hashlib.sha256(contents).hexdigest(),
        contents=contents,
        **_ids_by_role(path, ids),
    )


def _tokenizer(path: Path, contents: bytes) -> "tokenizers.Tokenizer":
    try:
        import tokenizers
    except ImportError:
        remedy = "run in the checkout: tools/venv.sh tokenizers, or give a vocab.txt"
        raise ConfigError(str(path), "needs the package `tokenizers`", remedy) from None
    try:
        found = tokenizers.Tokenizer.from_str(contents.decode("utf-8"))
    except _NOT_THE_FILES:
        raise
    except BaseException as error:
        problem = f"is no tokenizer ({in_brief(str(error))})"
        raise DataError(str(path), problem, REMEDY) from None
    found.no_truncation()
    found.no_padding()
    # The post-processor adds special tokens, unwanted here, and can repeat the text.
    found.post_processor = None
    # "</s>" in the text was written by its author and must not end a segment.
    found.encode_special_tokens = True
    return found


def _ids_by_role(path: Path, ids: Mapping[str, int]) -> dict[str, int]:
    found = {}
    for role, names in ROLES.items():
        present = [ids[name] for name in names if name in ids]
        if present:
            found[f"{role}_id"] = present[0]
        elif role != "unk":
            problem = f"has no {role} token ({' or '.join(names[:2])})"
            raise DataError(str(path), problem, REMEDY)
    found.setdefault("unk_id", found["pad_id"])
    return found


AnyVocabulary = Vocabulary | TokenizerFile


class Encoder(Protocol):
    """An encoder of lines into token ids."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the ids: uint16 or uint32."""

    @property
    def joint(self) -> str:
        """The text before a sentence that is not its document's first."""

    def encode(self, line: str) -> bytes:
        """Token ids of one line as the bytes of an array of `dtype`."""


def load_any_vocabulary(path: Path) -> AnyVocabulary:
    """Read a vocab.txt, or a tokenizer.json if the name ends in .json.

    Raises DataError like `load_vocabulary` and `load_tokenizer_file`, and ConfigError.
    """
    return load_tokenizer_file(path) if path.suffix == ".json" else load_vocabulary(path)


def make_encoder(vocabulary: AnyVocabulary) -> Encoder:
    """The encoder of a vocabulary."""
    if isinstance(vocabulary, TokenizerFile):
        return FileEncoder(vocabulary)
    return Tokenizer(vocabulary)


def file_name(vocabulary: AnyVocabulary) -> VocabularyFile:
    """The file name under which a prepared set keeps a vocabulary."""
    return "tokenizer.json" if isinstance(vocabulary, TokenizerFile) else "vocab.txt"
