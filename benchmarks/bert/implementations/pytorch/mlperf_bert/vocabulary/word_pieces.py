"""The vocabulary file: one token a line, the line's number is the id."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlperf_bert.common.errors import DataError
from mlperf_bert.common.untrusted import in_brief, read_regular_file

# What holds the vocabulary of a set: word pieces, or a tokenizer as `tokenizers` saves it.
VocabularyFile = Literal["vocab.txt", "tokenizer.json"]
VOCABULARY_FILES: tuple[VocabularyFile, ...] = ("vocab.txt", "tokenizer.json")

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_REMEDY = "give the model's vocab.txt, one token a line"
_MAX_BYTES = 64 * 2**20  # the largest in use, of several languages, have 5 MB


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens in file order and their ids; `sha256` is the digest of the file's bytes."""

    tokens: tuple[str, ...]
    ids: dict[str, int]
    sha256: str
    contents: bytes

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def pad_id(self) -> int:
        """Id of [PAD]."""
        return self.ids["[PAD]"]

    @property
    def unk_id(self) -> int:
        """Id of [UNK]."""
        return self.ids["[UNK]"]

    @property
    def cls_id(self) -> int:
        """Id of [CLS]."""
        return self.ids["[CLS]"]

    @property
    def sep_id(self) -> int:
        """Id of [SEP]."""
        return self.ids["[SEP]"]

    @property
    def mask_id(self) -> int:
        """Id of [MASK]."""
        return self.ids["[MASK]"]


def load_vocabulary(path: Path) -> Vocabulary:
    r"""Read a vocabulary; lines end at \n only, white space around a token is dropped.

    Raises DataError when the file is missing, not UTF-8, has an empty or repeated token, lacks one
    of the five special tokens or has no other.
    """
    try:
        contents = read_regular_file(path, _MAX_BYTES)
    except OSError as error:
        raise DataError(str(path), error.strerror or "cannot be read", _REMEDY) from None
    return parse_vocabulary(contents, str(path))


def parse_vocabulary(contents: bytes, where: str) -> Vocabulary:
    """Of a file's contents, as `load_vocabulary`; `where` opens every error message."""
    try:
        text = contents.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(where, f"is not UTF-8 at byte {error.start}", _REMEDY) from None
    tokens = tuple(line.strip() for line in text.removesuffix("\n").split("\n"))
    ids: dict[str, int] = {}
    for number, token in enumerate(tokens):
        if not token:
            raise DataError(f"{where}: line {number + 1}", "is empty", _REMEDY)
        if token in ids:
            problem = f"repeats {in_brief(token)} of line {ids[token] + 1}"
            raise DataError(f"{where}: line {number + 1}", problem, _REMEDY)
        ids[token] = number
    for token in SPECIAL_TOKENS:
        if token not in ids:
            raise DataError(where, f"has no token {token}", _REMEDY)
    if len(tokens) == len(SPECIAL_TOKENS):
        raise DataError(where, "has only the special tokens", _REMEDY)
    return Vocabulary(tokens, ids, hashlib.sha256(contents).hexdigest(), contents)
