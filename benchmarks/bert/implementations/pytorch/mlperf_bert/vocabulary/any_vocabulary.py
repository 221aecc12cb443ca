"""Vocabularies of either kind, word pieces or tokenizer file: reading, encoding."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mlperf_bert.vocabulary import tokenizer_file
from mlperf_bert.vocabulary.tokenizer_file import FileEncoder, TokenizerFile
from mlperf_bert.vocabulary.word_pieces import (
    Tokenizer,
    Vocabulary,
    VocabularyFile,
    load_vocabulary,
)

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

    Raises DataError like `load_vocabulary` and `tokenizer_file.load`, and ConfigError.
    """
    return tokenizer_file.load(path) if path.suffix == ".json" else load_vocabulary(path)


def make_encoder(vocabulary: AnyVocabulary) -> Encoder:
    """The encoder of a vocabulary."""
    if isinstance(vocabulary, TokenizerFile):
        return FileEncoder(vocabulary)
    return Tokenizer(vocabulary)


def file_name(vocabulary: AnyVocabulary) -> VocabularyFile:
    """The file name under which a prepared set keeps a vocabulary."""
    return "tokenizer.json" if isinstance(vocabulary, TokenizerFile) else "vocab.txt"
