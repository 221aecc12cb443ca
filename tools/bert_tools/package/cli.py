"""The sub-command `package`: its arguments and calls."""

import argparse
import os
import tempfile
from pathlib import Path

from mlperf_bert.errors import ConfigError

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
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Export, check and print. Returns 0 if the submission is accepted, else 1.

    Raises ConfigError or DataError for an option or a directory that cannot be used.
    """
    from bert_tools.package.verdict import make_package
    from mlperf_bert.files import make_directory

    results = args.results or args.root / "results"
    rulesets = tuple(dict.fromkeys(args.ruleset or DEFAULT_RULESETS))
    _check_out(args.out, args.root, results)
    make_directory(args.out.parent)
    try:
        with tempfile.TemporaryDirectory(prefix=".package-", dir=args.out.parent) as beside:
            tree = Path(beside) / "submission"
            verdict = make_package(args.root, results, tree, rulesets)
            if verdict.is_accepted:
                tree.rename(args.out)
    except OSError as error:
        problem = f"{args.out} cannot be made ({error.strerror})"
        raise ConfigError("--out", problem, "check its directory and free space") from None
    print(verdict.to_json(args.out) if args.json else verdict.in_words(args.out))
    return 0 if verdict.is_accepted else EXIT_REFUSED


def _check_out(out: Path, root: Path, results: Path) -> None:
    if os.path.lexists(out):
        raise ConfigError("--out", f"{out} exists", "name a new directory, or remove that one")
    place = out.resolve()
    for source in (results, root / "systems", root / "benchmarks", root / "docs"):
        if place.is_relative_to(source.resolve()):
            raise ConfigError("--out", f"{out} lies in {source}", "name another place")
