"""The files of a checkpoint: what each rank writes, and how they become one that is complete.

Parts are written beside, under a name that begins with a dot. A rank other than 0 leaves a note of
what it wrote as its last file; when rank 0 has found all notes it writes the manifest and renames
the directory: so a checkpoint is complete or is not there, and no thread needs a collective. The
directory must be one for all ranks.
"""

import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from mlperf_bert.checkpoint.manifest import (
    FP8,
    MANIFEST,
    MODEL,
    RANK_STATES,
    STATE,
    FileEntry,
    Manifest,
)
from mlperf_bert.checkpoint.retention import REPLACED, move_aside
from mlperf_bert.checkpoint.snapshot import Snapshot
from mlperf_bert.checkpoint.tensor_file import write_tensors
from mlperf_bert.common.atomic import write_file
from mlperf_bert.common.present import is_there

POLL_S = 0.1
_SPARE_BYTES = 2**16  # for logs and metrics, and names and headers of the checkpoint itself


def write_part(
    partial: Path, snapshot: Snapshot, rank: int, wrote: Callable[[int], None]
) -> dict[str, FileEntry]:
    """Write a rank's files; their entries in the manifest. Raises OSError.

    `wrote` is told of every piece that was written.
    """
    (partial / "optimizer").mkdir(parents=True, exist_ok=True)
    _check_room(partial, snapshot)
    entries = {}
    if snapshot.optimizer:
        name = f"optimizer/rank_{rank:05d}.safetensors"
        tensors, metadata = snapshot.optimizer, snapshot.optimizer_metadata
        entries[name] = write_tensors(partial / name, tensors, metadata, wrote)
    if rank == 0:
        for name, tensors in (
            (MODEL, snapshot.weights),
            (FP8, snapshot.fp8),
            (RANK_STATES, snapshot.rank_states),
        ):
            if tensors:
                entries[name] = write_tensors(partial / name, tensors, wrote=wrote)
        entries[STATE] = _write_bytes(partial / STATE, snapshot.state.to_json())
    return entries


def leave_note(partial: Path, rank: int, entries: Mapping[str, FileEntry]) -> None:
    """Tell rank 0 that this rank's files are on disk."""
    values = {name: (entry.size, entry.sha256) for name, entry in entries.items()}
    write_file(_note(partial, rank), json.dumps(values).encode("ascii"))


def await_note(partial: Path, rank: int, abandoned: threading.Event) -> dict[str, FileEntry]:
    """Wait for a rank's note and remove it. Raises InterruptedError where it is `abandoned`."""
    note = _note(partial, rank)
    while not note.exists():
        if abandoned.wait(POLL_S):
            raise InterruptedError("another rank failed")
    values = json.loads(note.read_text(encoding="ascii"))
    note.unlink()
    return {name: FileEntry(*entry) for name, entry in values.items()}


def complete(partial: Path, final: Path, manifest: Manifest) -> None:
    """All files are there: write the manifest and give the checkpoint its name. Raises OSError."""
    _write_bytes(partial / MANIFEST, manifest.to_json())
    for folder in (partial / "optimizer", partial):
        _flush_directory(folder)
    # One of the same step goes last: removed first, it would be lost to a kill in between.
    replaced = move_aside(final, REPLACED) if is_there(final) else None
    partial.rename(final)
    _flush_directory(final.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def _check_room(partial: Path, snapshot: Snapshot) -> None:
    """Raise OSError where there is no room: a disk filled to its end would fail other files too."""
    kinds = (snapshot.weights, snapshot.fp8, snapshot.rank_states, snapshot.optimizer)
    wanted = sum(each.nbytes for tensors in kinds for each in tensors.values())
    if shutil.disk_usage(partial).free < wanted + _SPARE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _note(partial: Path, rank: int) -> Path:
    return partial / f"note_{rank:05d}.json"


def _write_bytes(path: Path, contents: bytes) -> FileEntry:
    with path.open("xb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(len(contents), hashlib.sha256(contents).hexdigest())


def _flush_directory(path: Path) -> None:
    """Have the names in a directory on disk, where its file system can be asked to."""
    with suppress(OSError):
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
