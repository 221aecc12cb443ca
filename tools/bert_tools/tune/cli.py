"""The sub-command `tune`: its arguments, and the calls they lead to; heavy imports are late."""

import argparse
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from mlperf_bert.common.errors import STOPPED, TARGET_MISSED, ConfigError, DataError
from mlperf_bert.config.options import add_config

if TYPE_CHECKING:
    from bert_tools.tune.settings import StudySettings
    from bert_tools.tune.summary import Summary

_SHIPPED = Path(__file__).parent / "spaces"
_MOST_EVALUATIONS = 10_000  # evaluations of a training: its curve is one line of the journal
_Prune = Literal["median", "halving", "none"]
_Objective = Literal["samples", "time"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `tune`."""
    add_config(parser, "TOML file to begin from, with which the best is compared")
    shipped = ", ".join(sorted(path.stem for path in _SHIPPED.glob("*.toml")))
    for name, metavar, text in (
        ("--space", "SPACE", f"TOML file of what is searched, or one of ours: {shipped}"),
        ("--data", "DIR", "directory with train/ and eval/"),
        ("--out", "DIR", "directory of the study, new or to be continued"),
    ):
        parser.add_argument(name, type=Path, required=True, metavar=metavar, help=text)
    for name, default, text in (
        ("--trials", 20, "trainings of the search, of each --compare value"),
        ("--repeats", 5, "fresh seeds for the default and each best config"),
        ("--workers", 1, "trainings at a time on this machine"),
        ("--seed", 1, "seed of every trial's training and of the draws; fresh seeds follow it"),
    ):
        help_text = f"{text} (default {default})"
        parser.add_argument(name, type=int, default=default, metavar="N", help=help_text)
    parser.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="most samples of a training (default: the config's)",
    )
    parser.add_argument(
        "--objective",
        choices=get_args(_Objective),
        default="samples",
        help="what to minimise: samples or seconds to the target (default samples)",
    )
    parser.add_argument(
        "--prune",
        choices=get_args(_Prune),
        default="median",
        help="when a training is stopped as hopeless (default median)",
    )
    parser.add_argument(
        "--compare",
        metavar="SECTION.KEY=A,B",
        help="a search for each value with the same budget, such as optim.name=adamw,lamb",
    )
    parser.add_argument(
        "--trainer",
        metavar="COMMAND",
        help="command that trains, given train's options: such as 'srun mlperf_bert train' "
        "(default: train on this machine)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--as-worker", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Search; 0 if a trial reached the target, 3 if none did, 75 after a signal.

    Raises UserError for a mistake in the options, the files or the study directory.
    """
    from bert_tools.common.figures import new_figure
    from bert_tools.tune.store import need_optuna
    from mlperf_bert.common.atomic import make_directory

    need_optuna()
    new_figure(1, 1)  # checked before anything is trained
    _check_counts(args)
    settings = _settings(args)
    make_directory(args.out)
    try:
        status, summary = _search(args, settings)
    except OSError as error:  # from Optuna's journal, its lock, or a trial's files
        where = str(error.filename or args.out)
        problem = error.strerror or "cannot be written"
        raise DataError(where, problem, "check the directory and its free space") from None
    if summary is None:
        return status
    _print(args, summary, status)
    if status == STOPPED:
        return STOPPED
    return 0 if summary.best_arm is not None else TARGET_MISSED


def _search(args: argparse.Namespace, settings: "StudySettings") -> "tuple[int, Summary | None]":
    """Exit status and summary of the study; no summary for a worker or after a failure."""
    from bert_tools.tune.results import write_results
    from bert_tools.tune.search import Search, StudyProgress
    from bert_tools.tune.settings import hold_to_study
    from bert_tools.tune.store import Store, study_lock
    from bert_tools.tune.summary import summarise
    from bert_tools.tune.trial_process import StopSignal, run_workers

    with StopSignal() as stop:
        with study_lock(args.out):
            hold_to_study(args.out, settings)
        store = Store(args.out, [arm.name for arm in settings.arms], settings.seed)
        if args.workers > 1 and not args.as_worker:
            status = run_workers(args.command_line, args.workers, stop)
        else:
            with StudyProgress(args.workers) as progress:
                budget = {"trials": args.trials, "repeats": args.repeats}
                how = Search(settings, store, progress, stop, **budget).work()
            status = STOPPED if how == "stopped" else 0
        if args.as_worker or status not in (0, STOPPED):
            return status, None
        summary = summarise(settings, store, args.repeats)
        write_results(args.out, summary)
        return status, summary


def _print(args: argparse.Namespace, summary: "Summary", status: int) -> None:
    from bert_tools.tune.results import table, verdict

    if args.json:
        print(json.dumps(summary.as_json()))
        return
    print(table(summary))
    if status == STOPPED:
        print("stopped before its end: the same command continues it")
        return
    print(verdict(summary, summary.best_arm))
    if summary.best_arm is not None:
        print(f"best config: {args.out / 'best.toml'}; pictures and table beside it")


def _settings(args: argparse.Namespace) -> "StudySettings":
    from bert_tools.tune.settings import StudySettings, make_arms
    from bert_tools.tune.space import read_space
    from mlperf_bert.config.files import load_config

    config = load_config(args.config, args.set)
    if config.eval.target is None:
        remedy = "give one: --set eval.target_accuracy=NUMBER"
        raise ConfigError("eval.target_accuracy", "is 'none', and a search needs a target", remedy)
    space_path = args.space
    if space_path.name == str(space_path) and not space_path.suffix and not space_path.exists():
        space_path = _SHIPPED / f"{space_path}.toml"
    most_samples = args.samples or config.max_steps * config.parallel.global_batch_size
    if most_samples < config.eval_interval_samples:
        problem = (
            f"is {most_samples:,}, the first evaluation is at {config.eval_interval_samples:,}"
        )
        raise ConfigError("--samples", problem, "raise it, or lower eval.interval_samples")
    if most_samples > _MOST_EVALUATIONS * config.eval_interval_samples:
        problem = f"is {most_samples:,}, more than {_MOST_EVALUATIONS:,} evaluations"
        raise ConfigError("--samples", problem, "lower it, or raise eval.interval_samples")
    return StudySettings(
        config=config,
        config_path=args.config,
        space_name=space_path.name,
        data=args.data,
        arms=make_arms(config, read_space(space_path), args.compare),
        objective=args.objective,
        most_samples=most_samples,
        seed=args.seed,
        prune=args.prune,
        trainer=tuple(shlex.split(args.trainer)) if args.trainer else None,
    )


def _check_counts(args: argparse.Namespace) -> None:
    for name, low, high in (
        ("trials", 1, 10_000),
        ("repeats", 0, 1000),
        ("workers", 1, 256),
        ("seed", 0, 2**31),
    ):
        value = getattr(args, name)
        if not low <= value <= high:
            raise ConfigError(f"--{name}", f"is {value:,}", f"give {low:,} .. {high:,}")
    if args.samples is not None and args.samples < 1:
        raise ConfigError("--samples", f"is {args.samples:,}", "give at least 1")
