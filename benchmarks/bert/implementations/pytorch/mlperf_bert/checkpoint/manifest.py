"""Read and verify the files of a checkpoint, and remove old checkpoints of a run.

This module does not import torch. The names of the files have a fixed form, so that no name can
lead to another directory. A file is used only if its digest equals the one in the manifest. A
checkpoint is renamed before it is removed, so that no other process ever finds an incomplete one.
"""

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlperf_bert.checkpoint.weights_directory import A_CHECKPOINT, HUB_NAME, check_directory
from mlperf_bert.config.files import config_from_tables
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import AttentionName, KernelsName
from mlperf_bert.errors import CheckpointError, DataError, UnreadableError, typed
from mlperf_bert.files import (
    check_version,
    file_sha256,
    in_brief,
    is_file,
    is_there,
    names_in,
    parse,
    read_json,
    read_regular_file,
    reading,
    reading_error,
    write_json,
)
from mlperf_bert.run.outcome import Status
from mlperf_bert.vocabulary.word_pieces import VOCABULARY_FILES

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
STATE = "state.json"
MODEL = "model.safetensors"
FP8 = "fp8.safetensors"
RANK_STATES = "rank_states.safetensors"
FP8_UNIT = "fp8."  # prefix of the names of FP8 scales in RANK_STATES
LATEST = "LATEST"
SHARDS = "optimizer/"  # prefix of the names of the optimizer's files
OF_A_RUN = "checkpoints"  # name of this directory in a run's directory
INITIALIZED_FROM = "initialized_from"
ELSE = "use another checkpoint"
REPLACED = "replaced"  # marks a checkpoint until its replacement of the same step is complete

_NAMES = frozenset((MODEL, STATE, FP8, RANK_STATES, *VOCABULARY_FILES))  # at most one vocabulary
_SHARD_NAME = re.compile(r"optimizer/rank_\d{5}\.safetensors")
_STEP_NAME = re.compile(r"step_\d{8,19}")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """The size in bytes and the SHA-256 digest (in hex) of one file of a checkpoint."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The contents of `manifest.json`, the last file of a checkpoint to be written.

    `config` contains the tables of the run's config before parsing. `read_config` parses them.
    `origin` is empty except in two cases. In a checkpoint of converted weights `origin` describes
    their source (huggingface/conversion.py). In a checkpoint of a run that started from converted
    weights, or from the training state of another run, `origin` describes these weights or this
    state under the key INITIALIZED_FROM.
    """

    step: int
    samples: int
    vocabulary_sha256: str
    version: str  # of this package
    commit: str | None
    config: Mapping[str, Any]
    files: Mapping[str, FileEntry]
    origin: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_converted(self) -> bool:
        """True if the checkpoint has weights of another program, and no training state."""
        return bool(self.origin) and INITIALIZED_FROM not in self.origin

    def to_json(self) -> bytes:
        """Return the contents of `manifest.json`."""
        values = {"format_version": FORMAT_VERSION, **asdict(self)}
        if not self.origin:
            del values["origin"]
        return write_json(values)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointState:
    """The progress and identity of a run when its checkpoint was written (`state.json`).

    `step` also gives the position in the data order, because a batch depends only on the step and
    the seed.
    """

    step: int
    samples: int
    seed: int
    mlm_accuracy: float | None  # 0 .. 1, of these weights, or None if it was not measured
    vocabulary_sha256: str
    data_sha256: str = "unknown"  # digest of the manifests of both sets
    blocks_sha256: str | None = None  # digest of large sets' shards (data/set_checks.py)
    world_size: int = 1
    ended: Status | None = None  # the outcome if the run is over
    seconds: float = 0.0  # of training, over all attempts
    skipped_in_a_row: int = 0  # consecutive skipped steps, up to and including this one
    # What "auto" in the config meant on the run's machine. Checkpoints from before 2026-11-28 have
    # None.
    attention: AttentionName | None = None
    kernels: KernelsName | None = None

    def to_json(self) -> bytes:
        """Return the contents of `state.json`."""
        return write_json(asdict(self))


def step_directory(directory: Path, step: int) -> Path:
    """Return the path of the checkpoint that is written after `step`."""
    return directory / f"step_{step:08d}"


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint, or -1 if `path` has another kind of name."""
    return int(path.name.removeprefix("step_")) if _STEP_NAME.fullmatch(path.name) else -1


def named_checkpoints(directory: Path) -> list[Path]:
    """Return the paths in `directory` that are named like checkpoints, newest first.

    The checkpoints may be incomplete or damaged. Raises UnreadableError if the file system fails.
    """
    found = [directory / name for name in names_in(directory) if _STEP_NAME.fullmatch(name)]
    return sorted(found, key=step_of, reverse=True)


def complete_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints in `directory`, newest first.

    A checkpoint is complete if it has a manifest. The function does not check digests. Raises
    UnreadableError if the file system fails.
    """
    return [path for path in named_checkpoints(directory) if is_file(path / MANIFEST)]


