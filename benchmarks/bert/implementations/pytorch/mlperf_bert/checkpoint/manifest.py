"""What is in a checkpoint directory, and whether it is whole: names, manifest, digests.

No torch. Everything read is taken for hostile: names are of a fixed form, so that none can lead
elsewhere, sizes are bounded, and a file is used only where its digest is the manifest's.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlperf_bert.common.errors import CheckpointError, DataError, UnreadableError, UserError
from mlperf_bert.common.records import Record, read_record, write_json
from mlperf_bert.common.untrusted import (
    file_sha256,
    in_brief,
    is_file,
    names_in,
    read_regular_file,
    reading_error,
)
from mlperf_bert.config.files import config_from_tables
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.vocabulary.word_pieces import VOCABULARY_FILES

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
STATE = "state.json"
MODEL = "model.safetensors"
FP8 = "fp8.safetensors"
RANK_STATES = "rank_states.safetensors"
LATEST = "LATEST"
OF_A_RUN = "checkpoints"  # the directory in a run's
INITIALIZED_FROM = "initialized_from"
ELSE = "use another checkpoint"

_NAMES = frozenset((MODEL, STATE, FP8, RANK_STATES, *VOCABULARY_FILES))  # one vocabulary at most
# Whose weights a file of such a name tells of.
_OF_OTHERS = (("huggingface", "config.json"), ("tensorflow", "*.ckpt*.index"))
_SHARD_NAME = re.compile(r"optimizer/rank_\d{5}\.safetensors")
_STEP_NAME = re.compile(r"step_\d{8,19}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a checkpoint: bytes and digest."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """`manifest.json`, written last; `config` is as it stands there, see `read_config`.

    `origin` says where converted weights came from (convert/convert.py); a run that begins with
    them keeps that under INITIALIZED_FROM, other runs leave it empty.
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
        """Whether it holds another program's weights, and no run."""
        return bool(self.origin) and INITIALIZED_FROM not in self.origin

    def to_json(self) -> bytes:
        """The file's contents."""
        values = asdict(self) | {"config": dict(self.config)}
        if not self.origin:
            del values["origin"]
        values["files"] = {name: asdict(entry) for name, entry in self.files.items()}
        return write_json({"format_version": FORMAT_VERSION, **values})


def step_directory(directory: Path, step: int) -> Path:
    """Where the checkpoint after `step` belongs."""
    return directory / f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The step in a checkpoint's name; -1 where it is no such name."""
    return int(path.name.removeprefix("step_")) if _STEP_NAME.fullmatch(path.name) else -1


def named_checkpoints(directory: Path) -> list[Path]:
    """All in `directory` that have a checkpoint's name, the newest first.

    Raises UnreadableError.
    """
    found = [directory / name for name in names_in(directory) if _STEP_NAME.fullmatch(name)]
    return sorted(found, key=step_of, reverse=True)


def complete_checkpoints(directory: Path) -> list[Path]:
    """Those of them that were written to their end; digests not read. Raises UnreadableError."""
    return [path for path in named_checkpoints(directory) if is_file(path / MANIFEST)]


def has_had_checkpoints(directory: Path) -> bool:
    """Whether any was ever complete in `directory`: it may be there, put aside, or lost.

    Raises UnreadableError.
    """
    return any(
        name == LATEST or ("step_" in name and not name.endswith(".partial"))
        for name in names_in(directory)
    )


def resolve(directory: Path) -> Path:
    """`directory`, where it is a checkpoint, or the one that its LATEST names.

    Raises CheckpointError, UnreadableError.
    """
    if is_file(directory / MANIFEST):
        return directory
    name = _latest(directory / LATEST)
    if name is None:
        problem = f"holds no {MANIFEST} and no {LATEST}"
        raise CheckpointError(str(directory), problem, _likely_remedy(directory))
    if not _STEP_NAME.fullmatch(name) or not is_file(directory / name / MANIFEST):
        problem = f"names {in_brief(name)}, not a checkpoint"
        raise CheckpointError(str(directory / LATEST), problem, "give one of its steps")
    return directory / name


def _latest(path: Path) -> str | None:
    """What a LATEST says; None where it is none."""
    try:
        return read_regular_file(path, 100).decode("ascii").strip()
    except UnicodeDecodeError:
        return None
    except OSError as error:
        found = reading_error(path, error, missing="", remedy="")
        if isinstance(found, UnreadableError):
            raise found from None
        return None


def _likely_remedy(directory: Path) -> str:
    """What to do about a directory that is no checkpoint, by what else it may be."""
    within = directory / OF_A_RUN
    if is_file(within / LATEST):
        return f"give {within}"
    for form, pattern in _OF_OTHERS:
        if next(directory.glob(pattern), None) is not None:
            return f"make one of it: mlperf_bert convert --from {form} {directory} --out NEW"
    return "give a checkpoint directory"


def read_manifest(directory: Path) -> Manifest:
    """Parse a checkpoint's manifest.

    Raises CheckpointError where anything is wrong with it, UnreadableError where nobody can say.
    """
    try:
        record = read_record(directory / MANIFEST, missing="is missing", remedy=ELSE)
        record.check_version(FORMAT_VERSION)
        files = record.record("files")
        for name in files.values:
            if name not in _NAMES and not _SHARD_NAME.fullmatch(name):
                raise files.error(in_brief(name), "is no file of a checkpoint")
        return Manifest(
            step=record.integer("step"),
            samples=record.integer("samples"),
            vocabulary_sha256=record.text("vocabulary_sha256"),
            version=record.text("version"),
            commit=record.text("commit") if record.has("commit") else None,
            config=record.record("config").values,
            files={name: _file_entry(files.record(name)) for name in files.values},
            origin=_origin(record),
        )
    except DataError as error:
        raise as_damage(error) from None


def as_damage(error: DataError) -> UserError:
    """A CheckpointError of what was found in a file; an UnreadableError stays what it is."""
    return error if isinstance(error, UnreadableError) else CheckpointError(*error.args)


def read_config(directory: Path) -> RunConfig:
    """The config that a checkpoint, or the LATEST one of a directory, was made with."""
    found = resolve(directory)
    return config_from_tables(read_manifest(found).config, str(found / MANIFEST))


def verify_files(directory: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise CheckpointError unless each named file is there with its size and digest.

    Raises UnreadableError where nobody can say.
    """
    for name in names:
        path, entry = directory / name, manifest.files.get(name)
        if entry is None:
            raise CheckpointError(str(path), "is missing", ELSE)
        try:
            is_same = path.stat().st_size == entry.size and file_sha256(path) == entry.sha256
        except OSError as error:
            raise as_damage(reading_error(path, error, missing="is missing", remedy=ELSE)) from None
        if not is_same:
            raise CheckpointError(str(path), "differs from its digest", ELSE)


def _origin(record: Record) -> dict[str, str]:
    if not record.has("origin"):
        return {}
    origin = record.record("origin")
    return {name: origin.text(name) for name in origin.values}


def _file_entry(record: Record) -> FileEntry:
    sha256 = record.text("sha256")
    if not _SHA256.fullmatch(sha256):
        raise record.error("sha256", f"is {in_brief(sha256)}, not a digest")
    return FileEntry(record.integer("size"), sha256)
