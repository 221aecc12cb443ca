"""Contents of a checkpoint directory, its verification, and the pruning of a run's checkpoints.

This module does not import torch. File names have a fixed form, so that none can lead to another
directory, and a file is used only if its digest equals the manifest's. A checkpoint is renamed
before it is removed, so that no other process ever finds an incomplete one.
"""

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlperf_bert.checkpoint.weights_directory import A_CHECKPOINT, check_directory
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

# Settings that checkpoints from before 2026-11-28 have, for the weights and data of the start. They
# are ignored.
_OF_A_START = (("run", "init_checkpoint_sha256"), ("data", "dupe_factor"))
_NAMES = frozenset((MODEL, STATE, FP8, RANK_STATES, *VOCABULARY_FILES))  # at most one vocabulary
_SHARD_NAME = re.compile(r"optimizer/rank_\d{5}\.safetensors")
_STEP_NAME = re.compile(r"step_\d{8,19}")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """The size in bytes and the hex digest of a file of a checkpoint."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The contents of `manifest.json`, which is written last.

    `config` has the unparsed tables of the run's config, which `read_config` parses. `origin` is
    empty except in two cases. For converted weights it names their source
    (huggingface/conversion.py). A run that starts from converted weights, or from the training
    state of another run, names them under INITIALIZED_FROM.
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
        """True if the checkpoint has another program's weights and no training state."""
        return bool(self.origin) and INITIALIZED_FROM not in self.origin

    def to_json(self) -> bytes:
        """Return the contents of the file."""
        values = {"format_version": FORMAT_VERSION, **asdict(self)}
        if not self.origin:
            del values["origin"]
        return write_json(values)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointState:
    """The state of a run in a checkpoint.

    `step` is also the position of the sampler, because a batch is a function of step and seed.
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
        """Return the contents of the file."""
        return write_json(asdict(self))


def step_directory(directory: Path, step: int) -> Path:
    """Return the directory of the checkpoint after `step`."""
    return directory / f"step_{step:08d}"


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name, or -1 if it is not a checkpoint's name."""
    return int(path.name.removeprefix("step_")) if _STEP_NAME.fullmatch(path.name) else -1


def named_checkpoints(directory: Path) -> list[Path]:
    """Return the entries of `directory` that have a checkpoint's name, with the newest first.

    Raises UnreadableError.
    """
    found = [directory / name for name in names_in(directory) if _STEP_NAME.fullmatch(name)]
    return sorted(found, key=step_of, reverse=True)


def complete_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints of `directory`, with the newest first.

    A checkpoint is complete if it has a manifest. Digests are not checked. Raises UnreadableError.
    """
    return [path for path in named_checkpoints(directory) if is_file(path / MANIFEST)]


def has_had_checkpoints(directory: Path) -> bool:
    """Return True if `directory` has ever had a complete checkpoint.

    The checkpoint may still be there, may have been put aside, or may be lost. Raises
    UnreadableError.
    """
    return any(
        name == LATEST or ("step_" in name and not name.endswith(".partial"))
        for name in names_in(directory)
    )


def resolve(directory: Path) -> Path:
    """Return `directory` if it is a checkpoint, and otherwise the one that its LATEST names.

    Raises CheckpointError if there is neither, and UnreadableError if a file cannot be read.
    """
    if is_file(directory / MANIFEST):
        return directory
    name = _latest(directory / LATEST)
    if name is None:
        check_directory(directory, A_CHECKPOINT)
        problem = f"is not a checkpoint, because it has neither {MANIFEST} nor {LATEST}"
        raise CheckpointError(str(directory), problem, _instead_of(directory))
    if not _STEP_NAME.fullmatch(name) or not is_file(directory / name / MANIFEST):
        problem = f"names {in_brief(name)}, which is not a checkpoint"
        remedy = "pass one of the step directories next to it"
        raise CheckpointError(str(directory / LATEST), problem, remedy)
    return directory / name


def _instead_of(directory: Path) -> str:
    """Say what to pass instead of an existing directory that is not a checkpoint."""
    for inside in (OF_A_RUN, f"run_0/{OF_A_RUN}", f"run/run_0/{OF_A_RUN}"):
        if is_file(directory / inside / LATEST):
            return f"pass {directory / inside}"
    if is_file(directory / "config.json"):
        command = typed("convert", directory, "--from", "huggingface", "--out", "NEW")
        return f"convert it with `{command}`, and pass NEW"
    return A_CHECKPOINT


def _latest(path: Path) -> str | None:
    """Return the name in a LATEST file, or None if there is no such file."""
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
    """Parse the manifest of a checkpoint.

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
    """Turn a DataError about a file into a CheckpointError, unless it is an UnreadableError."""
    try:
        yield
    except UnreadableError:
        raise
    except DataError as error:
        raise CheckpointError(*error.args) from None