def has_had_checkpoints(directory: Path) -> bool:
    """Return True if `directory` has ever had a complete checkpoint.

    The checkpoint may still be there, may have been renamed because it is damaged, or may be lost.
    Raises UnreadableError if the file system fails.
    """
    return any(
        name == LATEST or ("step_" in name and not name.endswith(".partial"))
        for name in names_in(directory)
    )


def resolve(directory: Path) -> Path:
    """Return `directory` if it is a checkpoint, or the checkpoint that its file LATEST names.

    Raises CheckpointError if neither is a checkpoint. Raises UnreadableError if a file cannot be
    read.
    """
    if is_file(directory / MANIFEST):
        return directory
    name = read_latest(directory / LATEST)
    if name is None:
        remedy = _instead_of(directory)
        check_directory(directory, remedy)
        problem = f"is not a checkpoint, because it has neither {MANIFEST} nor {LATEST}"
        raise CheckpointError(str(directory), problem, remedy)
    if not _STEP_NAME.fullmatch(name) or not is_file(directory / name / MANIFEST):
        problem = f"contains {in_brief(name)}, which is not a checkpoint"
        remedy = "pass one of the step_* directories next to this file"
        raise CheckpointError(str(directory / LATEST), problem, remedy)
    return directory / name


def checkpoints_inside(directory: Path) -> Path | None:
    """Return the checkpoints of the run, or of the last phase with any, in a directory, or None."""
    found = [directory]
    for folder in (directory, directory / "run"):
        runs = [name for name in names_in(folder) if re.fullmatch(r"run_[0-9]+", name)]
        runs.sort(key=lambda name: int(name[4:]), reverse=True)
        found += [folder / name for name in runs]
    return next((each / OF_A_RUN for each in found if is_file(each / OF_A_RUN / LATEST)), None)


def _instead_of(directory: Path) -> str:
    """Return a remedy that says what to pass instead of a path that is not a checkpoint."""
    inside = checkpoints_inside(directory)
    if inside is not None:
        return f"pass {inside}"
    command = typed("convert", directory, "--from", "huggingface", "--out", "NEW")
    if is_file(directory / "config.json"):
        return f"convert it with `{command}`, and pass NEW"
    if HUB_NAME.fullmatch(str(directory)) and not is_there(directory):
        return f"{A_CHECKPOINT} (for the published model of this name, `{command}`)"
    return A_CHECKPOINT


def read_latest(path: Path) -> str | None:
    """Return the name of the checkpoint in a file LATEST, or None if it is missing or malformed."""
    try:
        return read_regular_file(path, 100).decode("ascii").strip()
    except UnicodeDecodeError:
        return None
    except OSError as error:
        found = reading_error(path, error, missing="", remedy="")
        if isinstance(found, UnreadableError):
            raise found from None
        return None


def read_manifest(directory: Path) -> Manifest:
    """Parse the manifest of the checkpoint in `directory`.

    Raises CheckpointError if the manifest is missing or damaged, and UnreadableError if it cannot
    be read.
    """
    path = directory / MANIFEST
    with _as_damage():
        values = read_json(path, missing="no such file", remedy=ELSE)
        with reading(path, ELSE):
            check_version(values, FORMAT_VERSION)
            files = {name: FileEntry(**entry) for name, entry in values["files"].items()}
            for name in files:
                if name not in _NAMES and not _SHARD_NAME.fullmatch(name):
                    raise ValueError(f"{in_brief(name)} is not the name of a checkpoint's file")
            return parse(Manifest, values, files=files)


@contextmanager
def _as_damage() -> Iterator[None]:
    """Convert a DataError that is raised in the `with` block into a CheckpointError.

    An UnreadableError is not converted, because a file that cannot be read may be undamaged.
    """
    try:
        yield
    except UnreadableError:
        raise
    except DataError as error:
        raise CheckpointError(*error.args) from None


def read_config(directory: Path) -> RunConfig:
    """Parse the config in the manifest of a checkpoint, or of the latest one in `directory`."""
    found = resolve(directory)
    return config_from_tables(read_manifest(found).config, str(found / MANIFEST))


