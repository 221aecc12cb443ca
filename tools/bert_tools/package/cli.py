"""The command `package`, which copies, checks and scores an MLPerf submission."""

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_bert.arguments import describe
from mlperf_bert.errors import ConfigError, DataError, one_line

if TYPE_CHECKING:
    from bert_tools.package.own_checks import Problems, SystemResults

# The rulesets that include BERT, newest first. Later ones skip BERT and report success.
RULESETS = ("5.0.0", "4.1.0", "4.0.0", "3.1.0", "3.0.0", "2.1.0", "2.0.0")
DEFAULT_RULESETS = ("5.0.0", "4.1.0")  # that of 2.0.0 asks for more samples in the closed division
EXIT_REFUSED = 1
_HOW_TO_NAME = (
    "pass the LOGDIR of your ten runs and --system NAME, or a directory with "
    "<system>/bert/result_<i>.txt such as the repository's own results"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options of `package` to its parser."""
    describe(
        parser,
        "Copy results and code into a submission directory, check it with this project's checks "
        "and MLCommons' checkers, and print the score of each system. If a check fails, the "
        "directory is not created and the exit status is 1.",
        "mlperf_bert package runs/mine --system my_machine --out runs/submission",
    )
    parser.add_argument(
        "results",
        type=Path,
        nargs="?",
        metavar="RESULTS",
        help="results to package, in a run directory with result_0.txt to result_9.txt, or in a "
        "directory with <system>/bert/result_<i>.txt",
    )
    parser.add_argument(
        "--system",
        metavar="NAME",
        help="system that the runs of a run directory used, described in systems/NAME.json",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="new directory for the submission",
    )
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="repository with systems/ and benchmarks/ (default: the current directory)",
    )
    parser.add_argument(
        "--ruleset",
        action="append",
        choices=RULESETS,
        help=f"ruleset to check against, can be repeated (default: {', '.join(DEFAULT_RULESETS)})",
    )


def run(args: argparse.Namespace) -> int:
    """Copy a submission, check it, and print its score or its problems.

    Returns 0 if the submission is accepted, and otherwise 1.

    Raises ConfigError or DataError for an option or a directory that cannot be used.
    """
    from mlperf_bert.files import make_directory

    if args.results is None:
        raise ConfigError("RESULTS", "is missing", _HOW_TO_NAME)
    rulesets = tuple(dict.fromkeys(args.ruleset or DEFAULT_RULESETS))
    _check_out(args.out, args.root, args.results)
    if not args.results.is_dir():
        raise DataError(str(args.results), "no such directory", _HOW_TO_NAME)
    make_directory(args.out.parent)
    try:
        with tempfile.TemporaryDirectory(prefix=".package-", dir=args.out.parent) as scratch:
            tree = Path(scratch) / "submission"
            results = _results_tree(args, Path(scratch) / "results")
            scores, problems = make_package(args.root, results, tree, rulesets)
            if not problems:
                tree.rename(args.out)
    except OSError as error:
        # An error in copying a whole directory names each file, and has the reason as a text.
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror
        problem = f"{args.out} cannot be written ({reason})"
        remedy = "check the permissions of its parent directory and the free disk space"
        raise ConfigError("--out", problem, remedy) from None
    for line in (*scores, *problems):
        print(line)
    if problems:
        count = f"{len(problems)} problem{'s' * (len(problems) > 1)}"
        print(f"the submission has {count}, so {args.out} was not written")
        return EXIT_REFUSED
    print(f"wrote {args.out}, which passed all checks of the rulesets {', '.join(rulesets)}")
    return 0


def _results_tree(args: argparse.Namespace, staging: Path) -> Path:
    """Return the directory that contains the results to package, and print a line about them.

    The directory has the form <system>/bert/result_<i>.txt. The logs of a run directory are first
    copied to `staging` in this form.
    """
    from bert_tools.package.export import is_run_directory, results_of_runs
    from mlperf_bert.files import names_in

    if is_run_directory(args.results):
        results_of_runs(args.results, args.system, args.root, staging)
        print(one_line(f"packaging the runs in {args.results} as results of {args.system}"))
        return staging
    if args.system is not None:
        problem = f"needs a run directory, but {args.results} contains no result_<i>.txt"
        remedy = "pass the LOGDIR of ten runs, or remove --system"
        raise ConfigError("--system", problem, remedy)
    systems = [
        name for name in names_in(args.results) if is_run_directory(args.results / name / "bert")
    ]
    if not systems:
        problem = "contains neither result_<i>.txt nor <system>/bert/result_<i>.txt"
        raise DataError(str(args.results), problem, _HOW_TO_NAME)
    print(one_line(f"packaging the results in {args.results} of {', '.join(systems)}"))
    return Path(args.results)


def make_package(
    root: Path, results: Path, tree: Path, rulesets: tuple[str, ...]
) -> "tuple[list[str], Problems]":
    """Copy a submission into the new directory `tree` and check the result.

    Returns a description of each system's score, and all problems. If there are problems, there are
    no descriptions.

    Raises ConfigError or DataError if the submission cannot be copied or checked.
    """
    from bert_tools.package.checkers import run_checkers
    from bert_tools.package.export import export
    from bert_tools.package.own_checks import check_systems

    systems, problems = export(root, results, tree)
    checked, found = check_systems(tree, systems)
    if problems:  # without the missing files, checkers would fail with a traceback or silently
        return [], [*problems, *found]
    divisions = {one.name: one.division for one in checked}
    missed = [run.name for one in checked for run in one.runs if run.missed]
    reported, scaling = run_checkers(tree, divisions, missed, rulesets)
    if found or reported:
        return [], [*found, *reported]
    return [_score_in_words(one, scaling[one.name]) for one in checked], []


def _score_in_words(results: "SystemResults", scaling_factor: float) -> str:
    """Describe the score of a system that passed all checks.

    `scaling_factor` comes from the reference convergence points. It is above 1 if runs of the
    closed division needed fewer samples than the reference. The described times are not scaled. The
    time of a run that missed its target is `inf`.
    """
    from bert_tools.common.results import olympic_mean

    runs = results.runs
    minutes = [run.minutes for run in runs]
    reached = min(run.accuracy for run in runs if not run.missed)
    scaled = "" if scaling_factor == 1 else f", scaled by {scaling_factor:.4f}"
    return (
        f"{results.name} ({results.division}): {olympic_mean(minutes) * scaling_factor:.3f} "
        f"minutes, the olympic mean of {len(runs)} runs{scaled}\n"
        f"  times {' '.join(f'{each:.3f}' for each in minutes)}\n"
        f"  accuracy {reached:.4f} or better; page cache dropped before "
        f"{sum(run.cache_cleared for run in runs)} of {len(runs)} runs"
    )


def _check_out(out: Path, root: Path, results: Path) -> None:
    """Raise ConfigError if the submission cannot be written to `out`."""
    if os.path.lexists(out):
        remedy = "pass a new directory, or remove the existing directory"
        raise ConfigError("--out", f"{out} exists", remedy)
    resolved = out.resolve()
    for source in (results, root / "systems", root / "benchmarks", root / "docs"):
        if resolved.is_relative_to(source.resolve()):
            remedy = "pass a directory elsewhere"
            raise ConfigError("--out", f"{out} is inside {source}", remedy)
