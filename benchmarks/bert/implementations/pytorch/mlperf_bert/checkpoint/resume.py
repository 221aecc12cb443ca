"""The start of a run, at its first step or a checkpoint, and the settings that may change there.

The kernels that "auto" chose are compared too, between ranks and with those of the checkpoint.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
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
from mlperf_bert.files import is_there, open_regular_file, read_json, reading_error
from mlperf_bert.model.bert import BertForPretraining
from mlperf_bert.run.directory import RunDirectory
from mlperf_bert.run.outcome import RunOutcome, read_outcome

_KIND = "architecture objective"
_SIZES = "vocab_size hidden_size num_layers num_heads intermediate_size max_position_embeddings"
_SAMPLES = "corpus max_seq_length max_predictions masking masking_rate sampler skip_samples"
# Settings that decide the samples of a step, and the shapes of the saved state.
_FIXED = frozenset(
    (
        *(f"model.{name}" for name in (*_SIZES.split(), *_KIND.split())),
        *(f"data.{name}" for name in _SAMPLES.split()),
    )
)
# Settings that affect the numbers of a step, or the end of a run.
_EXACT_SECTIONS = {"model", "optim", "schedule", "clip"}
_EXACT = {"parallel.allreduce_dtype", "eval.target_accuracy", "eval.interval_samples"}
_ROUNDING = {"model.attention", "model.kernels", "optim.implementation"}
# Settings that affect them if a result depends on the samples of each rank.
_BY_RANK = "bucket_cap_mb grad_accum_steps local_batch_size nodes ranks_per_node"
_WHO_HAS_WHAT = {"data.balance", "data.counts_per_rank"} | {
    f"parallel.{name}" for name in _BY_RANK.split()
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The start of a run.

    It `continues` the run of its own directory; if it `is_resumed`, that run's clock had started.
    `seed` is None until known; `remarks` are for the person who started it; `ended` is the outcome
    of a finished run, which cannot be continued.
    """

    checkpoint: Path | None = None
    state: CheckpointState | None = None
    continues: bool = False
    is_resumed: bool = False
    seed: int | None = None
    remarks: tuple[str, ...] = ()
    ended: RunOutcome | None = None

    def to_plain(self) -> dict[str, Any]:
        """The start as values for JSON."""
        return {**asdict(self), "checkpoint": str(self.checkpoint) if self.checkpoint else None}

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> Self:
        """The inverse of `to_plain`."""
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
        """The last completed step."""
        return 0 if self.state is None else self.state.step

    @property
    def samples(self) -> int:
        """Sequences trained so far."""
        return 0 if self.state is None else self.state.samples


NEW_RUN = Start()


def find_start(resume: str, directory: RunDirectory, config: RunConfig) -> Start:
    """Find the start for `--resume`: "none", "auto", or a directory with a checkpoint.

    It reads every byte of a checkpoint. "auto" skips a damaged one, and starts from scratch only if
    there never was a checkpoint. Raises CheckpointError, ConfigError or DataError if the run cannot
    continue as asked, UnreadableError if a file cannot be read.
    """
    if resume == "none":
        return NEW_RUN
    if resume != "auto":
        return _from_elsewhere(Path(resume), config)
    return _newest_of(directory, config) if directory.exists else NEW_RUN


def check_data(start: Start, data_sha256: str, data_dir: Path) -> None:
    """Raise CheckpointError unless both sets equal those of the checkpoint."""
    if start.state is not None and start.state.data_sha256 != data_sha256:
        problem = f"was made on other data than those of {data_dir}"
        remedy = "give that one, or begin anew with --init-checkpoint"
        raise CheckpointError(str(start.checkpoint), problem, remedy)


