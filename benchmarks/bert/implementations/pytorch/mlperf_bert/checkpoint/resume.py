"""Where a run begins: at its first step, or where it or another was saved."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Self

from mlperf_bert import package_version
from mlperf_bert.checkpoint.manifest import (
    has_had_checkpoints,
    named_checkpoints,
    read_config,
    read_manifest,
    resolve,
)
from mlperf_bert.checkpoint.resume_checks import allowed_differences, check_same, check_seed
from mlperf_bert.checkpoint.retention import bring_back
from mlperf_bert.checkpoint.state import CheckpointState, verify
from mlperf_bert.common.errors import CheckpointError, ConfigError, DataError, UnreadableError
from mlperf_bert.common.present import is_there, reading_error
from mlperf_bert.common.records import read_record
from mlperf_bert.common.untrusted import open_regular_file
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.run.directory import RunDirectory
from mlperf_bert.run.environment import git_commit
from mlperf_bert.run.outcome import RunOutcome, read_outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Where a run begins.

    `continues` the run of its own directory, whose clock had begun where it `is_resumed`; `seed`
    where that is known already; `remarks` are for the person who started it; `ended` says how a run
    ended that is not to be gone on with.
    """

    checkpoint: Path | None = None
    state: CheckpointState | None = None
    continues: bool = False
    is_resumed: bool = False
    seed: int | None = None
    remarks: tuple[str, ...] = ()
    ended: RunOutcome | None = None

    def to_plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
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
        """The last step that was made."""
        return 0 if self.state is None else self.state.step

    @property
    def samples(self) -> int:
        """Sequences that were trained."""
        return 0 if self.state is None else self.state.samples


NEW_RUN = Start()


def find_start(resume: str, directory: RunDirectory, config: RunConfig) -> Start:
    """What `--resume` means here: "none", "auto", or a directory with a checkpoint.

    Reads every byte of a checkpoint; one that is damaged is passed over by "auto", which begins
    anew only where there has never been one. Raises CheckpointError or ConfigError where the run
    cannot go on from what was asked for, UnreadableError where nobody can say.
    """
    if resume == "none":
        return NEW_RUN
    if resume != "auto":
        return _from_elsewhere(Path(resume), config)
    return _newest_of(directory, config) if directory.exists else NEW_RUN


def check_data(start: Start, data_sha256: str, data_dir: Path) -> None:
    """Raise CheckpointError unless both sets are those that the checkpoint was made on."""
    if start.state is not None and start.state.data_sha256 != data_sha256:
        problem = f"was made on other data than those of {data_dir}"
        raise CheckpointError(
            str(start.checkpoint), problem, "give that one, or begin anew with --init-checkpoint"
        )


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
            ended = _outcome_of(state)
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
    """A remark where another state of this program wrote a checkpoint."""
    manifest = read_manifest(path)
    theirs, ours = (manifest.version, manifest.commit), (package_version(), git_commit())
    if theirs != ours:
        words = [" ".join(filter(None, each)) for each in (theirs, ours)]
        yield f"{path.name} was written by mlperf-bert {words[0]}, this is {words[1]}"


def _has_begun(log: Path) -> bool:
    """Whether the clock of an attempt had started."""
    try:
        with BufferedReader(open_regular_file(log)) as file:
            return any(b'"run_start"' in line for line in file)
    except OSError as error:
        raise reading_error(log, error, missing="is missing", remedy="move it away") from None


def _outcome_of(state: CheckpointState) -> RunOutcome:
    assert state.ended is not None
    return RunOutcome(
        status=state.ended,
        steps=state.step,
        samples=state.samples,
        seconds=state.seconds,
        mlm_accuracy=state.mlm_accuracy,
        stopped_by=None,
    )


def _read_outcome(directory: RunDirectory) -> RunOutcome | None:
    """How the run ended, unless a signal ended it or nothing says so."""
    if not is_there(directory.outcome):
        return None
    try:
        outcome = read_outcome(directory.outcome)
    except UnreadableError:
        raise
    except DataError as error:
        raise ConfigError(*error.args) from None
    return None if outcome.stopped_by else outcome


def _seed_of_attempt(directory: RunDirectory) -> int | None:
    """The seed of an attempt that ended before its first checkpoint."""
    try:
        path = directory.run / "environment.json"
        return read_record(path, missing="is missing", remedy="").integer("seed")
    except UnreadableError:
        raise
    except DataError:
        return None
