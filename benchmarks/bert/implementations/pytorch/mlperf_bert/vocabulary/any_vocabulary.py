"""Vocabularies of either kind, word pieces or tokenizer file: finding, reading, encoding."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mlperf_bert.errors import CheckpointError
from mlperf_bert.vocabulary import tokenizer_file
from mlperf_bert.vocabulary.tokenizer_file import FileEncoder, TokenizerFile
from mlperf_bert.vocabulary.word_pieces import (
    VOCABULARY_FILES,
    Tokenizer,
    Vocabulary,
    VocabularyFile,
    load_vocabulary,
)

AnyVocabulary = Vocabulary | TokenizerFile

LEVELS_ABOVE = 3  # folders above a checkpoint: its run's checkpoints, the run, its directory
_REMEDY = "give the vocabulary of its data with --vocab"


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


def vocabulary_of(checkpoint: Path, sha256: str, given: Path | None) -> AnyVocabulary:
    """The vocabulary in `given`, or else in the checkpoint or above it.

    Raises CheckpointError if there is none or its digest differs; DataError and ConfigError like
    `load_any_vocabulary`.
    """
    path = given or find_file(checkpoint)
    vocabulary = load_any_vocabulary(path)
    if vocabulary.sha256 != sha256:
        problem = "is not the vocabulary that the checkpoint was trained with"
        raise CheckpointError(str(path), problem, _REMEDY)
    return vocabulary


def find_file(checkpoint: Path) -> Path:
    """The first vocabulary in the checkpoint or above it. Raises CheckpointError if none is."""
    directories = [checkpoint, *checkpoint.absolute().parents[:LEVELS_ABOVE]]
    places = (directory / name for directory in directories for name in VOCABULARY_FILES)
    path = next((place for place in places if place.exists()), None)
    if path is None:
        problem = f"no {' and no '.join(VOCABULARY_FILES)} in it nor above it"
        raise CheckpointError(str(checkpoint), problem, _REMEDY)
    return path
