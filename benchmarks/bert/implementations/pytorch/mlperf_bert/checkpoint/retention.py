"""Which checkpoints of a run stay; one that goes is renamed first, so that none is half there."""

import shutil
from pathlib import Path

from mlperf_bert.checkpoint.manifest import complete_checkpoints, named_checkpoints, step_of
from mlperf_bert.checkpoint.state import read_state
from mlperf_bert.common.errors import CheckpointError
from mlperf_bert.common.untrusted import is_there, names_in, reading_error

REPLACED = "replaced"  # said of a checkpoint, until another of its step is there


def prune(directory: Path, keep_last: int) -> None:
    """Remove all but the newest `keep_last` and the best, that of the highest accuracy."""
    found = complete_checkpoints(directory)
    best = max(found, key=_accuracy, default=None)
    for path in found[keep_last:]:
        if path != best or _accuracy(path) < 0:
            discard(path)


def put_aside(directory: Path, last_step: int) -> None:
    """Rename those after a step, which a run passed over that went on from there.

    They are damaged, and must not be counted among the newest.
    """
    for path in named_checkpoints(directory):
        if step_of(path) > last_step:
            move_aside(path, "damaged")


def move_aside(path: Path, word: str) -> Path:
    """Rename a checkpoint to `<word>_step_...`, with a number where there is one already."""
    first = aside = path.with_name(f"{word}_{path.name}")
    number = 0
    while is_there(aside):
        number += 1
        aside = first.with_name(f"{first.name}_{number}")
    path.rename(aside)
    return aside


def bring_back(directory: Path) -> None:
    """Give a checkpoint its name back where the one that was to replace it is not there.

    Its writer was killed. Raises UnreadableError.
    """
    for name in names_in(directory):
        path = directory / name.removeprefix(f"{REPLACED}_")
        if path.name != name and step_of(path) >= 0 and not is_there(path):
            try:
                (directory / name).rename(path)
            except OSError as error:
                raise reading_error(path, error, missing="is missing", remedy="") from None


def sweep(directory: Path) -> None:
    """Remove what writers left that were killed."""
    for path in directory.glob(".step_*"):
        if path.name.endswith((".partial", ".removed")):
            shutil.rmtree(path, ignore_errors=True)


def discard(path: Path) -> None:
    """Remove a checkpoint, or what was to become one."""
    removed = path if path.name.startswith(".") else path.with_name(f".{path.name}.removed")
    if removed != path:
        shutil.rmtree(removed, ignore_errors=True)
        path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def _accuracy(path: Path) -> float:
    """Of a checkpoint's weights; below zero where it is not known."""
    try:
        accuracy = read_state(path).mlm_accuracy
    except CheckpointError:
        return -1.0
    return -1.0 if accuracy is None else accuracy
