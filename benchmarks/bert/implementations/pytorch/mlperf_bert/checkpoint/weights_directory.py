"""Report a weights directory that does not exist, and suggest a similar one if possible.

All commands that read weights use this module, so that the same mistake gives the same error
message everywhere.
"""

import difflib
import os
import re
from contextlib import suppress
from pathlib import Path

from mlperf_bert.errors import CheckpointError
from mlperf_bert.files import is_there

# Remedies for commands that accept a checkpoint, a Hugging Face directory, or both.
A_CHECKPOINT = (
    "pass a checkpoint, such as RUN_DIR/run_0/checkpoints, or convert other programs' weights with "
    "`mlperf_bert convert`"
)
HUGGINGFACE = (
    "pass one written by save_pretrained(), with config.json and model.safetensors, or the name of "
    "a published model, OWNER/NAME"
)
EITHER = (
    "pass a checkpoint, such as RUN_DIR/run_0/checkpoints, a directory written by "
    "save_pretrained(), with config.json and model.safetensors, or the name of a published model, "
    "OWNER/NAME"
)
# A model on the Hugging Face hub, OWNER/NAME or OWNER/NAME@REVISION.
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[A-Za-z0-9][\w./-]*)?", re.ASCII)


def is_hub_name(path: Path) -> bool:
    """Return whether `path` is the name of a published model, and not a path or a mistyped one.

    With a revision, it is a name unless the path exists. Without one, it is a path if the directory
    OWNER exists, or if a directory has a similar path.
    """
    found = HUB_NAME.fullmatch(str(path))
    if found is None or is_there(path):
        return False
    return found[1] is not None or not (is_there(path.parent) or _similar(path))


def check_directory(path: Path, remedy: str, *, accepts_names: bool = False) -> None:
    """Raise CheckpointError unless `path` is a directory.

    If a directory with a similar name exists, the error suggests it. Otherwise the error suggests
    `remedy`. If the caller accepts names of published models and `path` looks like one, the error
    says how to pass the name. Raises UnreadableError if the file system fails.
    """
    if os.path.isdir(path):
        return
    if is_there(path):
        raise CheckpointError(str(path), "is not a directory", remedy)
    similar = _similar(path)
    suggestion = remedy if similar is None else f"did you mean {similar}?"
    if accepts_names and "@" not in str(path) and HUB_NAME.fullmatch(str(path)):
        suggestion += f" (for the published model of this name, pass {path}@main)"
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
