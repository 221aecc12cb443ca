"""Read word-piece vocabularies and encode text with them, as in MLPerf's reference implementation.

The vocabulary file has one token per line, and a line's number is the token's id. `PlainTokenizer`
is the readable definition. `Tokenizer` returns the same ids much faster, because it remembers words
and most words of a text are repeated.

This module does not use the `tokenizers` library, because the library differs from the reference
for some characters. A single different word would change every example after it. For a new word,
the library is also hardly faster than `PlainTokenizer` (5 compared with 7 microseconds in one
measurement).
"""

import codecs
import hashlib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mlperf_bert.errors import DataError
from mlperf_bert.files import in_brief, read_regular_file

# The file with a dataset's vocabulary, which is either word pieces or a tokenizer of `tokenizers`.
VocabularyFile = Literal["vocab.txt", "tokenizer.json"]
VOCABULARY_FILES: tuple[VocabularyFile, ...] = ("vocab.txt", "tokenizer.json")

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_REMEDY = "pass the model's vocab.txt, with one token per line"
_MAX_BYTES = 64 * 2**20  # the largest files in use, for several languages, are 5 MB

_SPACE_MARK = "\u2581"  # SentencePiece's mark of a space
_MAX_SPACE_MARKS = 0.1  # a list with a larger fraction of marked tokens is SentencePiece's
_MAX_CASED = 0.1  # a list with a larger fraction of tokens with capital letters is cased

MAX_WORD_CHARS = 200
# When the cache has this many words, it is emptied. It then takes about 50 MB if words have usual
# lengths, and about 240 MB if all have the maximum length (text without spaces).
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
    """The tokens of a vocabulary in file order, their ids, and the digest of the file's bytes."""

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
    r"""Read a vocabulary file. Lines end only at \n, and white space around tokens is removed.

    Raises DataError if the file is missing or not UTF-8, has an empty or repeated token, lacks one
    of the five special tokens, has only special tokens, or is a SentencePiece vocabulary.
    """
    try:
        contents = read_regular_file(path, _MAX_BYTES)
    except OSError as error:
        raise DataError(str(path), error.strerror or "cannot be read", _REMEDY) from None
    return parse_vocabulary(contents, str(path))


def parse_vocabulary(contents: bytes, where: str) -> Vocabulary:
    """Parse the contents of a vocabulary file like `load_vocabulary`.

    Error messages start with `where`.
    """
    contents = contents.removeprefix(codecs.BOM_UTF8)  # some editors add this mark
    try:
        text = contents.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(where, f"is not UTF-8 text at byte {error.start}", _REMEDY) from None
    tokens = tuple(line.strip() for line in text.removesuffix("\n").split("\n"))
    ids: dict[str, int] = {}
    for number, token in enumerate(tokens):
        if not token:
            raise DataError(f"{where}: line {number + 1}", "the line is empty", _REMEDY)
        if token in ids:
            problem = f"token {in_brief(token)} is already on line {ids[token] + 1}"
            raise DataError(f"{where}: line {number + 1}", problem, _REMEDY)
        ids[token] = number
    for token in SPECIAL_TOKENS:
        if token not in ids:
            raise DataError(where, f"the special token {token} is missing", _REMEDY)
    if len(tokens) == len(SPECIAL_TOKENS):
        raise DataError(where, "has only special tokens and no word pieces", _REMEDY)
    marked = sum(token.startswith(_SPACE_MARK) for token in tokens)
    if marked > _MAX_SPACE_MARKS * len(tokens):
        problem = (
            f"this is a SentencePiece vocabulary ({marked:,} of its tokens start with "
            f"{_SPACE_MARK!a}), with which most words would become [UNK]"
        )
        raise DataError(where, problem, "pass the tokenizer.json of that model")
    return Vocabulary(tokens, ids, hashlib.sha256(contents).hexdigest(), contents)


