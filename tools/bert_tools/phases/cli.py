"""Defines the sub-command `phases`, which trains the phases of a recipe one after the other.

    check all phases -> train run_0 -> train run_1 from its checkpoint -> ...

Each phase is a run of `train`. To resume an interrupted command, the user repeats it. On several
nodes, the user starts each phase with run_and_time.sh.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from bert_tools.common.phase_record import PhaseRecord, write_phases
from bert_tools.phases.recipe import ANEW, Phase, check_phases, read_recipe, seed_of
from bert_tools.report.run import ended_in_words
from mlperf_bert.arguments import describe
from mlperf_bert.config.files import add_init_checkpoint, add_set, config_to_toml
from mlperf_bert.distributed.signal_watch import CaughtSignals
from mlperf_bert.errors import STOPPED, TARGET_MISSED, ConfigError, say, typed
from mlperf_bert.files import write_file
from mlperf_bert.run.console import ProgressLines
from mlperf_bert.run.lock import RunLock


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
                print(f"phase {number} of {len(phases)}, {_in_words(phase)}", flush=True)
            try:
                return _train_all(args, phases)
            finally:
                _record(phases)
    except KeyboardInterrupt:
        say(f"to go on: {typed(*args.command_line)}")
        raise


def _in_words(phase: Phase) -> str:
    """Describe a phase in one line."""
    steps, batch = phase.config.max_steps, phase.config.parallel.global_batch_size
    return (
        f"{phase.name!r}: {steps:,} steps, {steps * batch:,} sequences of up to "
        f"{phase.config.data.max_seq_length} tokens, data {phase.data}"
    )


def _record(phases: Sequence[Phase], running: Phase | None = None) -> None:
    """Write the states of all phases to `phases.json`."""
    records = []
    for phase in phases:
        record, ended = PhaseRecord(name=phase.name, status="waiting"), phase.outcome
        if ended is not None:
            record = PhaseRecord(
                name=phase.name,
                status="finished" if phase.is_finished else "failed",
                steps=ended.steps,
                samples=ended.samples,
                seconds=ended.seconds,
                accuracy=ended.mlm_accuracy,
            )
        elif phase is running:
            record = PhaseRecord(name=phase.name, status="running")
        elif phase.paths.exists:
            record = PhaseRecord(name=phase.name, status="stopped")
        records.append(record)
    write_phases(phases[0].paths.root, records)


def _train_all(args: argparse.Namespace, phases: Sequence[Phase]) -> int:
    """Train the phases that have not ended, and return the exit status."""
    signals = CaughtSignals()
    for phase in phases:
        if (ended := phase.outcome) is None:
            _record(phases, running=phase)
            status = _train(args, phases, phase, signals)
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


def _train(
    args: argparse.Namespace, phases: Sequence[Phase], phase: Phase, signals: CaughtSignals
) -> int:
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
            words += ["--init-checkpoint", phases[index - 1].paths.checkpoints]
            words += ["--set", f"run.seed={seed_of(phases[0].paths)}"]
        return run_on_ranks(
            [*map(str, words)],
            phase.config.parallel.ranks_per_node,
            agreed_statuses=(STOPPED, TARGET_MISSED),
            hint=f"to go on: {again}",
            signals=signals,
        )


def _end(phases: Sequence[Phase]) -> int:
    """Print the result of all phases and what to do next, and return the exit status."""
    outcomes = [found for each in phases if (found := each.outcome) is not None]
    last, paths = outcomes[-1], phases[-1].paths
    samples, seconds = (
        sum(each.samples for each in outcomes),
        sum(each.seconds for each in outcomes),
    )
    accuracy = "" if last.mlm_accuracy is None else f", accuracy {last.mlm_accuracy:.4f}"
    words = ("export", paths.checkpoints, "--to", "huggingface", "--out", paths.root / "exported")
    print(
        f"phases: {ended_in_words(last, phases[-1].config)}{accuracy}, after {len(phases)} phases, "
        f"{samples:,} samples and {seconds:.1f} s of training. To compare the phases: "
        f"{typed('report', 'page', paths.root)}. To export the model: {typed(*words)}",
        flush=True,
    )
    return 0 if last.status == "success" else TARGET_MISSED
