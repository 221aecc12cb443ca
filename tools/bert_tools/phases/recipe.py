"""Reads a recipe with several phases, and checks all phases before the first one starts.

A recipe is a config with `[[phase]]` tables. Its sections are the settings of all phases, and the
sections below a `[[phase]]` table are settings of this phase only.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bert_tools.common.phase_record import PHASES, read_phases
from mlperf_bert.config.files import config_from_tables, parse_override, read_toml
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.errors import CheckpointError, ConfigError, UserError
from mlperf_bert.files import in_brief, is_there, read_json, reading
from mlperf_bert.run.outcome import RunOutcome, read_outcome
from mlperf_bert.run.paths import RunPaths

ANEW = "--run-dir NEW"  # the option that trains all phases again
_OF_ALL_PHASES = ("seed", "init_checkpoint")  # settings in [run] that a phase must not change


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One phase of a recipe. `paths` are those of its run, whose index is the phase's number."""

    name: str
    data: Path
    config: RunConfig
    paths: RunPaths

    @property
    def outcome(self) -> RunOutcome | None:
        """The outcome of the phase, or None if it has not ended or was stopped by a signal."""
        found = read_outcome(self.paths.outcome) if is_there(self.paths.outcome) else None
        return None if found is None or found.stopped_by else found

    @property
    def is_finished(self) -> bool:
        """True if the phase reached its target or its last step, so that the next one may start."""
        if (ended := self.outcome) is None:
            return False
        has_target = self.config.eval.target is not None
        return ended.status == "success" or (has_target and ended.steps >= self.config.max_steps)


def read_recipe(
    path: Path, overrides: Sequence[str], init_checkpoint: Path | None, root: Path
) -> list[Phase]:
    """Read the phases of a recipe, whose runs are in `root`. Raises ConfigError.

    `overrides` apply to all phases. The first phase starts from `init_checkpoint`, if it is given.
    """
    common = read_toml(path, "pass a recipe, which is a TOML file")
    given = common.pop("phase", None)
    if not (isinstance(given, list) and given and all(isinstance(each, dict) for each in given)):
        remedy = "add a [[phase]] table with `name` and `data_dir` for each phase"
        raise ConfigError(str(path), "has no [[phase]] tables", remedy)
    changes = [parse_override(each) for each in overrides]
    if init_checkpoint is not None:
        changes.append(("run", "init_checkpoint", str(init_checkpoint)))
    phases: list[Phase] = []
    for index, own in enumerate(given):
        name = own.pop("name", None)
        if not (isinstance(name, str) and name.strip() and name.isprintable()):
            problem = f"[[phase]] table {index + 1} has no name"
            raise ConfigError(str(path), problem, 'add a line such as name = "short"')
        if name in [each.name for each in phases]:
            problem = f"two phases have the name {name!r}"
            raise ConfigError(str(path), problem, "rename one of them")
        with _in_phase(name):
            data = _data_dir(path, own)
            chosen: dict[str, dict[str, Any]] = {"run": {"init_state": "training"}} if index else {}
            if index + 1 < len(given):
                chosen["eval"] = {"target_accuracy": "none"}  # because it must not stop early
            config = _config(path, (common, chosen, own), changes)
            if index:  # a phase is given its first weights only when it starts
                config = replace(config, run=replace(config.run, init_checkpoint=""))
        phases.append(Phase(name=name, data=data, config=config, paths=RunPaths(root, index)))
    return phases


@contextmanager
def _in_phase(name: str) -> Iterator[None]:
    """Add the name of a phase to each UserError of the with block."""
    try:
        yield
    except UserError as error:
        where, problem, remedy = error.args
        where = "data_dir" if where == "--data" else where
        raise type(error)(f"phase {name!r}: {where}", problem, remedy) from None


def _data_dir(path: Path, own: dict[str, Any]) -> Path:
    """Remove `data_dir` from the table of a phase, and return it as a path."""
    found = own.pop("data_dir", None)
    try:
        if isinstance(found, str) and found:
            return Path(found).expanduser()
    except RuntimeError:
        problem = f"{in_brief(found)} has an unknown home directory"
        raise ConfigError(f"{path}: data_dir", problem, "write the whole path") from None
    if isinstance(own.get("data"), str):
        remedy = "write it as data_dir, because `data` is a section of settings"
        raise ConfigError(f"{path}: data", "is a directory", remedy)
    remedy = 'add a line such as data_dir = "my_data"'
    raise ConfigError(f"{path}: data_dir", "is missing", remedy)


def _config(
    path: Path, layers: Sequence[dict[str, Any]], changes: Sequence[tuple[str, str, Any]]
) -> RunConfig:
    """Build the config of a phase from tables, the last of which belong to the phase itself."""
    tables: dict[str, Any] = {}
    for layer in layers:
        for section, table in deepcopy(layer).items():
            if isinstance(table, dict) and isinstance(tables.get(section), dict):
                tables[section].update(table)
            else:
                tables[section] = table
    config = config_from_tables(tables, str(path))
    for field in _OF_ALL_PHASES:
        if field in layers[-1].get("run", {}):
            problem = "is set in a phase, but is the same in all phases"
            raise ConfigError(f"run.{field}", problem, "move it to [run], above the phases")
    for section, field, value in changes:
        tables.setdefault(section, {})[field] = value
    return config_from_tables(tables, "--set") if changes else config


