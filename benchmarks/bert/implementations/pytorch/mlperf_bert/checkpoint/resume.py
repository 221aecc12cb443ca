"""Find where a run starts, and check the settings and kernels that it starts with.

A run starts at its first step or at a checkpoint. This module decides which settings may change at
a checkpoint. It also compares the kernels that the setting "auto" selects, between ranks and with
the checkpoint.
"""

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, Self

from mlperf_bert import git_commit, package_version
from mlperf_bert.checkpoint.manifest import (
    CheckpointState,
    bring_back,
    has_had_checkpoints,
    named_checkpoints,
    read_config,
    read_manifest,
    resolve,
    verify,
)
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import CLIPPED_TOGETHER
from mlperf_bert.distributed.launch import RankInfo
from mlperf_bert.distributed.session import from_all_ranks, on_every_rank
from mlperf_bert.errors import CheckpointError, ConfigError, DataError, UnreadableError
from mlperf_bert.files import is_there, open_regular_file, read_json, reading, reading_error
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.run.directory import RunDirectory
from mlperf_bert.run.outcome import RunOutcome, read_outcome

_KIND = "architecture objective"
_SIZES = "vocab_size hidden_size num_layers num_heads intermediate_size max_position_embeddings"
_SAMPLES = "corpus max_seq_length max_predictions masking masking_rate sampler skip_samples"
# Settings that determine the samples of a step, or the shapes and meaning of the saved state.
_FIXED = frozenset(
    (
        *(f"model.{name}" for name in (*_SIZES.split(), *_KIND.split())),
        *(f"data.{name}" for name in _SAMPLES.split()),
        "optim.name",
    )
)
# Settings that affect the numbers of a step, or the end of a run.
_EXACT_SECTIONS = {"model", "optim", "schedule", "clip"}
_EXACT = {"parallel.allreduce_dtype", "eval.target_accuracy", "eval.interval_samples"}
# DDP forms its own buckets, in the order in which the kernels finish gradients.
_DDP_BUCKETS = {"parallel.data_parallel", "model.kernels"}
_ROUNDING = {"model.attention", "model.kernels", "optim.implementation"}
# Settings that affect the numbers of a step only if they depend on which rank has which samples.
_BY_RANK = "bucket_cap_mb grad_accum_steps local_batch_size nodes ranks_per_node"
_PLACEMENT = {"data.balance", "data.counts_per_rank"} | {
    f"parallel.{name}" for name in _BY_RANK.split()
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The point at which a run starts.

    `continues` is True if the run continues the earlier one in its directory. `is_resumed` is True
    if an earlier attempt had already started the run's clock. `seed` is None until it is known.
    `remarks` are lines to print for the user. `ended` is the outcome of a finished run, which
    cannot be resumed. `init_checkpoint` is the setting with which the run of the checkpoint began.
    `new_run_by` contains the options that start a new run, if a script or
    another command started this run.
    """

    checkpoint: Path | None = None
    state: CheckpointState | None = None
    continues: bool = False
    is_resumed: bool = False
    seed: int | None = None
    remarks: tuple[str, ...] = ()
    ended: RunOutcome | None = None
    init_checkpoint: str = ""
    new_run_by: str | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return the fields of the start as values that JSON can represent."""
        return {**asdict(self), "checkpoint": str(self.checkpoint) if self.checkpoint else None}

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> Self:
        """Build a start from the result of `to_plain`."""
        checkpoint, state, ended = (values.pop(each) for each in ("checkpoint", "state", "ended"))
        return cls(
            checkpoint=Path(checkpoint) if checkpoint else None,
            state=CheckpointState(**state) if state else None,
            ended=RunOutcome(**ended) if ended else None,
            remarks=tuple(values.pop("remarks")),
            **values,
        )

    @property
    def step(self) -> int:
        """The number of completed training steps."""
        return 0 if self.state is None else self.state.step

    @property
    def samples(self) -> int:
        """The number of sequences trained before this start."""
        return 0 if self.state is None else self.state.samples


NEW_RUN = Start()


def find_start(
    resume: str, directory: RunDirectory, config: RunConfig, new_run_by: str | None = None
) -> Start:
    """Return where a run starts, as requested by the value of `--resume`.

    `resume` is "none", "auto" or a checkpoint directory. The function verifies every byte of the
    checkpoint. With "auto" it skips damaged checkpoints. If there has never been a checkpoint, it
    starts where the run first started. Error messages suggest the options `new_run_by` to start a
    new run, or those of `train` if `new_run_by` is None.

    Raises CheckpointError, ConfigError or DataError if the run cannot be resumed as requested, and
    UnreadableError if a file cannot be read.
    """
    if resume == "none" or (resume == "auto" and not directory.exists):
        return NEW_RUN
    if resume == "auto":
        found = _newest_of(directory, config, new_run_by)
    else:
        found = _from_elsewhere(Path(resume), config, new_run_by)
    return replace(found, new_run_by=new_run_by)


def with_first_weights(config: RunConfig, start: Start) -> RunConfig:
    """Return the config of a run, which still names the weights that a resumed run began with."""
    if start.state is None:
        return config
    return replace(config, run=replace(config.run, init_checkpoint=start.init_checkpoint))


def check_data(start: Start, data_sha256: str, data_dir: Path) -> None:
    """Raise CheckpointError unless the checkpoint was trained on the data of this run.

    `data_sha256` is the digest of this run's training and evaluation sets, which are in `data_dir`.
    """
    if start.state is not None and start.state.data_sha256 != data_sha256:
        problem = f"was not trained on the data in {data_dir}"
        new_run = start.new_run_by or _from_weights(start.checkpoint)
        remedy = f"pass the data that it was trained on, or start a new run with {new_run}"
        raise CheckpointError(str(start.checkpoint), problem, remedy)


def _from_weights(checkpoint: Path | None) -> str:
    """Return the options that start a new run from the weights of a checkpoint."""
    return f"--init-checkpoint {shlex.quote(str(checkpoint))} --run-dir NEW --resume none"


def _newest_of(directory: RunDirectory, config: RunConfig, new_run_by: str | None) -> Start:
    """Return the start at the newest usable checkpoint of a run, or at the run's beginning.

    A run that never had a checkpoint starts again where its first attempt started: from the
    checkpoint of another run, or from the beginning.
    """
    remarks = []
    ended = _read_outcome(directory)
    bring_back(directory.checkpoints)
    for path in named_checkpoints(directory.checkpoints):
        try:
            state = verify(path)
        except CheckpointError as error:
            where, problem, _ = error.args
            remarks.append(f"skipped a damaged checkpoint: {where}: {problem}")
            continue
        if ended is None and state.ended is not None:  # killed right after it saved this
            ended = RunOutcome(
                status=state.ended,
                steps=state.step,
                samples=state.samples,
                seconds=state.seconds,
                mlm_accuracy=state.mlm_accuracy,
                stopped_by=None,
            )
        if ended is None:
            check_same(path, state, config, new_run_by)
        remarks.append(_in_words(path, state))
        return Start(
            checkpoint=path,
            state=state,
            continues=True,
            is_resumed=True,
            seed=state.seed,
            remarks=(*remarks, *_other_code(path)),
            ended=ended,
            init_checkpoint=read_config(path).run.init_checkpoint,
        )
    if ended is None and has_had_checkpoints(directory.checkpoints):
        problem = f"has no usable checkpoint ({', '.join(remarks) or 'all of them are gone'})"
        remedy = f"start a new run with {new_run_by or '--run-dir NEW --resume none'}"
        raise CheckpointError(str(directory.checkpoints), problem, remedy)
    if ended is None and is_there(directory.started_from):
        remedy = f"start a new run with {new_run_by or '--run-dir NEW'}"
        first = read_json(directory.started_from, missing="no such file", remedy=remedy)
        with reading(directory.started_from, remedy):
            checkpoint = Path(first["checkpoint"])
        return replace(_from_elsewhere(checkpoint, config, new_run_by), continues=True)
    seed = _seed_of_attempt(directory)
    if seed is not None:
        check_seed(seed, config)
    remarks.append("found no checkpoint to resume from, so the run starts from the beginning")
    return Start(
        continues=True,
        is_resumed=any(_clock_started(log) for log in directory.logs),
        seed=seed,
        remarks=tuple(remarks),
        ended=ended,
    )


def _from_elsewhere(directory: Path, config: RunConfig, new_run_by: str | None) -> Start:
    """Return the start of a new run at the checkpoint of another run."""
    path = resolve(directory)
    state = verify(path)
    check_seed(state.seed, config)
    remarks = [f"{_in_words(path, state)}, with its seed {state.seed}", *_other_code(path)]
    remarks += allowed_differences(path, state, config, new_run_by)
    return Start(
        checkpoint=path,
        state=state,
        is_resumed=True,
        seed=state.seed,
        remarks=tuple(remarks),
        init_checkpoint=read_config(path).run.init_checkpoint,
    )


def _in_words(path: Path, state: CheckpointState) -> str:
    return f"resumed from {path.name}, after {state.samples:,} samples"


def _other_code(path: Path) -> Iterator[str]:
    """Yield a remark if another version of this program wrote the checkpoint in `path`."""
    manifest = read_manifest(path)
    theirs, ours = (manifest.version, manifest.commit), (package_version(), git_commit())
    if theirs != ours:
        words = [" ".join(filter(None, each)) for each in (theirs, ours)]
        yield f"{path.name} was written by mlperf-bert {words[0]}, but this is {words[1]}"


def _clock_started(log: Path) -> bool:
    """Return True if the attempt that wrote this MLPerf log had started the run's clock."""
    try:
        with BufferedReader(open_regular_file(log)) as file:
            return any(b'"run_start"' in line for line in file)
    except OSError as error:
        raise reading_error(log, error, missing="no such file", remedy="move it away") from None


def _read_outcome(directory: RunDirectory) -> RunOutcome | None:
    """Return the outcome of a run, or None if it has none or was stopped by a signal."""
    if not is_there(directory.outcome):
        return None
    outcome = read_outcome(directory.outcome)
    return None if outcome.stopped_by else outcome


def _seed_of_attempt(directory: RunDirectory) -> int | None:
    """Return the seed of an attempt that ended before its first checkpoint, or None if unknown."""
    try:
        path = directory.run / "environment.json"
        seed: int | None = read_json(path, missing="no such file", remedy="").get("seed")
        return seed
    except UnreadableError:
        raise
    except DataError:
        return None


def check_same(
    checkpoint: Path, state: CheckpointState, new: RunConfig, new_run_by: str | None
) -> None:
    """Raise ConfigError if a setting of `new` would change how the checkpoint's run continues."""
    old = read_config(checkpoint)
    _check_fixed(checkpoint, state, old, new, new_run_by)
    check_seed(state.seed, new)
    for name, before, now in _differences(old, new):
        problem = f"is {now!r}, but the run to resume has {before!r}"
        new_run = new_run_by or f"--resume {shlex.quote(str(checkpoint))} --run-dir NEW"
        raise ConfigError(name, problem, f"undo this change, or start a new run with {new_run}")


def check_seed(seed: int, config: RunConfig) -> None:
    """Raise ConfigError unless the seed in the config is "random" or that of the run to resume."""
    if config.run.seed not in ("random", seed):
        problem = f"is {config.run.seed}, but the run to resume has {seed}"
        raise ConfigError("run.seed", problem, f"remove the setting, or set it to {seed}")


def allowed_differences(
    checkpoint: Path, state: CheckpointState, new: RunConfig, new_run_by: str | None
) -> list[str]:
    """Describe each setting that a new run changes when it starts from a checkpoint.

    Raises ConfigError if a setting must be the same as in the checkpoint.
    """
    old = read_config(checkpoint)
    _check_fixed(checkpoint, state, old, new, new_run_by)
    return [f"{name} was {before!r} and is {now!r}" for name, before, now in _differences(old, new)]


def _check_fixed(
    checkpoint: Path,
    state: CheckpointState,
    old: RunConfig,
    new: RunConfig,
    new_run_by: str | None,
) -> None:
    """Raise ConfigError if `new` changes a setting that every run from the checkpoint must keep."""
    batches = (old.parallel.global_batch_size, new.parallel.global_batch_size)
    remedy = f"undo this change, or start a new run with {new_run_by or _from_weights(checkpoint)}"
    if batches[0] != batches[1]:
        problem = f"gives a global batch of {batches[1]:,}, but the checkpoint has {batches[0]:,}"
        raise ConfigError("parallel.local_batch_size", problem, remedy)
    for name, before, now in _unequal(old, new):
        is_fixed = name in _FIXED
        if name == "run.init_checkpoint" and now:  # without it, the run keeps its first weights
            is_fixed = os.path.realpath(before) != os.path.realpath(now)
        if is_fixed:
            if name.startswith(("model.", "run.")):  # the checkpoint's weights are not wanted
                new_run = new_run_by or "--run-dir NEW --resume none"
                remedy = f"undo this change, or start a new run with {new_run}"
            raise ConfigError(name, f"is {now!r}, but the checkpoint has {before!r}", remedy)
    if state.step >= new.max_steps:
        problem = f"is {new.max_steps:,}, but the checkpoint is from step {state.step:,}"
        raise ConfigError("run.max_steps", problem, f"use more than {state.step:,} steps")


def _differences(old: RunConfig, new: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, old value, new value) of each changed setting that affects the results."""
    by_rank = new.clip.policy not in CLIPPED_TOGETHER or new.optim.loss_normalization == "per_rank"
    exact = _EXACT | _PLACEMENT if by_rank else _EXACT
    by_bucket = new.clip.policy == "bucket_before_allreduce" and new.parallel.world_size > 1
    if by_bucket and "ddp" in (old.parallel.data_parallel, new.parallel.data_parallel):
        exact = exact | _DDP_BUCKETS
    for name, before, now in _unequal(old, new):
        in_section = name.split(".")[0] in _EXACT_SECTIONS and name not in _ROUNDING
        if in_section or name in exact:
            yield name, before, now


def _unequal(old: RunConfig, new: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, old value, new value) of each setting that differs between two configs."""
    for section in fields(old):
        ours, theirs = getattr(new, section.name), getattr(old, section.name)
        for field in fields(ours):
            before, now = getattr(theirs, field.name), getattr(ours, field.name)
            if before != now:
                yield f"{section.name}.{field.name}", before, now


def agree_on_kernels(info: RankInfo, model: BertForPretraining) -> None:
    """Check that the models of all ranks use the same kernels.

    The settings are `model.attention` and `model.kernels`. Either may be "auto", which
    `model/choices.py` replaces with kernels that the machine can run. Kernels round differently,
    and dropout in the kernel `flash` also drops other elements. A run is therefore reproducible
    bit-for-bit only if all its ranks and all its attempts use the same kernels.

    All ranks must call this function. Raises ConfigError on all ranks if the kernels
    differ.
    """
    own = [model.attention.name, model.attention.note, model.kernels]
    policies, notes, blocks = zip(*from_all_ranks(info, own), strict=True)

    def check() -> None:
        _check_equal("model.attention", policies, notes)
        _check_equal("model.kernels", blocks, blocks)

    on_every_rank(info, check)


def _check_equal(setting: str, names: Sequence[str], notes: Sequence[str]) -> None:
    """Raise ConfigError unless all ranks use the same kernels for one setting.

    Args:
        setting: the setting that was "auto".
        names: the kernels that each rank uses.
        notes: the kernels as text for the message, possibly with the reason for the choice.
    """
    unique = list(dict.fromkeys(names))
    if len(unique) == 1:
        return
    places = [f"{notes[names.index(name)]!r} on rank {names.index(name)}" for name in unique]
    problem = f"differs between ranks ({', '.join(places)})"
    remedy = "choose a value that all ranks can run, or install the same software on all nodes"
    raise ConfigError(setting, problem, remedy)


def changed_kernels(saved: CheckpointState | None, now: CheckpointState) -> Iterator[str]:
    """Yield a remark for each setting whose kernels differ from those in the checkpoint.

    Args:
        saved: the state of the checkpoint, or None if the run does not resume. Checkpoints from
            before 2026-11-28 do not record their kernels, so there is no remark for them.
        now: the state of the run that starts, including the kernels that this run uses.
    """
    if saved is None:
        return
    used = (
        ("model.attention", saved.attention, now.attention),
        ("model.kernels", saved.kernels, now.kernels),
    )
    for setting, before, after in used:
        if before is not None and before != after:
            yield (
                f"{setting} was {before!r} when this checkpoint was written and is {after!r} now, "
                "so losses will differ by rounding and not repeat bit-for-bit"
            )