def read_config(directory: Path) -> RunConfig:
    """Parse the config of a checkpoint, or of the latest checkpoint in a directory."""
    found = resolve(directory)
    tables = {
        section: {key: value for key, value in table.items() if (section, key) not in _OF_A_START}
        for section, table in read_manifest(found).config.items()
    }
    return config_from_tables(tables, str(found / MANIFEST))


def verify_files(directory: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Check that the named files exist, with the sizes and digests in the manifest.

    Raises CheckpointError if one does not, and UnreadableError if a file cannot be read.
    """
    for name in names:
        path, entry = directory / name, manifest.files.get(name)
        if entry is None:
            raise CheckpointError(str(path), "is not in the manifest", ELSE)
        with _as_damage():
            try:
                is_same = path.stat().st_size == entry.size and file_sha256(path) == entry.sha256
            except OSError as error:
                raise reading_error(path, error, missing="no such file", remedy=ELSE) from None
        if not is_same:
            problem = "is damaged, because its size or digest differs from the manifest's"
            raise CheckpointError(str(path), problem, ELSE)


def read_state(directory: Path) -> CheckpointState:
    """Parse the state of a checkpoint, and check that it fits the manifest.

    Raises CheckpointError and UnreadableError.
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
    """Check every file of a run's checkpoint, and return its state.

    Raises CheckpointError and UnreadableError.
    """
    manifest = read_manifest(directory)
    if manifest.is_converted:
        problem = "has converted weights and no training state, so no run can resume from it"
        remedy = "pass it as --init-checkpoint instead of --resume"
        raise CheckpointError(str(directory), problem, remedy)
    verify_files(directory, manifest, {STATE, MODEL, RANK_STATES, *manifest.files})
    return read_state(directory)


def prune(directory: Path, keep_last: int) -> None:
    """Remove all checkpoints except the newest `keep_last`."""
    for path in complete_checkpoints(directory)[keep_last:]:
        discard(path)


def put_aside(directory: Path, last_step: int) -> None:
    """Rename the checkpoints after the step that a run resumed from.

    The run skipped these checkpoints because they are damaged, so they must not count among the
    newest.
    """
    for path in named_checkpoints(directory):
        if step_of(path) > last_step:
            move_aside(path, "damaged")


def move_aside(path: Path, word: str) -> Path:
    """Rename a checkpoint to `<word>_step_...`, with a number appended if that name exists."""
    first = aside = path.with_name(f"{word}_{path.name}")
    number = 0
    while is_there(aside):
        number += 1
        aside = first.with_name(f"{first.name}_{number}")
    path.rename(aside)
    return aside


def bring_back(directory: Path) -> None:
    """Restore the name of a replaced checkpoint if its replacement is missing.

    The replacement is missing if the writer was killed. Raises UnreadableError.
    """
    for name in names_in(directory):
        path = directory / name.removeprefix(f"{REPLACED}_")
        if path.name != name and step_of(path) >= 0 and not is_there(path):
            try:
                (directory / name).rename(path)
            except OSError as error:
                raise reading_error(path, error, missing="no such file", remedy="") from None


def sweep(directory: Path) -> None:
    """Remove the unfinished checkpoints that killed writers left."""
    for path in directory.glob(".step_*"):
        if path.name.endswith((".partial", ".removed")):
            shutil.rmtree(path, ignore_errors=True)


def discard(path: Path) -> None:
    """Remove a checkpoint, whether it is complete or not."""
    removed = path if path.name.startswith(".") else path.with_name(f".{path.name}.removed")
    if removed != path:
        shutil.rmtree(removed, ignore_errors=True)
        path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)
