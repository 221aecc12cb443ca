"""Contents of a checkpoint directory, its verification, and the pruning of a run's checkpoints.

It needs no torch. Names have a fixed form, so none can lead elsewhere, and a file is used only if
its digest is the manifest's. A checkpoint is renamed before it is removed, so none is ever half
there.
"""

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlperf_bert.config.files import config_from_tables
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import AttentionName, KernelsName
from mlperf_bert.errors import CheckpointError, DataError, UnreadableError
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
FP8_UNIT = "fp8."  # prefix of names in it
LATEST = "LATEST"
SHARDS = "optimizer/"  # prefix of the names of the optimizer's files
OF_A_RUN = "checkpoints"  # name of the directory in a run's directory
INITIALIZED_FROM = "initialized_from"
ELSE = "use another checkpoint"
REPLACED = "replaced"  # marks a checkpoint until its replacement of the same step is complete

# Settings of before 2026-11-28 that told with which weights and data a run was to start: any value.
_OF_A_START = (("run", "init_checkpoint_sha256"), ("data", "dupe_factor"))
_NAMES = frozenset((MODEL, STATE, FP8, RANK_STATES, *VOCABULARY_FILES))  # one vocabulary at most
_SHARD_NAME = re.compile(r"optimizer/rank_\d{5}\.safetensors")
_STEP_NAME = re.compile(r"step_\d{8,19}")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a checkpoint: bytes and digest."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """`manifest.json`, written last; `config` is the unparsed text, see `read_config`.

    `origin` gives the source of converted weights (huggingface/conversion.py); a run that begins
    with them keeps it under INITIALIZED_FROM, where a phase also names the state that it began
    with. In other runs it is empty.
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
        """True if it holds another program's weights, and no run."""
        return bool(self.origin) and INITIALIZED_FROM not in self.origin

    def to_json(self) -> bytes:
        """The file's contents."""
        values = {"format_version": FORMAT_VERSION, **asdict(self)}
        if not self.origin:
            del values["origin"]
        return write_json(values)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointState:
    """The state of a run in a checkpoint.

    `step` is the sampler's position, because batches are a function of step and seed.
    """

    step: int
    samples: int
    seed: int
    mlm_accuracy: float | None  # 0 .. 1, of these weights, if known
    vocabulary_sha256: str
    data_sha256: str = "unknown"  # of both sets' manifests
    blocks_sha256: str | None = None  # of a large pair's shards (data/set_checks.py)
    world_size: int = 1
    ended: Status | None = None  # the outcome, if the run is over
    seconds: float = 0.0  # of training, over all attempts
    skipped_in_a_row: int = 0  # steps up to this one
    # What "auto" in the config became on the machine of the run; None before 2026-11-28.
    attention: AttentionName | None = None
    kernels: KernelsName | None = None

    def to_json(self) -> bytes:
        """The file's contents."""
        return write_json(asdict(self))


def step_directory(directory: Path, step: int) -> Path:
    """The directory of the checkpoint after `step`."""
    return directory / f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The step in a checkpoint's name; -1 for another name."""
    return int(path.name.removeprefix("step_")) if _STEP_NAME.fullmatch(path.name) else -1


def named_checkpoints(directory: Path) -> list[Path]:
    """All entries of `directory` with a checkpoint's name, the newest first.

    Raises UnreadableError.
    """
    found = [directory / name for name in names_in(directory) if _STEP_NAME.fullmatch(name)]
    return sorted(found, key=step_of, reverse=True)


def complete_checkpoints(directory: Path) -> list[Path]:
    """The complete ones among them; digests are not checked. Raises UnreadableError."""
    return [path for path in named_checkpoints(directory) if is_file(path / MANIFEST)]


def has_had_checkpoints(directory: Path) -> bool:
    """True if `directory` ever had a complete checkpoint: here, put aside, or lost.

    Raises UnreadableError.
    """
    return any(
        name == LATEST or ("step_" in name and not name.endswith(".partial"))
        for name in names_in(directory)
    )


def resolve(directory: Path) -> Path:
    """Return `directory` if it is a checkpoint, else the checkpoint that its LATEST names.

    Raises CheckpointError, UnreadableError.
    """
    if is_file(directory / MANIFEST):
        return directory
    name = _latest(directory / LATEST)
    if name is None:
        problem = f"holds no {MANIFEST} and no {LATEST}"
        remedy = "give a checkpoint directory (of other programs' weights: mlperf_bert convert)"
        if is_file(directory / OF_A_RUN / LATEST):
            remedy = f"give {directory / OF_A_RUN}"
        raise CheckpointError(str(directory), problem, remedy)
    if not _STEP_NAME.fullmatch(name) or not is_file(directory / name / MANIFEST):
        problem = f"names {in_brief(name)}, not a checkpoint"
        raise CheckpointError(str(directory / LATEST), problem, "give one of its steps")
    return directory / name


