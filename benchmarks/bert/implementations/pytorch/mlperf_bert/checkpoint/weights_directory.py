"""Report a weights directory that does not exist, and suggest a similar one if possible.

All commands that read weights use this module, so that the same mistake gives the same error
message everywhere.
"""

import difflib
import os
from contextlib import suppress
from pathlib import Path

from mlperf_bert.errors import CheckpointError
from mlperf_bert.files import is_there

# Remedies for commands that accept a checkpoint, a Hugging Face directory, or both.
A_CHECKPOINT = (
    "pass a checkpoint, such as RUN_DIR/run_0/checkpoints, or convert other programs' weights with "
    "`mlperf_bert convert`"
)
HUGGINGFACE = "pass one written by save_pretrained(), with config.json and model.safetensors"
EITHER = (
    "pass a checkpoint, such as RUN_DIR/run_0/checkpoints, or a directory written by "
    "save_pretrained(), with config.json and model.safetensors"
)


def check_directory(path: Path, remedy: str) -> None:
    """Raise CheckpointError unless `path` is a directory.

    If a directory with a similar name exists, the error suggests it. Otherwise the error suggests
    `remedy`. Raises UnreadableError if the file system fails.
    """
    if os.path.isdir(path):
        return
    if is_there(path):
        raise CheckpointError(str(path), "is not a directory", remedy)
    similar = _similar(path)
    suggestion = remedy if similar is None else f"did you mean {similar}?"
    raise CheckpointError(str(path), "no such directory", suggestion)


def _similar(path: Path) -> Path | None:
    """Return an existing directory whose path differs in one similar name, or None."""
    part = path  # the first part of the path that does not exist
    with suppress(OSError):
        while part.parent != part and not part.parent.is_dir():
            part = part.parent
        names = sorted(each.name for each in part.parent.iterdir() if each.is_dir())
        for name in difflib.get_close_matches(part.name, names):
            similar = part.with_name(name) / path.relative_to(part)
            if similar.is_dir():
                return similar
    return None
