"""The vocabulary that a checkpoint was trained with: given, with its data, or near it."""

from pathlib import Path

from mlperf_bert.common.errors import CheckpointError
from mlperf_bert.vocabulary.any_vocabulary import AnyVocabulary, load_any_vocabulary
from mlperf_bert.vocabulary.word_pieces import VOCABULARY_FILES

LEVELS_ABOVE = 3  # of a checkpoint: its run's checkpoints, the run, its directory
_REMEDY = "give the vocabulary of its data with --vocab, or the data with --data"


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
