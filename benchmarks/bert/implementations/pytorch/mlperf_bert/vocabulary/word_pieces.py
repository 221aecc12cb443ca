"""Word pieces: the vocabulary file, one token a line, and text to ids, as in the reference.

A line's number is the token's id. `PlainTokenizer` is the readable definition. `Tokenizer` gives
the same ids much faster, because most words of a text are repeated. The `tokenizers` library is not
used: it differs from the reference on some characters, and one differing word would change every
example after it. For a new word it takes about as long as the definition does (5 and 7
microseconds, measured together).
"""

import codecs
import hashlib
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mlperf_bert.errors import DataError
from mlperf_bert.files import in_brief, read_regular_file

# The file that holds a set's vocabulary: word pieces, or a tokenizer of `tokenizers`.
VocabularyFile = Literal["vocab.txt", "tokenizer.json"]
VOCABULARY_FILES: tuple[VocabularyFile, ...] = ("vocab.txt", "tokenizer.json")

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_REMEDY = "give the model's vocab.txt, one token a line"
_MAX_BYTES = 64 * 2**20  # the largest in use, of several languages, have 5 MB

_OPENS_A_WORD = "\u2581"  # SentencePiece's mark of a space
_MOST_OF_SENTENCE_PIECE = 0.1  # share of the tokens

MAX_WORD_CHARS = 200
# About 50 MB for words of usual length, about 240 MB for the longest that are kept (text without
# spaces); at this number all are forgotten.
MAX_KNOWN_WORDS = 2**18
_CJK_RANGES = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)
_ASCII_PUNCTUATION = frozenset(
    chr(code)
    for low, high in ((33, 47), (58, 64), (91, 96), (123, 126))
    for code in range(low, high + 1)
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens in file order and their ids; `sha256` is the digest of the file's bytes."""

    tokens: tuple[str, ...]
    ids: dict[str, int]
    sha256: str
    contents: bytes
    pad_id: int = field(init=False)
    unk_id: int = field(init=False)
    cls_id: int = field(init=False)
    sep_id: int = field(init=False)
    mask_id: int = field(init=False)

    def __post_init__(self) -> None:
        for token in SPECIAL_TOKENS:  # pad_id, unk_id, cls_id, sep_id, mask_id
            object.__setattr__(self, f"{token[1:-1].lower()}_id", self.ids[token])

    def __len__(self) -> int:
        return len(self.tokens)


def load_vocabulary(path: Path) -> Vocabulary:
    r"""Read a vocabulary; lines end at \n only, white space around a token is dropped.

    Raises DataError when the file is missing, not UTF-8, has an empty or repeated token, lacks one
    of the five special tokens or has no other, or is a list for SentencePiece.
    """
    try:
        contents = read_regular_file(path, _MAX_BYTES)
    except OSError as error:
        raise DataError(str(path), error.strerror or "cannot be read", _REMEDY) from None
    return parse_vocabulary(contents, str(path))


def parse_vocabulary(contents: bytes, where: str) -> Vocabulary:
    """Parse a file's contents as in `load_vocabulary`; `where` opens every error message."""
    contents = contents.removeprefix(codecs.BOM_UTF8)  # an editor's, and no part of a token
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
    words = sum(token.startswith(_OPENS_A_WORD) for token in tokens)
    if words > _MOST_OF_SENTENCE_PIECE * len(tokens):
        problem = (
            f"is a list for SentencePiece ({words:,} of its tokens open with {_OPENS_A_WORD!a}"
        )
        problem += "), with which word pieces would be [UNK]"
        raise DataError(where, problem, "give the tokenizer.json of that model")
    return Vocabulary(tokens, ids, hashlib.sha256(contents).hexdigest(), contents)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype of token ids: uint16 if they fit, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 65_536 else np.uint32)


class PlainTokenizer:
    """The definition of word pieces, step by step, by Python's string methods and `unicodedata`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = vocabulary.ids
        self._unk_id = vocabulary.unk_id
        self._longest = max(len(token) for token in vocabulary.tokens)

    def encode(self, line: str) -> list[int]:
        """Word-piece ids of one line."""
        ids: list[int] = []
        for word in basic_words(line):
            ids += self.word_pieces(word)
        return ids

    def word_pieces(self, word: str) -> list[int]:
        """Ids of a word of `basic_words`, its longest pieces first, or the unknown word's."""
        if len(word) > MAX_WORD_CHARS:
            return [self._unk_id]
        pieces = []
        start = 0
        while start < len(word):
            prefix = "##" if start else ""
            # No piece can be longer than the longest token, so longer ones need not be tried.
            end = min(len(word), start + self._longest)
            while end > start and prefix + word[start:end] not in self._ids:
                end -= 1
            if end == start:
                return [self._unk_id]
            pieces.append(self._ids[prefix + word[start:end]])
            start = end
        return pieces


class Tokenizer(dict[str, bytes]):
    """A fast tokenizer with the ids of `PlainTokenizer`: words met before are looked up.

    It is exact for any text: a space ends a word in the definition, and a word's pieces depend on
    nothing outside it.
    """

    joint = ""  # a word's pieces are the same wherever it stands

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        self._plain = PlainTokenizer(vocabulary)
        self.dtype = token_dtype(len(vocabulary))

    def encode(self, line: str) -> bytes:
        """Word-piece ids of one line as the bytes of an array of `dtype`, uint16 or uint32."""
        return b"".join(map(self.__getitem__, line.split(" ")))

    def __missing__(self, word: str) -> bytes:
        ids = np.array(self._plain.encode(word), dtype=self.dtype).tobytes()
        if len(word) <= MAX_WORD_CHARS:  # longer ones hardly recur and cost memory
            if len(self) == MAX_KNOWN_WORDS:
                self.clear()
            self[word] = ids
        return ids


def basic_words(text: str) -> list[str]:
    """Lower-cased words without accents; every punctuation character is a word of its own."""
    words = []
    for word in _cleaned(text).split():
        decomposed = unicodedata.normalize("NFD", word.lower())
        bare = "".join(char for char in decomposed if unicodedata.category(char) != "Mn")
        words += "".join(f" {char} " if is_punctuation(char) else char for char in bare).split()
    return words


def _cleaned(text: str) -> str:
    chars = []
    for char in text:
        if is_space(char):
            chars.append(" ")
        elif is_dropped(char):
            continue
        elif is_cjk(ord(char)):
            chars.append(f" {char} ")
        else:
            chars.append(char)
    return "".join(chars)


def is_space(char: str) -> bool:
    """True for white space of the reference; `str.split` knows a few characters more."""
    return char in "\t\n\r" or unicodedata.category(char) == "Zs"


def is_dropped(char: str) -> bool:
    """True for a character that is no part of any word: control, format, and U+FFFD."""
    return char == "\ufffd" or (char not in "\t\n\r" and unicodedata.category(char) in ("Cc", "Cf"))


def is_cjk(code: int) -> bool:
    """True for a Chinese character, which is a word of its own."""
    return code >= 0x3400 and any(low <= code <= high for low, high in _CJK_RANGES)


def is_punctuation(char: str) -> bool:
    """True if a character is a word of its own: Unicode's class P, and ASCII's symbols."""
    return char in _ASCII_PUNCTUATION or unicodedata.category(char).startswith("P")
