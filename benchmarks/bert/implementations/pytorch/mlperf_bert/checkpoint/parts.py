"""The files of a checkpoint: what each rank writes, and how they become one that is complete.

Parts are written beside, under a name that begins with a dot. A rank other than 0 leaves a note of
what it wrote as its last file; when rank 0 has found all notes it writes the manifest and renames
the directory: so a checkpoint is complete or is not there, and no thread needs a collective. The
directory must be one for all ranks.
"""

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from mlperf_bert.checkpoint.keep import discard
from mlperf_bert.checkpoint.manifest import FP8, LATEST, MANIFEST, MODEL, STATE, FileEntry, Manifest
from mlperf_bert.checkpoint.snapshot import Snapshot
from mlperf_bert.checkpoint.tensor_file import write_tensors
from mlperf_bert.data.atomic import write_file

POLL_S = 0.1


def write_part(partial: Path, snapshot: Snapshot, rank: int) -> dict[str, FileEntry]:
    """Write a rank's files; their entries in the manifest. Raises OSError."""
    (partial / "optimizer").mkdir(parents=True, exist_ok=True)
    entries = {}
    if snapshot.optimizer:
        name = f"optimizer/rank_{rank:05d}.safetensors"
        tensors, metadata = snapshot.optimizer, snapshot.optimizer_metadata
        entries[name] = write_tensors(partial / name, tensors, metadata)
    if rank == 0:
        (partial / "rng").mkdir(exist_ok=True)
        entries[MODEL] = write_tensors(partial / MODEL, snapshot.weights)
        if snapshot.fp8:
            entries[FP8] = write_tensors(partial / FP8, snapshot.fp8)
        for number, states in enumerate(snapshot.random_states):
            name = f"rng/rank_{number:05d}.safetensors"
            entries[name] = write_tensors(partial / name, states)
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
    """All files are there: write the manifest, give the checkpoint its name, point LATEST at it."""
    _write_bytes(partial / MANIFEST, manifest.to_json())
    for folder in (partial / "optimizer", partial / "rng", partial):
        _flush_directory(folder)
    if final.exists():  # a run that was resumed from it, and stopped at once
        discard(final)
    partial.rename(final)
    _flush_directory(final.parent)
    write_file(final.with_name(LATEST), f"{final.name}\n".encode())


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
