"""Defines the sub-command `phases`, which trains the phases of a recipe one after the other.

    check all phases -> train run_0 -> train run_1 from its checkpoint -> ...

A recipe is a config with `[[phase]]` tables. Its sections are the settings of all phases, and the
sections below a `[[phase]]` table are settings of this phase only. Phase i is the run `run_<i>` of
the command `train`. To resume an interrupted command, the user repeats it.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bert_tools.report.run import PHASES, ended_in_words
from mlperf_bert.arguments import describe
from mlperf_bert.config.files import (
    add_init_checkpoint,
    add_set,
    config_from_tables,
    config_to_toml,
    parse_override,
    read_toml,
)
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.distributed.signal_watch import CaughtSignals
from mlperf_bert.errors import (
    STOPPED,
    TARGET_MISSED,
    CheckpointError,
    ConfigError,
    UserError,
    say,
    typed,
)
from mlperf_bert.files import is_there, read_json, reading, write_file, write_json
from mlperf_bert.run.console import ProgressLines
from mlperf_bert.run.lock import RunLock
from mlperf_bert.run.outcome import RunOutcome, read_outcome
from mlperf_bert.run.paths import RunPaths

PHASES_SCHEMA_VERSION = 1
ANEW = "--run-dir NEW"  # the option that trains all phases again
_OF_ALL_PHASES = ("seed", "init_checkpoint")  # settings in [run] that a phase must not change


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `phases` to its parser."""
    describe(
        parser,
        "Train a model in several phases, for example with short texts first. The command checks "
        "all phases of the recipe, and then trains each from the end of the previous one, as "
        "run_0, run_1 and so on of --run-dir. Repeat an interrupted command to resume it.",
        "mlperf_bert phases recipe.toml --run-dir runs/phases",
    )
    text = "TOML file with the settings of all phases, and a [[phase]] table for each phase"
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help=text)
    text = "directory for the results of all phases"
    parser.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help=text)
    add_set(parser)
    add_init_checkpoint(parser)


def run(args: argparse.Namespace) -> int:
    """Train the remaining phases. Return 0, or the exit status of a phase that ended early.

    The status is 3 if the last phase missed its target, or if an earlier phase cannot be continued.
    """
    from mlperf_bert.distributed.launch import read_rank_info

    if read_rank_info().world_size > 1:
        remedy = "start the command once, because it starts its own ranks"
        raise ConfigError("phases", "was started once per rank", remedy)
    try:
        with RunLock(args.run_dir, "phases") as lock:
            lock.check()
            phases = read_recipe(args.recipe, args.set, args.init_checkpoint, args.run_dir)
            with ProgressLines().never_silent(lambda: "checking the phases"):
                check_phases(phases)
            for number, phase in enumerate(phases, 1):
                print(f"phase {number} of {len(phases)}, {phase.in_words()}", flush=True)
            try:
                return _train_all(args, phases)
            finally:
                _record(phases)
    except KeyboardInterrupt:
        say(f"to go on: {typed(*args.command_line)}")
        raise


# Read the recipe ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One phase of a recipe. `paths` are those of its run, whose index is the phase's number."""

    name: str
    data: Path
    config: RunConfig
    paths: RunPaths

    def in_words(self) -> str:
        """Describe the phase in one line."""
        steps, batch = self.config.max_steps, self.config.parallel.global_batch_size
        length = self.config.data.max_seq_length
        sequences = f"{steps * batch:,} sequences of up to {length} tokens"
        return f"{self.name!r}: {steps:,} steps, {sequences}, data {self.data}"

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
        name, data = own.pop("name", ""), own.pop("data_dir", "")
        if not (isinstance(name, str) and name.isprintable() and name):
            problem = f"[[phase]] table {index + 1} has no name"
            raise ConfigError(str(path), problem, 'add a line such as name = "short"')
        if name in [each.name for each in phases]:
            raise ConfigError(str(path), f"two phases are named {name!r}", "rename one of them")
        chosen: dict[str, Any] = {"run": {"init_state": "training"}} if index else {}
        if index + 1 < len(given):
            chosen["eval"] = {"target_accuracy": "none"}  # because it must not stop early
        with _in_phase(name):
            if not (isinstance(data, str) and data):
                remedy = 'add a line such as data_dir = "my_data"'
                raise ConfigError(f"{path}: data_dir", "is missing", remedy)
            config = _config(path, (common, chosen, own), changes)
        if index:  # it gets its first weights only when it starts
            config = replace(config, run=replace(config.run, init_checkpoint=""))
        data = Path(os.path.expanduser(data))
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


