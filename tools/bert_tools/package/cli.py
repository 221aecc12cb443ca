"""The sub-command `package`: export, our checks, MLCommons' checkers, and the score."""

import argparse
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_bert.errors import ConfigError

if TYPE_CHECKING:
    from bert_tools.package.own_checks import Problems, SystemResults

# Those that know BERT, newest first. Later ones skip it and report success.
RULESETS = ("5.0.0", "4.1.0", "4.0.0", "3.1.0", "3.0.0", "2.1.0", "2.0.0")
DEFAULT_RULESETS = ("5.0.0", "4.1.0", "2.0.0")
EXIT_REFUSED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `package`."""
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(),
        help="repository with systems/, results/ and benchmarks/ (default: here)",
    )
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help="directory of results (default: ROOT/results)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="made new")
    parser.add_argument(
        "--ruleset",
        action="append",
        choices=RULESETS,
        help=f"check by this ruleset; may be repeated (default: {', '.join(DEFAULT_RULESETS)})",
    )


def run(args: argparse.Namespace) -> int:
    """Export, check and print. Returns 0 if the submission is accepted, else 1.

    Raises ConfigError or DataError for an option or a directory that cannot be used.
    """
    from mlperf_bert.files import make_directory

    results = args.results or args.root / "results"
    rulesets = tuple(dict.fromkeys(args.ruleset or DEFAULT_RULESETS))
    _check_out(args.out, args.root, results)
    make_directory(args.out.parent)
    try:
        with tempfile.TemporaryDirectory(prefix=".package-", dir=args.out.parent) as beside:
            tree = Path(beside) / "submission"
            scores, problems = make_package(args.root, results, tree, rulesets)
            if not problems:
                tree.rename(args.out)
    except OSError as error:
        problem = f"{args.out} cannot be made ({error.strerror})"
        raise ConfigError("--out", problem, "check its directory and free space") from None
    for line in (*scores, *problems):
        print(line)
    if problems:
        count = f"{len(problems)} problem{'s' * (len(problems) > 1)}"
        print(f"refused, {args.out} was not made: {count}")
        return EXIT_REFUSED
    print(f"accepted under {', '.join(rulesets)}: FOUND NO ERRORS, SUCCESS; {args.out}")
    return 0


def make_package(
    root: Path, results: Path, tree: Path, rulesets: tuple[str, ...]
) -> "tuple[list[str], Problems]":
    """Export a repository into the new directory `tree` and check the result.

    Returns the score of each system in words, none if there are problems, and the problems.

    Raises ConfigError or DataError if that is not possible at all.
    """
    from bert_tools.package.checkers import run_checkers
    from bert_tools.package.export import export
    from bert_tools.package.own_checks import check_systems

    systems, problems = export(root, results, tree)
    checked, found = check_systems(tree, systems)
    if problems:  # without the files left out, the checkers would fail with a traceback or silently
        return [], [*problems, *found]
    divisions = {one.name: one.division for one in checked}
    said, scaling = run_checkers(tree, divisions, rulesets)
    if found or said:
        return [], [*found, *said]
    return [_score_in_words(one, scaling[one.name]) for one in checked], []


def _score_in_words(results: "SystemResults", scaling_factor: float) -> str:
    """The score of a system that passed all checks.

    `scaling_factor` comes from the reference convergence points, for runs that needed fewer samples
    than the reference (closed division); else 1. The times are those before any scaling.
    """
    from bert_tools.common.results import olympic_mean

    runs = results.runs
    minutes = [run.minutes for run in runs]
    scaled = "" if scaling_factor == 1 else f", scaled by {scaling_factor:.4f}"
    return (
        f"{results.name} ({results.division}): {olympic_mean(minutes) * scaling_factor:.3f} "
        f"minutes, the olympic mean of {len(runs)} runs{scaled}\n"
        f"  times {' '.join(f'{each:.3f}' for each in minutes)}\n"
        f"  accuracy {min(run.accuracy for run in runs):.4f} or better; page cache dropped before "
        f"{sum(run.cache_cleared for run in runs)} of {len(runs)} runs"
    )


def _check_out(out: Path, root: Path, results: Path) -> None:
    if os.path.lexists(out):
        raise ConfigError("--out", f"{out} exists", "name a new directory, or remove that one")
    place = out.resolve()
    for source in (results, root / "systems", root / "benchmarks", root / "docs"):
        if place.is_relative_to(source.resolve()):
            raise ConfigError("--out", f"{out} lies in {source}", "name another place")
