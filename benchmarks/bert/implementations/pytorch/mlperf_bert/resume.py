"""Where a run begins: at its first step, or where it or another was saved."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from mlperf_bert.checkpoint.manifest import (
    STATE,
    CheckpointState,
    complete_checkpoints,
    read_config,
    read_manifest,
    read_state,
    resolve,
    verify,
    verify_files,
)
from mlperf_bert.config import RunConfig
from mlperf_bert.data.records import read_record
from mlperf_bert.errors import CheckpointError, ConfigError, DataError
from mlperf_bert.run_directory import RunDirectory

# What decides which samples a step trains on, and the shapes of all that is saved.
_FIXED = {
    "model.vocab_size",
    "model.hidden_size",
    "model.num_layers",
    "model.num_heads",
    "model.intermediate_size",
    "model.max_position_embeddings",
    "model.type_vocab_size",
    "data.corpus",
    "data.max_seq_length",
    "data.max_predictions",
    "data.dupe_factor",
    "data.sampler",
    "data.quantiles",
}
# What has a say in the numbers that a step computes; all else may differ at any time.
_EXACT = {"model", "optim", "schedule", "clip"}
_WHO_COMPUTES = {"model.attention", "model.kernels", "model.head", "optim.implementation"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a run that is not to be gone on with had ended."""

    status: Literal["success", "aborted"]
    steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Where a run begins.

    `continues` the run of its own directory; `seed` where that is known already; `remarks` are for
    the person who started it.
    """

    checkpoint: Path | None = None
    state: CheckpointState | None = None
    continues: bool = False
    seed: int | None = None
    remarks: tuple[str, ...] = ()
    ended: Ended | None = None

    @property
    def step(self) -> int:
        """The last step that was made."""
        return 0 if self.state is None else self.state.step

    @property
    def samples(self) -> int:
        """Sequences that were trained."""
        return 0 if self.state is None else self.state.samples


def find_start(resume: str, directory: RunDirectory, config: RunConfig) -> Start:
    """What `--resume` means here: "none", "auto", or a directory with a checkpoint.

    Reads every byte of the checkpoint that "auto" chooses: one that is damaged is passed over.
    Raises CheckpointError or ConfigError where the run cannot go on from what was asked for.
    """
    if resume == "none":
        return Start()
    if resume != "auto":
        return _from_elsewhere(Path(resume), config)
    if not directory.exists:
        return Start()
    start = _newest_of(directory)
    if start.state is not None:
        _check(start.state, read_config(start.checkpoint or directory.checkpoints), config)
    return start


def check_data(start: Start, data_sha256: str, data_dir: Path) -> None:
    """Raise CheckpointError unless the training set is the one that the checkpoint was made on."""
    if start.state is not None and start.state.data_sha256 != data_sha256:
        problem = f"was made on another training set than that of {data_dir}"
        raise CheckpointError(
            str(start.checkpoint), problem, "give that one, or begin anew with --init-checkpoint"
        )


def _newest_of(directory: RunDirectory) -> Start:
    remarks = []
    ended = _read_outcome(directory)
    for path in complete_checkpoints(directory.checkpoints):
        try:
            state = verify(path)
        except CheckpointError as error:
            remarks.append(f"passed over a damaged checkpoint: {error}")
            continue
        if state.ended is not None:
            ended = Ended(status=state.ended, steps=state.step)
        remarks.append(f"resumed from {path.name}, after {state.samples:,} samples")
        return Start(
            checkpoint=path,
            state=state,
            continues=True,
            seed=state.seed,
            remarks=tuple(remarks),
            ended=ended,
        )
    remarks.append("no checkpoint to resume from: begun anew")
    return Start(
        continues=True, seed=_seed_of_attempt(directory), remarks=tuple(remarks), ended=ended
    )


def _from_elsewhere(directory: Path, config: RunConfig) -> Start:
    path = resolve(directory)
    verify_files(path, read_manifest(path), (STATE,))
    state = read_state(path)
    old = read_config(path)
    _check_fixed(old, config)
    _check_steps(state, config)
    remarks = [f"resumed from {path}, after {state.samples:,} samples, with its seed {state.seed}"]
    remarks += [
        f"{name} was {before!r} and is {now!r}" for name, before, now in _differences(old, config)
    ]
    return Start(checkpoint=path, state=state, seed=state.seed, remarks=tuple(remarks))


def _check(state: CheckpointState, old: RunConfig, config: RunConfig) -> None:
    """Raise ConfigError where the rest of the run would not be what it had been."""
    _check_fixed(old, config)
    _check_steps(state, config)
    seed = config.run.seed
    if seed not in ("random", state.seed):
        problem = f"is {seed}, the run to go on with has {state.seed}"
        raise ConfigError("run.seed", problem, "leave it out, or set it to that")
    for name, before, now in _differences(old, config):
        raise ConfigError(
            name,
            f"is {now!r}, the run to go on with has {before!r}",
            "set it back, or begin another run with --resume CHECKPOINT",
        )


def _check_fixed(old: RunConfig, new: RunConfig) -> None:
    batches = (old.parallel.global_batch_size, new.parallel.global_batch_size)
    differing = [("parallel.local_batch_size", *batches)] if batches[0] != batches[1] else []
    differing += [each for each in _unequal(old, new) if each[0] in _FIXED]
    for name, before, now in differing:
        what = "makes a global batch of" if name.startswith("parallel") else "is"
        raise ConfigError(
            name,
            f"{what} {now!r}, the checkpoint's {before!r}",
            "set it back, or begin anew from its weights with --init-checkpoint",
        )


def _check_steps(state: CheckpointState, config: RunConfig) -> None:
    if state.ended is None and state.step >= config.max_steps:
        problem = f"is {config.max_steps}, the checkpoint is of step {state.step}"
        raise ConfigError("run.max_steps", problem, "raise it")


def _differences(old: RunConfig, new: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """Settings that matter to the numbers and are not the same: name, before, now."""
    for name, before, now in _unequal(old, new):
        if name.split(".")[0] in _EXACT and name not in _WHO_COMPUTES:
            yield name, before, now


def _unequal(old: RunConfig, new: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    for section in fields(old):
        ours, theirs = getattr(new, section.name), getattr(old, section.name)
        for field in fields(ours):
            before, now = getattr(theirs, field.name), getattr(ours, field.name)
            if before != now:
                yield f"{section.name}.{field.name}", before, now


def _read_outcome(directory: RunDirectory) -> Ended | None:
    """How the run ended, unless a signal ended it or nothing says so."""
    if not directory.outcome.exists():
        return None
    try:
        record = read_record(directory.outcome, missing="is missing", remedy="delete it")
        if record.has("stopped_by"):
            return None
        status = record.text("status")
        if status not in ("success", "aborted"):
            raise record.error("status", f"is {status!r:.80}")
        return Ended(status=status, steps=record.integer("steps"))  # type: ignore[arg-type]
    except DataError as error:
        raise ConfigError(*error.args) from None


def _seed_of_attempt(directory: RunDirectory) -> int | None:
    """The seed of an attempt that ended before its first checkpoint."""
    try:
        path = directory.run / "environment.json"
        return read_record(path, missing="is missing", remedy="").integer("seed")
    except DataError:
        return None