def _newest_of(directory: RunDirectory, config: RunConfig) -> Start:
    remarks = []
    ended = _read_outcome(directory)
    bring_back(directory.checkpoints)
    for path in named_checkpoints(directory.checkpoints):
        try:
            state = verify(path)
        except CheckpointError as error:
            where, problem, _ = error.args
            remarks.append(f"passed over a damaged checkpoint: {where} {problem}")
            continue
        if ended is None and state.ended is not None:  # killed right after its last checkpoint
            ended = RunOutcome(
                status=state.ended,
                steps=state.step,
                samples=state.samples,
                seconds=state.seconds,
                mlm_accuracy=state.mlm_accuracy,
                stopped_by=None,
            )
        if ended is None:
            check_same(state, read_config(path), config)
        remarks.append(_in_words(path, state))
        return Start(
            checkpoint=path,
            state=state,
            continues=True,
            is_resumed=True,
            seed=state.seed,
            remarks=(*remarks, *_other_code(path)),
            ended=ended,
        )
    if ended is None and has_had_checkpoints(directory.checkpoints):
        problem = "; ".join(("holds checkpoints, and none that can be used", *remarks))
        remedy = "give another one with --resume DIR and a new --run-dir, or begin anew in one"
        raise CheckpointError(str(directory.checkpoints), problem, remedy)
    seed = _seed_of_attempt(directory)
    if seed is not None:
        check_seed(seed, config)
    remarks.append("no checkpoint to go on from: begun anew")
    return Start(
        continues=True,
        is_resumed=any(_has_begun(log) for log in directory.logs),
        seed=seed,
        remarks=tuple(remarks),
        ended=ended,
    )


def _from_elsewhere(directory: Path, config: RunConfig) -> Start:
    path = resolve(directory)
    state = verify(path)
    remarks = [f"{_in_words(path, state)}, with its seed {state.seed}", *_other_code(path)]
    remarks += allowed_differences(state, read_config(path), config)
    return Start(
        checkpoint=path, state=state, is_resumed=True, seed=state.seed, remarks=tuple(remarks)
    )


def _in_words(path: Path, state: CheckpointState) -> str:
    return f"resumed from {path.name}, after {state.samples:,} samples"


def _other_code(path: Path) -> Iterator[str]:
    """Yield a remark if another version of this program wrote a checkpoint."""
    manifest = read_manifest(path)
    theirs, ours = (manifest.version, manifest.commit), (package_version(), git_commit())
    if theirs != ours:
        words = [" ".join(filter(None, each)) for each in (theirs, ours)]
        yield f"{path.name} was written by mlperf-bert {words[0]}, this is {words[1]}"


def _has_begun(log: Path) -> bool:
    """True if the clock of an attempt had started."""
    try:
        with BufferedReader(open_regular_file(log)) as file:
            return any(b'"run_start"' in line for line in file)
    except OSError as error:
        raise reading_error(log, error, missing="is missing", remedy="move it away") from None


def _read_outcome(directory: RunDirectory) -> RunOutcome | None:
    """The outcome of the run; None if a signal ended it or there is no outcome."""
    if not is_there(directory.outcome):
        return None
    outcome = read_outcome(directory.outcome)
    return None if outcome.stopped_by else outcome


def _seed_of_attempt(directory: RunDirectory) -> int | None:
    """The seed of an attempt that ended before its first checkpoint."""
    try:
        path = directory.run / "environment.json"
        seed: int | None = read_json(path, missing="is missing", remedy="").get("seed")
        return seed
    except UnreadableError:
        raise
    except DataError:
        return None


def check_same(state: CheckpointState, old: RunConfig, new: RunConfig) -> None:
    """Raise ConfigError if new settings would change the rest of a run."""
    _check_fixed(state, old, new)
    check_seed(state.seed, new)
    for name, before, now in _differences(old, new):
        problem = f"is {now!r}, the run to continue has {before!r}"
        raise ConfigError(
            name, problem, "set it back, or begin another run with --resume CHECKPOINT"
        )


def check_seed(seed: int, config: RunConfig) -> None:
    """Raise ConfigError if a config has another seed than the run to continue."""
    if config.run.seed not in ("random", seed):
        problem = f"is {config.run.seed}, the run to continue has {seed}"
        raise ConfigError("run.seed", problem, "leave it out, or set it to that")


