"""Text to word-piece ids, exactly as the MLPerf reference splits it.

`PlainTokenizer` is the readable definition. `Tokenizer` gives the same ids much faster: lines made
only of code points on which the `tokenizers` library agrees go through that library, the others
through the plain path. One differing word would change every example after it.
"""

import re
import unicodedata
from collections.abc import Sequence

from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models, normalizers, pre_tokenizers

from mlperf_bert.prepare.vocabulary import Vocabulary

MAX_WORD_CHARS = 200

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

# Code points proved equal one by one and between letters (tests/unit/prepare/test_wordpiece.py).
# None of them is a combining character that survives, and none but the capital sigma (03A3, left
# out) is lower-cased by its neighbours, so each is treated alone and equality per code point is
# equality per line. Characters added after Unicode 11 are left out by taking old blocks only.
FAST_RANGES = (
    (0x20, 0x7E),  # ASCII
    (0xA0, 0x24F),  # Latin-1 and Latin Extended-A and B
    (0x391, 0x3A1),  # Greek capitals before and after sigma
    (0x3A4, 0x3FF),  # rest of Greek
    (0x400, 0x52F),  # Cyrillic
    (0x1E00, 0x1EFF),  # Latin Extended Additional
    (0x2010, 0x2027),  # dashes, quotes, dots
    (0x2030, 0x205E),  # per mille, primes, guillemets
    (0x2070, 0x209C),  # superscripts and subscripts
    (0x20A0, 0x20BF),  # currency signs
    (0x2100, 0x218B),  # letter-like symbols and number forms
    (0x2190, 0x23FE),  # arrows, mathematical operators, technical signs
    (0x3000, 0x3029),  # CJK punctuation, before its tone marks (some survive and are reordered)
    (0x3030, 0x30FF),  # the rest of it, kana
    (0x4E00, 0x9FEF),  # CJK ideographs
    (0xAC00, 0xD7A3),  # Hangul syllables
)


def _fast_pattern() -> str:
    return "[" + "".join(f"\\u{low:04x}-\\u{high:04x}" for low, high in FAST_RANGES) + "]*"


class PlainTokenizer:
    """The definition: Python's own string methods and `unicodedata`, step by step."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = vocabulary.ids
        self._unk_id = vocabulary.unk_id
        self._longest = max(len(token) for token in vocabulary.tokens)

    def encode(self, line: str) -> list[int]:
        """Word-piece ids of one line."""
        ids: list[int] = []
        for word in basic_words(line):
            ids += self._word_pieces(word)
        return ids

    def _word_pieces(self, word: str) -> list[int]:
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


class Tokenizer:
    """The same ids as `PlainTokenizer`, through the `tokenizers` library wherever that is safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._plain = PlainTokenizer(vocabulary)
        self._safe = re.compile(_fast_pattern())
        model = models.WordPiece(
            vocabulary.ids, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARS
        )
        self._library = LibraryTokenizer(model)
        self._library.normalizer = normalizers.BertNormalizer(
            clean_text=True, handle_chinese_chars=True, strip_accents=True, lowercase=True
        )
        self._library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    def is_safe(self, line: str) -> bool:
        """Whether the library is known to agree on every character of `line`."""
        return self._safe.fullmatch(line) is not None

    def encode_lines(self, lines: Sequence[str]) -> list[list[int]]:
        """Word-piece ids of each line; a list per line, empty where a line has no word."""
        safe = [number for number, line in enumerate(lines) if self.is_safe(line)]
        encoded = self._library.encode_batch_fast(
            [lines[number] for number in safe], add_special_tokens=False
        )
        found = {number: one.ids for number, one in zip(safe, encoded, strict=True)}
        return [
            found[number] if number in found else self._plain.encode(line)
            for number, line in enumerate(lines)
        ]


def basic_words(text: str) -> list[str]:
    """Lower-cased words without accents; every punctuation character is a word of its own."""
    words = []
    for word in _cleaned(text).split():
        decomposed = unicodedata.normalize("NFD", word.lower())
        bare = "".join(char for char in decomposed if unicodedata.category(char) != "Mn")
        words += "".join(f" {char} " if _is_punctuation(char) else char for char in bare).split()
    return words


def _cleaned(text: str) -> str:
    chars = []
    for char in text:
        category = unicodedata.category(char)
        if char in "\t\n\r" or category == "Zs":
            chars.append(" ")
        elif char in "\0\ufffd" or category in ("Cc", "Cf"):
            continue
        elif _is_cjk(ord(char)):
            chars.append(f" {char} ")
        else:
            chars.append(char)
    return "".join(chars)


def _is_cjk(code: int) -> bool:
    return code >= 0x3400 and any(low <= code <= high for low, high in _CJK_RANGES)


def _is_punctuation(char: str) -> bool:
    return char in _ASCII_PUNCTUATION or unicodedata.category(char).startswith("P")
