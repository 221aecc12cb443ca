"""The sub-command `report`: its arguments, what prints, and which files it writes."""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_bert.common.errors import ConfigError, one_line

if TYPE_CHECKING:
    from bert_tools.report.facts import RunFacts

PAGE = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `report`."""
    parser.add_argument(
        "run_paths",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="run directory, its run_<i>, or an MLPerf log; several, one after the other, "
        "are laid side by side",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"the page (default: {PAGE} in the run directory; of several here)",
    )
    parser.add_argument("--png", type=Path, metavar="DIR", help="each chart as a picture as well")
    parser.add_argument(
        "--tensorboard", type=Path, metavar="DIR", help="all numbers as TensorBoard scalars as well"
    )
    parser.add_argument(
        "--doctor", action="store_true", help="whether the run is on track, and if not, why"
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="of the run, with --doctor: how good a guess is on its held-out set",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object; a page only with --out"
    )


def run(args: argparse.Namespace) -> int:
    """Write the report and say where, 0; or with --doctor print the diagnosis.

    The latter is 0 on track, 1 behind or off, 3 cannot be judged. Raises ConfigError for options
    that do not fit, DataError for files that are missing or wrong.
    """
    return _diagnose(args) if args.doctor else _report(args)


def _diagnose(args: argparse.Namespace) -> int:
    from bert_tools.report.doctor import diagnose
    from bert_tools.report.run import read_run
    from bert_tools.report.run_files import only_run
    from mlperf_bert.data.index import Manifest

    if len(args.run_paths) > 1:
        raise ConfigError("--doctor", f"was given {len(args.run_paths)} runs", "give one")
    if args.out or args.png or args.tensorboard:
        problem = "writes no files"
        raise ConfigError("--doctor", problem, "leave out --out, --png and --tensorboard")
    baseline = Manifest.load(args.data / "eval").baseline if args.data else None
    run = read_run(only_run(args.run_paths[0]), needs_config=True)
    diagnosis = diagnose(run, baseline)
    print(json.dumps(diagnosis.as_json()) if args.json else "\n".join(diagnosis.lines()))
    return diagnosis.exit_status


def _report(args: argparse.Namespace) -> int:
    from bert_tools.report.charts import charts_of
    from bert_tools.report.facts import read_facts
    from bert_tools.report.measures import as_json, lines_of
    from bert_tools.report.pictures import chart_picture
    from bert_tools.report.run_files import find_runs
    from bert_tools.report.tensorboard import write_scalars
    from mlperf_bert.common.atomic import write_file

    if args.data:
        raise ConfigError("--data", "is for --doctor", "leave it out, or add --doctor")
    runs = [read_facts(files) for files in find_runs(args.run_paths)]
    charts, quiet = charts_of(runs)
    scalars = _scalar_directories(args.tensorboard, runs) if args.tensorboard else []
    page = args.out
    if page is None and not args.json:  # of the only run, or here
        paths = args.run_paths
        page = paths[0] / PAGE if len(paths) == 1 and paths[0].is_dir() else Path(PAGE)
    _check_places(page, args.png, scalars)
    written = []
    if scalars:
        count = sum(write_scalars(*each) for each in zip(scalars, runs, strict=True))
        written.append(f"{count:,} scalars, for tensorboard --logdir {args.tensorboard}")
    if args.png:
        for chart in charts:
            write_file(args.png / f"{chart.key}.png", chart_picture(chart))
        written.append(f"{len(charts)} pictures: {args.png}")
    if page:
        from bert_tools.report.page import report_page  # with jinja2

        contents = report_page(runs, charts, quiet).encode("utf-8")
        write_file(page, contents)
        size = f"{len(contents) / 1e3:,.0f} kB"
        written.append(f"page, {size}, to be opened in a browser: {page}")
    shown = [*lines_of(runs), *map(one_line, written)]
    print(json.dumps(as_json(runs)) if args.json else "\n".join(shown))
    return 0


def _check_places(page: Path | None, pictures: Path | None, scalars: Sequence[Path]) -> None:
    """Raise DataError or ConfigError where one of them cannot be written, before any is."""
    from bert_tools.common.figures import new_figure
    from bert_tools.report.tensorboard import check_directory
    from mlperf_bert.common.atomic import check_writable, make_directory

    if page is not None:
        if page.is_dir():
            raise ConfigError("--out", f"{page} is a directory", f"name a file, as {page / PAGE}")
        check_writable(page)
    if pictures is not None:
        new_figure(1, 1)  # says where matplotlib is missing
    for directory in scalars:
        check_directory(directory)
    for directory in (*scalars, *filter(None, [pictures])):
        make_directory(directory)
        check_writable(directory / PAGE)


def _scalar_directories(directory: Path, runs: "Sequence[RunFacts]") -> list[Path]:
    """Of several runs one for each, by its label; numbered where two come out the same."""
    if len(runs) == 1:
        return [directory]
    names = [re.sub(r"[^A-Za-z0-9._-]+", "_", each.label).strip(".") or "run" for each in runs]
    if len({name.lower() for name in names}) < len(names):
        names = [f"{number}_{name}" for number, name in enumerate(names, 1)]
    return [directory / name for name in names]