# Check all phases ---------------------------------------------------------------------------------


def check_phases(phases: Sequence[Phase]) -> None:
    """Check that all phases can train, and that those in the run directory are not changed.

    The function reads the index of prepared sets, but no examples. Raises ConfigError, DataError or
    CheckpointError, whose message names the phase.
    """
    from mlperf_bert.data.set_checks import open_data

    further = RunPaths(phases[0].paths.root, len(phases))
    if further.exists:
        problem = f"exists, but the recipe has only {len(phases)} phases"
        raise ConfigError(str(further.run), problem, f"undo this change, or use {ANEW}")
    for index, phase in enumerate(phases):
        config = phase.config
        with _in_phase(phase.name):
            if config.parallel.nodes > 1 or config.data.loader == "mpi_readers":
                where = "parallel.nodes" if config.parallel.nodes > 1 else "data.loader"
                remedy = "train each phase with run_and_time.sh"
                raise ConfigError(where, "does not work with `phases`, on one machine", remedy)
            if phase is not phases[-1] and config.checkpoint.interval_steps == "never":
                problem = "is 'never', but the next phase starts from a checkpoint of this one"
                raise ConfigError("checkpoint.interval_steps", problem, "use 'auto' or a number")
            if not phase.is_finished:  # its data may be deleted afterwards
                open_data(config, phase.data, checks_files=True)
            if phase.paths.has_checkpoint:
                _check_unchanged(phase)
            else:
                _check_start(phase, phases[:index])


def _check_start(phase: Phase, earlier: Sequence[Phase]) -> None:
    """Raise an error if a phase cannot start after the last one of the phases before it."""
    from mlperf_bert.checkpoint.first_weights import (
        check_first_weights,
        check_model_settings,
        check_order_of_phase,
        check_state_of_phase,
    )
    from mlperf_bert.data.index import Manifest, sets_sha256

    config, data = phase.config, phase.data
    before = earlier[-1] if earlier else None
    if before is None or before.is_finished:
        if before is not None:
            first, seed = str(before.paths.checkpoints), _seed_in(phase.paths.root)
            config = replace(config, run=replace(config.run, init_checkpoint=first, seed=seed))
        check_first_weights(config, data)
        return
    theirs, run = before.config, f"phase {before.name!r}"
    check_model_settings(config.model, theirs.model, f"the weights of {run}")
    check_state_of_phase(config, theirs, run)
    digest = sets_sha256(before.data / "train", before.data / "eval")
    check_order_of_phase(config, theirs, run, data, digest)
    vocabularies = {Manifest.load(each / "train").vocabulary_sha256 for each in (data, before.data)}
    if len(vocabularies) > 1:
        problem = f"{data} was prepared with another vocabulary than {before.data} of {run}"
        raise ConfigError("--data", problem, "prepare the data of all phases with one vocabulary")
    for other in earlier if config.data.skip_samples == 0 else ():
        if not other.is_finished and _draws(other) == _draws(phase):
            remedy = "set data.skip_samples to the number of samples trained before"
            say(
                f"warning: phase {phase.name!r} draws the same samples as phase {other.name!r}; "
                f"{remedy}"
            )


def _draws(phase: Phase) -> tuple[object, ...]:
    """Return what determines the order of a phase's samples, except the seed."""
    from mlperf_bert.data.index import sets_sha256
    from mlperf_bert.data.sampler import num_quantiles

    sampler, batch = phase.config.data.sampler, phase.config.parallel.global_batch_size
    parts = {"uniform": 1, "quantile": num_quantiles(batch)}.get(sampler, batch)
    return sets_sha256(phase.data / "train", phase.data / "eval"), sampler, parts


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
    check_same(checkpoint, replace(state, step=0), new, ANEW)  # a finished phase has no next step
    if is_there(phase.data):
        digest = sets_sha256(phase.data / "train", phase.data / "eval")
        check_data(Start(checkpoint=checkpoint, state=state, new_run_by=ANEW), digest, phase.data)


