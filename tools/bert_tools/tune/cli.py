"""Defines the sub-command `tune`, which imports heavy modules only when it runs."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_bert.arguments import describe
from mlperf_bert.config.files import add_config, load_config
from mlperf_bert.errors import TARGET_MISSED, ConfigError, DataError, one_line, typed
from mlperf_bert.extras import require_packages

if TYPE_CHECKING:
    from bert_tools.tune.study import StudySettings
    from mlperf_bert.run.lock import RunLock

_SHIPPED = Path(__file__).parent / "spaces"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `tune` to its parser."""
    describe(
        parser,
        "Search hyper-parameters with many short training runs, and write the best config. The "
        "study in --out can be interrupted, and the same command continues it. The command needs "
        "Optuna, which `tools/venv.sh tune` installs.",
        "mlperf_bert tune --config cpu_tiny --space around --data my_data --out study",
    )
    searched = parser.add_argument_group("what is searched")
    add_config(searched, "config to start from: TOML file, or the name of a shipped config")
    shipped = ", ".join(sorted(path.stem for path in _SHIPPED.glob("*.toml")))
    for name, metavar, text in (
        ("--space", "SPACE", f"settings to search: TOML file, or one of {shipped}"),
        ("--data", "DIR", "directory with train/ and eval/"),
        ("--out", "DIR", "directory for the study, which is continued if it exists"),
    ):
        searched.add_argument(name, type=Path, required=True, metavar=metavar, help=text)
    searched.add_argument(
        "--objective",
        choices=("samples", "time"),
        default="samples",
        help="what to minimize: samples or seconds until the target is reached",
    )
    trials = parser.add_argument_group("the trainings")
    for name, default, text in (
        ("--trials", 20, "number of training runs"),
        ("--seed", 1, "seed of every training and of the search"),
    ):
        trials.add_argument(name, type=int, default=default, metavar="N", help=text)
    trials.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="maximum number of samples per training run (default: as in the config)",
    )
    trials.add_argument(
        "--trainer",
        metavar="COMMAND",
        help="command that starts a training run with the options of `train`, such as 'srun "
        "mlperf_bert train' (default: train on this machine)",
    )


def run(args: argparse.Namespace) -> int:
    """Search hyper-parameters. Return 0 if a trial reached the target, otherwise 3.

    Raises UserError for a mistake in the options, the files or the study directory.
    """
    require_packages("tune", "tune", "optuna")
    import optuna

    from bert_tools.tune.study import BEST, open_study, result_in_words, search, write_results
    from mlperf_bert.run.lock import RunLock

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    settings = _settings(args)
    try:
        with RunLock(args.out, "study") as lock:
            _check_owner(lock)
            study = open_study(args.out, settings)
            search(study, settings, args.out, args.trials)
            result = write_results(args.out, study, settings)
    except OSError as error:  # from Optuna's journal or its lock, or from a trial's files
        where = str(error.filename or args.out)
        problem = error.strerror or "cannot be written"
        raise DataError(where, problem, "check the permissions and the free disk space") from None
    print(result_in_words(result))
    if result["best"] is None:
        print(one_line(f"wrote {args.out / 'result.json'}"))
        return TARGET_MISSED
    print(one_line(f"wrote {args.out / 'result.json'} and {args.out / BEST}"))
    command = typed("train", "--config", args.out / BEST, "--data", args.data)
    print(f"to train with the best settings, run {command}")
    return 0


def _check_owner(lock: "RunLock") -> None:
    """Raise ConfigError for --out if another process is working on the study."""
    try:
        lock.check()
    except ConfigError as error:
        _, problem, remedy = error.args
        raise ConfigError("--out", problem, remedy) from None


def _settings(args: argparse.Namespace) -> "StudySettings":
    """Return the study settings that the options describe. Raises ConfigError for a mistake."""
    from bert_tools.tune.space import read_space
    from bert_tools.tune.study import StudySettings

    for name, least in (("trials", 1), ("seed", 0)):
        value = getattr(args, name)
        if value < least:
            raise ConfigError(
                f"--{name}", f"must be at least {least}, not {value:,}", f"raise --{name}"
            )
    config = load_config(args.config, args.set)
    if config.eval.target is None:
        problem = "is 'none', but a search needs a target"
        remedy = "add --set eval.target_accuracy=NUMBER"
        raise ConfigError("eval.target_accuracy", problem, remedy)
    space_path = args.space
    if space_path.name == str(space_path) and not space_path.suffix and not space_path.exists():
        space_path = _SHIPPED / f"{space_path}.toml"
    most_samples = config.max_steps * config.parallel.global_batch_size
    if args.samples is not None:
        most_samples = args.samples
    if most_samples < config.eval_interval_samples:
        problem = (
            f"is {most_samples:,}, but the first evaluation is after "
            f"{config.eval_interval_samples:,} samples"
        )
        raise ConfigError("--samples", problem, "raise --samples, or lower eval.interval_samples")
    return StudySettings(
        config=config,
        config_path=args.config,
        space=read_space(space_path, config),
        data=args.data,
        objective=args.objective,
        most_samples=most_samples,
        seed=args.seed,
        trainer=tuple(shlex.split(args.trainer)) if args.trainer else None,
    )