def allowed_differences(state: CheckpointState, old: RunConfig, new: RunConfig) -> list[str]:
    """The changed settings of a new run that continues from a checkpoint.

    Raises ConfigError if it cannot continue with the new settings.
    """
    _check_fixed(state, old, new)
    return [f"{name} was {before!r} and is {now!r}" for name, before, now in _differences(old, new)]


def _check_fixed(state: CheckpointState, old: RunConfig, new: RunConfig) -> None:
    batches = (old.parallel.global_batch_size, new.parallel.global_batch_size)
    remedy = "set it back, or begin anew from its weights with --init-checkpoint"
    if batches[0] != batches[1]:
        problem = f"makes a global batch of {batches[1]:,}, the checkpoint's is {batches[0]:,}"
        raise ConfigError("parallel.local_batch_size", problem, remedy)
    for name, before, now in _unequal(old, new):
        if name in _FIXED:
            raise ConfigError(name, f"is {now!r}, the checkpoint's is {before!r}", remedy)
    if state.step >= new.max_steps:
        problem = f"is {new.max_steps:,}, the checkpoint is of step {state.step:,}"
        raise ConfigError("run.max_steps", problem, "raise it above that step")


def _differences(old: RunConfig, new: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield changed settings that affect the numbers: name, before, now."""
    by_rank = new.clip.policy not in CLIPPED_TOGETHER or new.optim.loss_normalization == "per_rank"
    exact = _EXACT | _WHO_HAS_WHAT if by_rank else _EXACT
    for name, before, now in _unequal(old, new):
        in_section = name.split(".")[0] in _EXACT_SECTIONS and name not in _ROUNDING
        if in_section or name in exact:
            yield name, before, now


def _unequal(old: RunConfig, new: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    for section in fields(old):
        ours, theirs = getattr(new, section.name), getattr(old, section.name)
        for field in fields(ours):
            before, now = getattr(theirs, field.name), getattr(ours, field.name)
            if before != now:
                yield f"{section.name}.{field.name}", before, now


def agree_on_kernels(info: RankInfo, model: BertForPretraining) -> None:
    """Check that all ranks have built their model with the same attention policy and blocks.

    Both settings may be "auto", which `model/choices.py` replaces by what the machine can run.
    Kernels round differently, and `flash` also drops other elements, so a run repeats bit for bit
    only if all its ranks and all its attempts use the same ones.

    Every rank must call it at the same time. Raises ConfigError on all of them if one differs.
    """
    own = [model.attention.name, model.attention.note, model.kernels]
    policies, notes, blocks = zip(*from_all_ranks(info, own), strict=True)

    def check() -> None:
        _check_equal("model.attention", policies, notes)
        _check_equal("model.kernels", blocks, blocks)

    on_every_rank(info, check)


def _check_equal(setting: str, names: Sequence[str], notes: Sequence[str]) -> None:
    """Raise ConfigError unless all names are equal.

    Args:
        setting: the setting that was "auto".
        names: what it became on each rank.
        notes: for each rank the words to show; they may say why it cannot run what others can.
    """
    unique = list(dict.fromkeys(names))
    if len(unique) == 1:
        return
    places = [f"{notes[names.index(name)]!r} on rank {names.index(name)}" for name in unique]
    raise ConfigError(
        setting,
        f"is not the same on all ranks: {', '.join(places)}",
        f"set {setting} to one that all ranks can run, or install the same software on all nodes",
    )


def changed_kernels(saved: CheckpointState | None, now: CheckpointState) -> Iterator[str]:
    """Yield a remark for each kind of kernels that differs from those of a resumed checkpoint.

    Args:
        saved: the state of the checkpoint, or None if the run begins anew. A checkpoint of before
            2026-11-28 does not say what was used, so there is no remark.
        now: the identity of the run that starts.
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
                f"{setting} was {before!r} when this checkpoint was written and is {after!r} now: "
                "losses will differ by rounding, and not repeat bit for bit"
            )