def verify_files(directory: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Check that each named file exists and has the size and the digest in the manifest.

    Raises CheckpointError if a file is missing or differs, and UnreadableError if a file cannot be
    read.
    """
    for name in names:
        path, entry = directory / name, manifest.files.get(name)
        if entry is None:
            raise CheckpointError(str(path), "is not listed in the manifest", ELSE)
        with _as_damage():
            try:
                is_same = path.stat().st_size == entry.size and file_sha256(path) == entry.sha256
            except OSError as error:
                raise reading_error(path, error, missing="no such file", remedy=ELSE) from None
        if not is_same:
            problem = "is damaged, because its size or digest differs from the manifest's"
            raise CheckpointError(str(path), problem, ELSE)


def read_state(directory: Path) -> CheckpointState:
    """Parse the state of a checkpoint, and check that it belongs to this checkpoint.

    Raises CheckpointError if the state is missing or damaged, or if it belongs to another
    checkpoint. Raises UnreadableError if a file cannot be read.
    """
    manifest = read_manifest(directory)
    path = directory / STATE
    with _as_damage():
        values = read_json(path, missing="no such file", remedy=ELSE)
        with reading(path, ELSE):
            state = parse(CheckpointState, values)
    same = (manifest.step, manifest.samples, manifest.vocabulary_sha256)
    is_named_so = step_of(directory) in (-1, state.step)
    if (state.step, state.samples, state.vocabulary_sha256) != same or not is_named_so:
        raise CheckpointError(str(path), "belongs to another checkpoint", ELSE)
    return state


def verify(directory: Path) -> CheckpointState:
    """Check every file of a checkpoint that a run wrote, and return the checkpoint's state.

    Raises CheckpointError if a file is missing or damaged, or if the checkpoint has converted
    weights. Raises UnreadableError if a file cannot be read.
    """
    manifest = read_manifest(directory)
    if manifest.is_converted:
        problem = "has converted weights and no training state, so no run can resume from it"
        remedy = "pass it as --init-checkpoint instead of --resume"
        raise CheckpointError(str(directory), problem, remedy)
    verify_files(directory, manifest, {STATE, MODEL, RANK_STATES, *manifest.files})
    return read_state(directory)


def prune(directory: Path, keep_last: int) -> None:
    """Remove all complete checkpoints in `directory` except the newest `keep_last`."""
    for path in complete_checkpoints(directory)[keep_last:]:
        discard(path)


def put_aside(directory: Path, last_step: int) -> None:
    """Rename the checkpoints after `last_step`, the step that a run resumes from.

    The run skipped these checkpoints because they are damaged, so they must not count among the
    newest checkpoints, which are kept.
    """
    for path in named_checkpoints(directory):
        if step_of(path) > last_step:
            move_aside(path, "damaged")


def move_aside(path: Path, word: str) -> Path:
    """Rename a checkpoint to `<word>_step_...`, and return its new path.

    If that name exists, a number is appended.
    """
    first = aside = path.with_name(f"{word}_{path.name}")
    number = 0
    while is_there(aside):
        number += 1
        aside = first.with_name(f"{first.name}_{number}")
    path.rename(aside)
    return aside


def bring_back(directory: Path) -> None:
    """Rename each replaced checkpoint back to its old name if the replacement is missing.

    A replacement is missing if the writer was killed before the replacement was complete. Raises
    UnreadableError if the file system fails.
    """
    for name in names_in(directory):
        path = directory / name.removeprefix(f"{REPLACED}_")
        if path.name != name and step_of(path) >= 0 and not is_there(path):
            try:
                (directory / name).rename(path)
            except OSError as error:
                raise reading_error(path, error, missing="no such file", remedy="") from None


def sweep(directory: Path) -> None:
    """Remove unfinished and replaced checkpoints that killed writers left in `directory`."""
    for path in directory.glob(".step_*"):
        if path.name.endswith((".partial", ".removed")):
            shutil.rmtree(path, ignore_errors=True)
    for path in directory.glob(f"{REPLACED}_step_*"):
        if is_there(directory / path.name.removeprefix(f"{REPLACED}_")):
            shutil.rmtree(path, ignore_errors=True)


def discard(path: Path) -> None:
    """Remove a checkpoint, which may be incomplete.

    The directory is renamed first, so that no other process finds a checkpoint with missing files.
    """
    removed = path if path.name.startswith(".") else path.with_name(f".{path.name}.removed")
    if removed != path:
        shutil.rmtree(removed, ignore_errors=True)
        path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)
