"""Splits a text into the tokens that `prepare` makes of it, with the position of each.

Own word pieces are split here again, character by character, since cleaning, lower-casing and the
removal of accents all change lengths; a test compares the tokens with `prepare`'s. For a tokenizer
file the `tokenizers` library gives the positions.
"""

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.vocabulary.any_vocabulary import AnyVocabulary
from mlperf_bert.vocabulary.tokenizer_file import FileEncoder, TokenizerFile
from mlperf_bert.vocabulary.word_pieces import (
    MAX_WORD_CHARS,
    PlainTokenizer,
    Vocabulary,
    is_cjk,
    is_punctuation,
)

_MAX_KNOWN_WORDS = 2**16
# A character of a word, and the index of its source character in the text.
_Letters = list[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids of a text and the characters of each, from `starts` to before `ends`; int64 [n].

    A token that stands for white space alone has no characters.
    """

    ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


class _FileOffsets:
    """Positions from the library, without white space at either end of a token."""

    def __init__(self, file: TokenizerFile) -> None:
        self._encoder = FileEncoder(file)

    def encode(self, text: str) -> Tokens:
        ids, offsets = self._encoder.encode_with_offsets(text)
        spans = []
        for start, end in offsets:
            while start < end and text[start].isspace():
                start += 1
            while start < end and text[end - 1].isspace():
                end -= 1
            spans.append((start, end))
        return _tokens(ids, spans, text)


class _WordPieceOffsets:
    """Positions of own word pieces; text between two spaces is split once and kept."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._plain = PlainTokenizer(vocabulary)
        self._split_once = lru_cache(_MAX_KNOWN_WORDS)(self._split)

    def encode(self, text: str) -> Tokens:
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        position = 0
        for word in text.split(" "):
            is_short = len(word) <= MAX_WORD_CHARS
            word_ids, word_spans = (self._split_once if is_short else self._split)(word)
            ids += word_ids
            spans += [(position + start, position + end) for start, end in word_spans]
            position += len(word) + 1
        return _tokens(ids, spans, text)

    def _split(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for letters in _basic_words(text):
            pieces = self._plain.word_pieces("".join(char for char, _ in letters))
            ids += pieces
            first = 0
            for length in self._lengths(pieces, len(letters)):
                origins = [origin for _, origin in letters[first : first + length]]
                spans.append((min(origins), max(origins) + 1))
                first += length
        return ids, spans

    def _lengths(self, pieces: Sequence[int], num_letters: int) -> list[int]:
        """Number of letters in each piece of a word; the unknown word has all of them."""
        if list(pieces) == [self._vocabulary.unk_id]:
            return [num_letters]
        tokens = [self._vocabulary.tokens[piece] for piece in pieces]
        return [len(tokens[0]), *(len(token) - len("##") for token in tokens[1:])]


def make_offset_encoder(vocabulary: AnyVocabulary) -> _FileOffsets | _WordPieceOffsets:
    """An encoder for a vocabulary; its `encode` returns tokens without special ones."""
    if isinstance(vocabulary, TokenizerFile):
        return _FileOffsets(vocabulary)
    return _WordPieceOffsets(vocabulary)


def _basic_words(text: str) -> Iterator[_Letters]:
    """The words of `prepare.wordpiece.basic_words`, each letter with its source character."""
    for word in _cleaned_words(text):
        letters: _Letters = []
        for char, origin in _decomposed(_lower_case(word)):
            if unicodedata.category(char) == "Mn":
                continue
            if char.isspace() or is_punctuation(char):
                if letters:
                    yield letters
                letters = []
                if not char.isspace():
                    yield [(char, origin)]
            else:
                letters.append((char, origin))
        if letters:
            yield letters


def _cleaned_words(text: str) -> Iterator[_Letters]:
    """Words between white space, each Chinese character by itself, without controls."""
    word: _Letters = []
    for origin, char in enumerate(text):
        category = unicodedata.category(char)
        is_break = char in "\t\n\r" or category in ("Zs", "Zl", "Zp")
        if not is_break and (char in "\0\ufffd" or category in ("Cc", "Cf")):
            continue
        is_alone = is_cjk(ord(char))
        if (is_break or is_alone) and word:
            yield word
            word = []
        if is_alone:
            yield [(char, origin)]
        elif not is_break:
            word.append((char, origin))
    if word:
        yield word


def _lower_case(word: _Letters) -> _Letters:
    # The whole word at once, since one letter (the Greek sigma) has two lower cases; that apart
    # a character's lower case, of one or more letters, depends on it alone.
    lower = "".join(char for char, _ in word).lower()
    origins = [origin for char, origin in word for _ in char.lower()]
    return list(zip(lower, origins, strict=True))


def _decomposed(word: _Letters) -> Iterator[tuple[str, int]]:
    """Unicode's form NFD: characters decomposed, runs of marks in the order of their class."""
    marks: _Letters = []
    for composed, origin in word:
        for char in unicodedata.normalize("NFD", composed):
            if unicodedata.combining(char):
                marks.append((char, origin))
                continue
            yield from sorted(marks, key=lambda letter: unicodedata.combining(letter[0]))
            marks = []
            yield char, origin
    yield from sorted(marks, key=lambda letter: unicodedata.combining(letter[0]))


def _tokens(ids: Sequence[int], spans: Sequence[tuple[int, int]], text: str) -> Tokens:
    if not text.isascii():
        spans = list(_with_marks(spans, text))
    bounds: NDArray[Any] = np.array(spans, dtype=np.int64).reshape(-1, 2)
    # Unicode puts some marks in another order: tokens that change places share their characters.
    starts = np.minimum.accumulate(bounds[::-1, 0])[::-1]
    ends = np.maximum.accumulate(bounds[:, 1])
    return Tokens(np.array(ids, dtype=np.int64), starts, ends)


def _with_marks(spans: Sequence[tuple[int, int]], text: str) -> Iterator[tuple[int, int]]:
    """Let a token end after the accents that follow its last letter, which it may have dropped."""
    for number, (start, end) in enumerate(spans):
        limit = spans[number + 1][0] if number + 1 < len(spans) else len(text)
        while start < end < limit and unicodedata.category(text[end]) == "Mn":
            end += 1
        yield start, end
