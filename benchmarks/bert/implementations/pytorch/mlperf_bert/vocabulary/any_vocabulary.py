"""A vocabulary of either kind, word pieces or a tokenizer file: read, found, splitting lines."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mlperf_bert.common.errors import CheckpointError, ConfigError
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
MASK = "[MASK]"

LEVELS_ABOVE = 3  # of a checkpoint: its run's checkpoints, the run, its directory
_REMEDY = "give the vocabulary of its data with --vocab, or the data with --data"


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


def vocabulary_of(
    checkpoint: Path, sha256: str, given: Path | None, data: Path | None
) -> AnyVocabulary:
    """The first that is there of: `given`, of the sets of `data`, in the checkpoint or above it.

    Raises CheckpointError where there is none or its digest is another; DataError and ConfigError
    as `load_any_vocabulary`.
    """
    if data is not None:
        directories = [data, data / "train", data / "eval"]
    else:
        directories = [checkpoint, *checkpoint.absolute().parents[:LEVELS_ABOVE]]
    places = [directory / name for directory in directories for name in VOCABULARY_FILES]
    path = given or next((place for place in places if place.exists()), None)
    if path is None:
        problem = f"no {' and no '.join(VOCABULARY_FILES)} in it" + (
            "" if data else " nor above it"
        )
        raise CheckpointError(str(data or checkpoint), problem, _REMEDY)
    vocabulary = load_any_vocabulary(path)
    if vocabulary.sha256 != sha256:
        problem = "is not the vocabulary that the checkpoint was trained with"
        raise CheckpointError(str(path), problem, _REMEDY)
    return vocabulary


def tokens_of(text: str, vocabulary: AnyVocabulary, most: int) -> list[int]:
    """[CLS], the text's word pieces as `prepare` makes them, [SEP]; at most `most`.

    A mask is [MASK], or what the vocabulary calls it. Raises ConfigError where the text has none,
    or is too long.
    """
    encoder = make_encoder(vocabulary)

    def encode(part: str) -> list[int]:
        ids: list[int] = np.frombuffer(encoder.encode(part), dtype=encoder.dtype).tolist()
        return ids

    # Where white space belongs to the word after it, the space before a mask is the mask's own.
    *before, last = text.replace(_own_mask(vocabulary), MASK).split(MASK)
    first, *others = [*(part.rstrip() for part in before), last]
    if not others:
        raise ConfigError("text", f"has no {MASK}", f"write {MASK} where a word is to be filled in")
    tokens = [vocabulary.cls_id, *encode(first)]
    for part in others:
        tokens += [vocabulary.mask_id, *encode(part)]
    tokens.append(vocabulary.sep_id)
    if len(tokens) > most:
        problem = f"has {len(tokens)} tokens, the model takes {most}"
        raise ConfigError("text", problem, "shorten it")
    return tokens


def _own_mask(vocabulary: AnyVocabulary) -> str:
    """What a text may have in the place of [MASK]."""
    if isinstance(vocabulary, TokenizerFile):
        return str(vocabulary.tokenizer.id_to_token(vocabulary.mask_id))
    return MASK
