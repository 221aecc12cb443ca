"""The question `plan law`: its arguments, and what they call."""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from stat import S_ISDIR
from typing import TYPE_CHECKING, Any

from mlperf_bert.common.errors import ConfigError, DataError, one_line

if TYPE_CHECKING:
    from bert_tools.plan.entries import Entry, Skipped
    from bert_tools.plan.scaling_law import PowerLaw, ScalingLaw

PUBLISHED = "published"
_DEFAULT_PICTURE = Path("law.png")
_MOST_SEED = 2**63 - 1
_MOST_NAMED = 4
_MOST_ACCELERATORS = 10**9


def add_law(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the question."""
    from bert_tools.plan.entries import FILTER_HELP

    parser.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="PATH",
        help="MLPerf logs: a directory with result_<n>.txt below it, or some of them (those of a "
        "directory are one system's); a CSV file "
        f"with the columns of the shipped table; or {PUBLISHED!r}, the shipped table itself, "
        "MLPerf BERT v0.7 to v5.0 (default)",
    )
    parser.add_argument(
        "--filter", action="append", default=[], metavar="KEY=VALUE", help=FILTER_HELP
    )
    parser.add_argument(
        "--at",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="also print time and cost at N accelerators; may be repeated",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the bootstrap (default 0)"
    )
    picture = parser.add_mutually_exclusive_group()
    picture.add_argument(
        "--out",
        type=Path,
        metavar="FILE.png",
        help=f"the picture (default ./{_DEFAULT_PICTURE})",
    )
    picture.add_argument("--no-plot", action="store_true", help="draw no picture")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(answer=answer_law)


def answer_law(args: argparse.Namespace) -> int:
    """Fit, print and draw. Raises ConfigError or DataError for what the user can mend."""
    from bert_tools.common.figures import check_picture
    from bert_tools.plan.entries import chosen
    from bert_tools.plan.law_text import in_words
    from bert_tools.plan.scaling_law import fit_law, marginal_cost
    from mlperf_bert.common.atomic import write_file

    if not 0 <= args.seed <= _MOST_SEED:
        raise ConfigError("--seed", f"is {args.seed}", f"set it within 0 .. {_MOST_SEED}")
    for each in args.at:
        if not 1 <= each <= _MOST_ACCELERATORS:
            remedy = f"give 1 to {_MOST_ACCELERATORS:,} accelerators"
            raise ConfigError("--at", f"is {each}", remedy)
    picture = None if args.no_plot else check_picture(args.out or _DEFAULT_PICTURE)
    everything, skipped = _read(args.paths)
    entries = chosen(everything, args.filter)
    usable = [each for each in entries if each.time_min and each.accelerators]
    left_out = [each for each in entries if not (each.time_min and each.accelerators)]
    try:
        law = fit_law(usable, args.seed)
    except ConfigError as error:
        raise _with_skipped(error, skipped) from None
    sizes = sorted({each.accelerators or 0 for each in usable} | set(args.at))
    costs = [marginal_cost(law.time, size) for size in sizes]
    title = _title(args)
    if args.json:
        answer = _answer(law, skipped, left_out, args)
        answer["marginal_cost"] = [asdict(cost) for cost in costs]
        answer["picture"] = None if picture is None else str(picture)
        print(json.dumps(answer, allow_nan=False), flush=True)
    else:
        print(in_words(title, law, costs, skipped, left_out), flush=True)
    if picture is not None:
        from bert_tools.plan.law_plot import law_picture

        write_file(picture, law_picture(title, law))
    if not args.json:
        print(one_line(f"picture: {picture}") if picture else "no picture was asked for")
    return 0


def _read(paths: list[Path]) -> "tuple[list[Entry], list[Skipped]]":
    from bert_tools.plan.log_tree import read_tree
    from bert_tools.plan.logged_system import system_entry
    from bert_tools.plan.published_results import published_entries, read_table

    entries: list[Entry] = []
    skipped: list[Skipped] = []
    single: dict[Path, list[Path]] = {}  # logs by directory: those of one are a system's
    for path in paths or [Path(PUBLISHED)]:
        if str(path) == PUBLISHED:
            entries += published_entries()
        elif path.suffix == ".csv":
            entries += read_table(path)
        elif _is_directory(path):
            tree = read_tree(path.resolve())  # `.` and `..` say no names of systems
            entries += tree.entries
            skipped += tree.skipped
        else:
            directory = path.parent.resolve()
            single.setdefault(directory, []).append(directory / path.name)
    for directory, logs in single.items():
        entry, problems = system_entry(directory, list(dict.fromkeys(logs)))
        entries += [entry] if entry else []
        skipped += problems
    return entries, skipped


def _is_directory(path: Path) -> bool:
    try:
        return S_ISDIR(os.stat(path).st_mode)
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        problem = "does not exist" if is_missing else error.strerror or "cannot be read"
        remedy = f"give MLPerf logs, a CSV file, or {PUBLISHED!r}"
        raise DataError(str(path), problem, remedy) from None


def _with_skipped(error: ConfigError, skipped: "list[Skipped]") -> ConfigError:
    """The error, naming what could not be read: that may be why."""
    where, problem, remedy = error.args
    if not skipped:
        return error
    named = ", ".join(f"{each.name} ({each.problem})" for each in skipped[:_MOST_NAMED])
    more = f" and {len(skipped) - _MOST_NAMED} more" if len(skipped) > _MOST_NAMED else ""
    return ConfigError(where, f"{problem}; skipped: {named}{more}", remedy)


def _title(args: argparse.Namespace) -> str:
    paths = ", ".join(map(str, args.paths)) or PUBLISHED
    return f"{paths}: {', '.join(args.filter)}" if args.filter else paths


def _answer(
    law: "ScalingLaw",
    skipped: "list[Skipped]",
    left_out: "list[Entry]",
    args: argparse.Namespace,
) -> dict[str, Any]:
    from bert_tools.plan.scaling_law import CEREBRAS, LEVEL, RESAMPLES

    time = law.time
    return {
        "schema_version": 1,
        "sources": [str(path) for path in args.paths] or [PUBLISHED],
        "filters": args.filter,
        "exponent": time.exponent,
        "exponent_low": time.low,
        "exponent_high": time.high,
        "exponent_half_width_t": time.half_width,
        "coefficient_minutes": time.coefficient,
        "coefficient_minutes_low": time.coefficient_low,
        "coefficient_minutes_high": time.coefficient_high,
        **_part("throughput", law.throughput),
        **_part("samples", law.samples),
        "split_remainder": law.split_remainder,
        "level": LEVEL,
        "resamples": RESAMPLES,
        "seed": args.seed,
        "reference": {
            "name": "Cerebras' note on MLPerf v0.7, A100",
            "exponent": CEREBRAS.exponent,
            "coefficient_minutes": CEREBRAS.coefficient,
        },
        "entries": [asdict(each) | {"residual_factor": law.residual(each)} for each in law.entries],
        "left_out": [asdict(each) for each in left_out],
        "skipped": [asdict(each) for each in skipped],
    }


def _part(name: str, part: "PowerLaw | None") -> dict[str, float | None]:
    return {
        f"{name}_entries": part.count if part else 0,
        f"{name}_exponent": part.exponent if part else None,
        f"{name}_exponent_low": part.low if part else None,
        f"{name}_exponent_high": part.high if part else None,
        f"{name}_coefficient": part.coefficient if part else None,
    }