def _seed_in(root: Path) -> int:
    """Return the seed of the first phase in `root`, which all phases use. Raises DataError."""
    path, remedy = RunPaths(root, 0).run / "environment.json", f"start again with {ANEW}"
    values = read_json(path, missing="is missing", remedy=remedy)
    with reading(path, remedy):
        return int(values["seed"])


# Train --------------------------------------------------------------------------------------------


def _train_all(args: argparse.Namespace, phases: Sequence[Phase]) -> int:
    """Train the phases that have not ended, and return the exit status."""
    signals = CaughtSignals()
    for phase in phases:
        if (ended := phase.outcome) is None:
            _record(phases, running=phase)
            status = _train(args, phase, signals)
            if phase.outcome is None:  # `train` has printed why
                return status
        else:
            words = f"{ended.steps:,} steps, {ended.samples:,} samples, {ended.seconds:.1f} s"
            print(f"phase {phase.name!r} has already ended after {words} of training", flush=True)
        if phase is phases[-1]:
            break
        if not phase.is_finished:
            remedy = f"lower optim.learning_rate, and train again with {ANEW}"
            say(f"phase {phase.name!r} ended before its last step, so no phase follows; {remedy}")
            return TARGET_MISSED
        if signals.first:  # it arrived when the phase had no step left
            say(f"stopped after phase {phase.name!r}. To go on: {typed(*args.command_line)}")
            return STOPPED
    return _end(phases)


def _train(args: argparse.Namespace, phase: Phase, signals: CaughtSignals) -> int:
    """Start or resume the run of a phase on its ranks, and return its exit status."""
    from mlperf_bert.distributed.spawn import run_on_ranks

    root, index, again = phase.paths.root, phase.paths.index, typed(*args.command_line)
    with RunLock(root, f"run_{index}") as lock:
        lock.check()
        config = root / f"phase_{index}.toml"
        write_file(config, config_to_toml(phase.config).encode())
        words: list[object] = ["train", "--config", config, "--data", phase.data]
        words += ["--run-dir", root, "--run-index", index, "--go-on-by", again]
        words += ["--resume", "auto" if phase.paths.exists else "none", "--new-run-by", ANEW]
        if index:
            words += ["--init-checkpoint", RunPaths(root, index - 1).checkpoints]
            words += ["--set", f"run.seed={_seed_in(root)}"]
        return run_on_ranks(
            [*map(str, words)],
            phase.config.parallel.ranks_per_node,
            agreed_statuses=(STOPPED, TARGET_MISSED),
            hint=f"to go on: {again}",
            signals=signals,
        )


def _record(phases: Sequence[Phase], running: Phase | None = None) -> None:
    """Write the states of all phases to `phases.json`. A killed command leaves one as running."""
    entries: list[dict[str, object]] = []
    for phase in phases:
        status, ended = "waiting", phase.outcome
        if ended is not None:
            status = "finished" if phase.is_finished else "failed"
        elif phase.paths.exists or phase is running:
            status = "running" if phase is running else "stopped"
        entry: dict[str, object] = {"name": phase.name, "status": status}
        for name in ("steps", "samples", "seconds"):
            entry[name] = getattr(ended, name, None)
        entries.append({**entry, "accuracy": getattr(ended, "mlm_accuracy", None)})
    values = {"schema_version": PHASES_SCHEMA_VERSION, "phases": entries}
    write_file(phases[0].paths.root / PHASES, write_json(values))


def _end(phases: Sequence[Phase]) -> int:
    """Print the result of all phases and what to do next, and return the exit status."""
    outcomes = [found for each in phases if (found := each.outcome) is not None]
    last, paths = outcomes[-1], phases[-1].paths
    samples = sum(each.samples for each in outcomes)
    seconds = sum(each.seconds for each in outcomes)
    accuracy = "" if last.mlm_accuracy is None else f", accuracy {last.mlm_accuracy:.4f}"
    words = ("export", paths.checkpoints, "--to", "huggingface", "--out", paths.root / "exported")
    export = f". To export the model: {typed(*words)}" if paths.has_checkpoint else ""
    print(
        f"phases: {ended_in_words(last, phases[-1].config)}{accuracy}, after {len(phases)} phases, "
        f"{samples:,} samples and {seconds:.1f} s of training. To compare the phases: "
        f"{typed('report', 'page', paths.root)}{export}",
        flush=True,
    )
    return 0 if last.status == "success" else TARGET_MISSED
