"""Splits a text into tokens with the position of each, by the `tokenizers` library.

Word pieces are split as `transformers` splits them with a saved model's tokenizer.json. A test
compares the tokens with those that `prepare` makes. They differ on a few rare characters only, such
as a capital sigma at the end of a Greek word.
"""

import json
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bert_tools.huggingface.tokenizer import word_piece_tokenizer
from mlperf_bert.errors import ConfigError
from mlperf_bert.vocabulary.any_vocabulary import AnyVocabulary
from mlperf_bert.vocabulary.tokenizer_file import FileEncoder, TokenizerFile
from mlperf_bert.vocabulary.word_pieces import Vocabulary

_Spans = Sequence[tuple[int, int]]
_Split = Callable[[str], tuple[list[int], _Spans]]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids of a text and the characters of each, from `starts` to before `ends`; int64 [n].

    A token that stands for white space alone has no characters.
    """

    ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


def make_offset_encoder(vocabulary: AnyVocabulary) -> Callable[[str], Tokens]:
    """A function from a text to its tokens, without special ones.

    Raises ConfigError if the `tokenizers` package is not installed.
    """
    if isinstance(vocabulary, TokenizerFile):
        split: _Split = FileEncoder(vocabulary).encode_with_offsets
    else:
        split = _word_pieces(vocabulary)

    def encode(text: str) -> Tokens:
        ids, spans = split(text)
        return _tokens(ids, list(_without_space(spans, text)), text)

    return encode


def _word_pieces(vocabulary: Vocabulary) -> _Split:
    """The library's splitting by a list of word pieces."""
    try:
        import tokenizers
    except ImportError:
        remedy = "run in the checkout: tools/venv.sh tokenizers"
        raise ConfigError("squad", "needs the package `tokenizers`", remedy) from None
    library = tokenizers.Tokenizer.from_str(json.dumps(word_piece_tokenizer(vocabulary)))
    library.encode_special_tokens = True  # "[SEP]" in a text was written by its author

    def split(text: str) -> tuple[list[int], _Spans]:
        found = library.encode(text, add_special_tokens=False)
        return found.ids, found.offsets

    return split


def _without_space(spans: _Spans, text: str) -> Iterator[tuple[int, int]]:
    """Spans without the white space at either end of a token."""
    for start, end in spans:
        while start < end and text[start].isspace():
            start += 1
        while start < end and text[end - 1].isspace():
            end -= 1
        yield start, end


def _tokens(ids: Sequence[int], spans: _Spans, text: str) -> Tokens:
    if not text.isascii():
        spans = list(_with_marks(spans, text))
    bounds: NDArray[Any] = np.array(spans, dtype=np.int64).reshape(-1, 2)
    # Unicode puts some marks in another order: tokens that change places share their characters.
    starts = np.minimum.accumulate(bounds[::-1, 0])[::-1]
    ends = np.maximum.accumulate(bounds[:, 1])
    return Tokens(np.array(ids, dtype=np.int64), starts, ends)


def _with_marks(spans: _Spans, text: str) -> Iterator[tuple[int, int]]:
    """Let a token end after the accents that follow its last letter, which it may have dropped."""
    for number, (start, end) in enumerate(spans):
        limit = spans[number + 1][0] if number + 1 < len(spans) else len(text)
        while start < end < limit and unicodedata.category(text[end]) == "Mn":
            end += 1
        yield start, end