def seed_of(first: RunPaths) -> int:
    """Return the seed of the first phase, which all later phases use. Raises DataError."""
    path, remedy = first.run / "environment.json", f"start again with {ANEW}"
    values = read_json(path, missing="is missing", remedy=remedy)
    with reading(path, remedy):
        return int(values["seed"])


def check_phases(phases: Sequence[Phase]) -> None:
    """Check that all phases can train, and that those in the run directory are not changed.

    The function reads the index of prepared sets, but no examples. Raises ConfigError, DataError or
    CheckpointError, whose message names the phase.
    """
    from mlperf_bert.data.set_checks import open_data

    root = phases[0].paths.root
    names = [each.name for each in phases]
    for index, record in enumerate(read_phases(root)):
        if record.status != "waiting" and names[index : index + 1] != [record.name]:
            problem = f"phase {index + 1} is {in_brief(record.name)}, but the recipe has "
            problem += repr(names[index]) if index < len(names) else f"{len(names)} phases"
            raise ConfigError(str(root / PHASES), problem, f"undo this change, or use {ANEW}")
    for before, phase in zip((None, *phases), phases, strict=False):
        with _in_phase(phase.name):
            _check_machine(phase.config)
            if phase is not phases[-1] and phase.config.checkpoint.interval_steps == "never":
                problem = "is 'never', but the next phase starts from a checkpoint of this one"
                raise ConfigError("checkpoint.interval_steps", problem, "use 'auto' or a number")
            if not phase.is_finished:  # its data may be deleted afterwards
                open_data(phase.config, phase.data, rank=0)
            if phase.paths.has_checkpoint:
                _check_unchanged(phase)
            else:
                _check_start(phase, before)


def _check_machine(config: RunConfig) -> None:
    """Raise ConfigError unless this command can start the ranks of a phase."""
    from mlperf_bert.extras import require_packages

    for name, value, usual in (
        ("parallel.nodes", config.parallel.nodes, 1),
        ("data.loader", "thread" if config.data.loader == "dali" else config.data.loader, "thread"),
    ):
        if value != usual:
            problem = f"is {value!r}, but `phases` starts the ranks of one machine"
            remedy = f"use {usual!r}, or train each phase with run_and_time.sh"
            raise ConfigError(name, problem, remedy)
    if config.data.loader == "dali":
        require_packages("data.loader", "dali", "nvidia.dali")


def _check_start(phase: Phase, before: Phase | None) -> None:
    """Raise an error if a phase cannot start after the phase `before`."""
    from mlperf_bert.checkpoint.first_weights import (
        check_first_weights,
        check_model_settings,
        check_order_of_phase,
        check_state_of_phase,
    )
    from mlperf_bert.data.index import Manifest, sets_sha256

    config, data = phase.config, phase.data
    if before is None or before.is_finished:
        if before is not None:
            first, seed = str(before.paths.checkpoints), seed_of(RunPaths(before.paths.root, 0))
            config = replace(config, run=replace(config.run, init_checkpoint=first, seed=seed))
        return check_first_weights(config, data)
    theirs, run = before.config, f"phase {before.name!r}"
    check_model_settings(config.model, theirs.model, f"the weights of {run}")
    check_state_of_phase(config, theirs, run)
    digest = sets_sha256(before.data / "train", before.data / "eval")
    check_order_of_phase(config, theirs, run, data, digest)
    vocabularies = {Manifest.load(each / "train").vocabulary_sha256 for each in (data, before.data)}
    if len(vocabularies) > 1:
        problem = f"{data} was prepared with another vocabulary than {before.data} of {run}"
        raise ConfigError("--data", problem, "prepare the data of all phases with one vocabulary")
    return None


def _check_unchanged(phase: Phase) -> None:
    """Raise an error if the recipe has changed since the phase wrote its last checkpoint."""
    from mlperf_bert.checkpoint.manifest import read_config, read_state, resolve
    from mlperf_bert.checkpoint.resume import Start, check_data, check_same
    from mlperf_bert.data.index import sets_sha256

    try:
        checkpoint = resolve(phase.paths.checkpoints)
        old, state = read_config(checkpoint), read_state(checkpoint)
    except CheckpointError:
        return  # it is damaged, and `train` resumes from an older one and checks that
    new = phase.config
    same: dict[str, tuple[Any, Any]] = {
        "run.max_steps": (new.max_steps, old.max_steps),
        "run.init_state": (new.run.init_state, old.run.init_state),
    }
    if not phase.paths.index:
        same["run.init_checkpoint"] = (new.run.init_checkpoint, old.run.init_checkpoint)
    for name, (now, before) in same.items():
        if now != before:
            problem = f"is {now!r}, but the phase in {phase.paths.run} has {before!r}"
            raise ConfigError(name, problem, f"undo this change, or train again with {ANEW}")
    check_same(checkpoint, replace(state, step=0), new, ANEW)
    if is_there(phase.data):
        digest = sets_sha256(phase.data / "train", phase.data / "eval")
        check_data(Start(checkpoint=checkpoint, state=state, new_run_by=ANEW), digest, phase.data)