def check_uncased(vocabulary: Vocabulary, where: str) -> None:
    """Raise DataError if a vocabulary is for text whose capital letters are kept.

    The word pieces of this program are lower case, so they would never match such tokens. The error
    message starts with `where`.
    """
    cased = sum(token != token.lower() for token in vocabulary.tokens if token[0] not in "[<")
    if cased > _MAX_CASED * len(vocabulary):
        problem = (
            f"this is a cased vocabulary ({cased:,} of its tokens have capital letters), but this "
            "program converts text to lower case before it splits words by a vocab.txt"
        )
        remedy = (
            "pass the tokenizer.json of that model (if there is none, "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(OTHER) writes one)"
        )
        raise DataError(where, problem, remedy)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype of token ids: uint16 if all ids of the vocabulary fit, otherwise uint32."""
    return np.dtype(np.uint16 if vocab_size <= 65_536 else np.uint32)


class PlainTokenizer:
    """A readable definition of word pieces, with Python's string methods and `unicodedata`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = vocabulary.ids
        self._unk_id = vocabulary.unk_id
        self._longest = max(len(token) for token in vocabulary.tokens)

    def encode(self, line: str) -> list[int]:
        """Encode one line to word-piece ids."""
        ids: list[int] = []
        for word in basic_words(line):
            ids += self.word_pieces(word)
        return ids

    def word_pieces(self, word: str) -> list[int]:
        """Split a word of `basic_words` into the longest possible pieces, and return their ids.

        If the word is too long, or cannot be split into pieces of the vocabulary, return only the
        id of the unknown token.
        """
        if len(word) > MAX_WORD_CHARS:
            return [self._unk_id]
        pieces = []
        start = 0
        while start < len(word):
            prefix = "##" if start else ""
            # No piece can be longer than the longest token, so longer pieces are not tried.
            end = min(len(word), start + self._longest)
            while end > start and prefix + word[start:end] not in self._ids:
                end -= 1
            if end == start:
                return [self._unk_id]
            pieces.append(self._ids[prefix + word[start:end]])
            start = end
        return pieces


class Tokenizer(dict[str, bytes]):
    """A fast encoder that returns the ids of `PlainTokenizer`, and stores the ids of known words.

    The result is exact for any text. The reason is that a space always ends a word, and that the
    pieces of a word do not depend on the text around it.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        self._plain = PlainTokenizer(vocabulary)
        self.dtype = token_dtype(len(vocabulary))

    def encode(self, sentences: Sequence[str]) -> list[bytes]:
        """Encode sentences to word-piece ids.

        Returns the bytes of one array of `dtype`, which is uint16 or uint32, for each sentence.
        """
        return [b"".join(map(self.__getitem__, line.split(" "))) for line in sentences]

    def __missing__(self, word: str) -> bytes:
        ids = np.array(self._plain.encode(word), dtype=self.dtype).tobytes()
        if len(word) <= MAX_WORD_CHARS:  # longer words rarely recur and would cost memory
            if len(self) == MAX_KNOWN_WORDS:
                self.clear()
            self[word] = ids
        return ids


def basic_words(text: str) -> list[str]:
    """Split text into lower-case words without accents.

    Each punctuation character is a separate word.
    """
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
    """Return True if a character is white space in the reference implementation.

    The reference has fewer white-space characters than Python.
    """
    return char in "\t\n\r" or unicodedata.category(char) == "Zs"


def is_dropped(char: str) -> bool:
    """Return True if the tokenizer drops a character.

    The tokenizer drops control characters, format characters and U+FFFD.
    """
    return char == "\ufffd" or (char not in "\t\n\r" and unicodedata.category(char) in ("Cc", "Cf"))


def is_cjk(code: int) -> bool:
    """Return True if a code point is a Chinese character, each of which is a separate word."""
    return code >= 0x3400 and any(low <= code <= high for low, high in _CJK_RANGES)


def is_punctuation(char: str) -> bool:
    """Return True if a character is punctuation.

    Punctuation is Unicode's category P and all ASCII symbols.
    """
    return char in _ASCII_PUNCTUATION or unicodedata.category(char).startswith("P")