def _latest(path: Path) -> str | None:
    """The name in a LATEST file; None if there is no such file."""
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
    """Parse a checkpoint's manifest.

    Raises CheckpointError if anything is wrong with it, UnreadableError if it cannot be read.
    """
    path = directory / MANIFEST
    with _as_damage():
        values = read_json(path, missing="is missing", remedy=ELSE)
        with reading(path, ELSE):
            check_version(values, FORMAT_VERSION)
            files = {name: FileEntry(**entry) for name, entry in values["files"].items()}
            for name in files:
                if name not in _NAMES and not _SHARD_NAME.fullmatch(name):
                    raise ValueError(f"{in_brief(name)} is no file of a checkpoint")
            return parse(Manifest, values, files=files)


@contextmanager
def _as_damage() -> Iterator[None]:
    """Turn other DataErrors about a file into a CheckpointError; keep an UnreadableError."""
    try:
        yield
    except UnreadableError:
        raise
    except DataError as error:
        raise CheckpointError(*error.args) from None


def read_config(directory: Path) -> RunConfig:
    """The config of a checkpoint, or of a directory's LATEST one."""
    found = resolve(directory)
    tables = {
        section: {key: value for key, value in table.items() if (section, key) not in _OF_A_START}
        for section, table in read_manifest(found).config.items()
    }
    return config_from_tables(tables, str(found / MANIFEST))


def verify_files(directory: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise CheckpointError unless each named file exists with its size and digest.

    Raises UnreadableError if a file cannot be read.
    """
    for name in names:
        path, entry = directory / name, manifest.files.get(name)
        if entry is None:
            raise CheckpointError(str(path), "is missing", ELSE)
        with _as_damage():
            try:
                is_same = path.stat().st_size == entry.size and file_sha256(path) == entry.sha256
            except OSError as error:
                raise reading_error(path, error, missing="is missing", remedy=ELSE) from None
        if not is_same:
            raise CheckpointError(str(path), "differs from its digest", ELSE)


def read_state(directory: Path) -> CheckpointState:
    """Parse a checkpoint's state, and compare it with the manifest.

    Raises CheckpointError, UnreadableError.
    """
    manifest = read_manifest(directory)
    path = directory / STATE
    with _as_damage():
        values = read_json(path, missing="is missing", remedy=ELSE)
        with reading(path, ELSE):
            state = parse(CheckpointState, values)
    same = (manifest.step, manifest.samples, manifest.vocabulary_sha256)
    is_named_so = step_of(directory) in (-1, state.step)
    if (state.step, state.samples, state.vocabulary_sha256) != same or not is_named_so:
        raise CheckpointError(str(path), "is of another checkpoint", ELSE)
    return state


def verify(directory: Path) -> CheckpointState:
    """Check every file of a run's checkpoint; return its state.

    Raises CheckpointError, UnreadableError.
    """
    manifest = read_manifest(directory)
    if manifest.is_converted:
        problem, remedy = "holds converted weights, no run to continue", "use --init-checkpoint"
        raise CheckpointError(str(directory), problem, remedy)
    verify_files(directory, manifest, {STATE, MODEL, RANK_STATES, *manifest.files})
    return read_state(directory)


def prune(directory: Path, keep_last: int) -> None:
    """Remove all checkpoints but the newest `keep_last`."""
    for path in complete_checkpoints(directory)[keep_last:]:
        discard(path)


def put_aside(directory: Path, last_step: int) -> None:
    """Rename checkpoints after the step from which a run continued, because it skipped them.

    They are damaged, and must not count among the newest.
    """
    for path in named_checkpoints(directory):
        if step_of(path) > last_step:
            move_aside(path, "damaged")


def move_aside(path: Path, word: str) -> Path:
    """Rename a checkpoint to `<word>_step_...`, with a number if that name is taken."""
    first = aside = path.with_name(f"{word}_{path.name}")
    number = 0
    while is_there(aside):
        number += 1
        aside = first.with_name(f"{first.name}_{number}")
    path.rename(aside)
    return aside


def bring_back(directory: Path) -> None:
    """Give a checkpoint its name back if its replacement is missing.

    That happens when the writer was killed. Raises UnreadableError.
    """
    for name in names_in(directory):
        path = directory / name.removeprefix(f"{REPLACED}_")
        if path.name != name and step_of(path) >= 0 and not is_there(path):
            try:
                (directory / name).rename(path)
            except OSError as error:
                raise reading_error(path, error, missing="is missing", remedy="") from None


def sweep(directory: Path) -> None:
    """Remove files of killed writers."""
    for path in directory.glob(".step_*"):
        if path.name.endswith((".partial", ".removed")):
            shutil.rmtree(path, ignore_errors=True)


def discard(path: Path) -> None:
    """Remove a checkpoint, or an unfinished one."""
    removed = path if path.name.startswith(".") else path.with_name(f".{path.name}.removed")
    if removed != path:
        shutil.rmtree(removed, ignore_errors=True)
        path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)
