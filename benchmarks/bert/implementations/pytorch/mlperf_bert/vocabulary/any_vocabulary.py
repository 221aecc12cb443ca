"""A vocabulary of either kind, word pieces or a tokenizer file, and what splits lines with it."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mlperf_bert.vocabulary import tokenizer_file
from mlperf_bert.vocabulary.tokenizer_file import FileEncoder, TokenizerFile
from mlperf_bert.vocabulary.word_pieces import Vocabulary, VocabularyFile, load_vocabulary
from mlperf_bert.vocabulary.wordpiece import Tokenizer

AnyVocabulary = Vocabulary | TokenizerFile


class Encoder(Protocol):
    """Splits lines into token ids."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the ids: uint16 or uint32."""

    @property
    def joint(self) -> str:
        """What stands before a sentence that is not its document's first."""

    def encode(self, line: str) -> bytes:
        """Token ids of one line as the bytes of an array of `dtype`."""


def load_any_vocabulary(path: Path) -> AnyVocabulary:
    """Read a vocab.txt, or a tokenizer.json where the name ends in .json.

    Raises DataError as `load_vocabulary` and `tokenizer_file.load` do, and ConfigError.
    """
    return tokenizer_file.load(path) if path.suffix == ".json" else load_vocabulary(path)


def make_encoder(vocabulary: AnyVocabulary) -> Encoder:
    """What splits lines with a vocabulary."""
    if isinstance(vocabulary, TokenizerFile):
        return FileEncoder(vocabulary)
    return Tokenizer(vocabulary)


def file_name(vocabulary: AnyVocabulary) -> VocabularyFile:
    """Under which name a prepared set keeps it."""
    return "tokenizer.json" if isinstance(vocabulary, TokenizerFile) else "vocab.txt"
