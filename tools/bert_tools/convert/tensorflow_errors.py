"""What is wrong with a file of TensorFlow's, as the one line that a user gets."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlperf_bert.common.errors import CheckpointError

REMEDY = "give a checkpoint that is whole, as TensorFlow wrote it"


@contextmanager
def damage_of(path: Path, name: str = "") -> Iterator[None]:
    """Raise CheckpointError about a file, or a tensor in it, for ValueError and OSError.

    The readers of formats raise these two: they know what is wrong, but not where.
    """
    where = f"{path}: {name}" if name else str(path)
    try:
        yield
    except FileNotFoundError:
        remedy = "keep all files of a checkpoint together, as TensorFlow wrote them"
        raise CheckpointError(where, "is missing", remedy) from None
    except OSError as error:
        raise CheckpointError(where, error.strerror or "cannot be read", REMEDY) from None
    except ValueError as error:
        raise CheckpointError(where, str(error), REMEDY) from None
