"""The sub-command `report`: its arguments, its printing, and its files."""

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
    """Add the sub-commands of `report`."""
    commands = parser.add_subparsers(required=True, metavar="KIND")
    for name, make, text, out in (
        ("page", _page, "a page to open in a browser", f"default: {PAGE} in the run, or in runs/"),
        ("pictures", _pictures, "each chart as a PNG", "directory of the pictures"),
        ("tensorboard", _tensorboard, "all numbers as TensorBoard scalars", "log directory"),
        ("doctor", None, "whether a run is on track, and if not, why", ""),
    ):
        command = commands.add_parser(name, help=text)
        command.set_defaults(make=make)
        text = "run directory, its run_<i>, or an MLPerf log"
        text += "; several are compared side by side" if make else ""
        count = "+" if make else 1
        command.add_argument("run_paths", type=Path, nargs=count, metavar="RUN", help=text)
        if make is None:
            text = "the run's data, for the accuracy of a guess on its held-out set"
            command.add_argument("--data", type=Path, metavar="DIR", help=text)
        else:
            more = {"metavar": "FILE"} if make is _page else {"metavar": "DIR", "required": True}
            command.add_argument("--out", type=Path, help=out, **more)
        command.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Write the requested files and print their names; `doctor` prints a diagnosis instead.

    Returns 0; for `doctor` 0 on track, 1 behind or off, 3 cannot be judged. Raises ConfigError for
    options that do not fit, DataError for files that are missing or wrong.
    """
    if args.make is None:
        return _diagnose(args)
    from bert_tools.report.facts import read_facts
    from bert_tools.report.measures import as_json, lines_of
    from bert_tools.report.run_files import find_runs

    runs = [read_facts(files) for files in find_runs(args.run_paths)]
    written = args.make(args, runs)
    shown = [*lines_of(runs), *filter(None, [one_line(written)])]
    print(json.dumps(as_json(runs)) if args.json else "\n".join(shown))
    return 0


def _diagnose(args: argparse.Namespace) -> int:
    from bert_tools.report.doctor import diagnose
    from bert_tools.report.run import read_run
    from bert_tools.report.run_files import only_run
    from mlperf_bert.data.index import Manifest

    baseline = Manifest.load(args.data / "eval").baseline if args.data else None
    run = read_run(only_run(args.run_paths[0]), needs_config=True)
    diagnosis = diagnose(run, baseline)
    print(json.dumps(diagnosis.as_json()) if args.json else "\n".join(diagnosis.lines()))
    return diagnosis.exit_status


def _page(args: argparse.Namespace, runs: "Sequence[RunFacts]") -> str:
    """Write the page, with --json only if --out is given."""
    from bert_tools.report.charts import charts_of
    from mlperf_bert.common.atomic import check_writable, make_directory, write_file

    page, paths = args.out, args.run_paths
    if page is None and args.json:
        return ""
    if page is None:
        in_run = len(paths) == 1 and paths[0].is_dir()
        page = (paths[0] if in_run else Path("runs")) / PAGE
        make_directory(page.parent)
    if page.is_dir():
        raise ConfigError("--out", f"{page} is a directory", f"name a file, as {page / PAGE}")
    check_writable(page)
    from bert_tools.report.page import report_page  # with jinja2

    contents = report_page(runs, *charts_of(runs)).encode("utf-8")
    write_file(page, contents)
    return f"page, {len(contents) / 1e3:,.0f} kB, to be opened in a browser: {page}"


def _pictures(args: argparse.Namespace, runs: "Sequence[RunFacts]") -> str:
    from bert_tools.common.figures import new_figure
    from bert_tools.report.charts import charts_of
    from bert_tools.report.pictures import chart_picture
    from mlperf_bert.common.atomic import make_directory, write_file

    new_figure(1, 1)  # reports a missing matplotlib
    make_directory(args.out)
    charts, _ = charts_of(runs)
    for chart in charts:
        write_file(args.out / f"{chart.key}.png", chart_picture(chart))
    return f"{len(charts)} pictures: {args.out}"


def _tensorboard(args: argparse.Namespace, runs: "Sequence[RunFacts]") -> str:
    from bert_tools.report.tensorboard import check_directory, write_scalars
    from mlperf_bert.common.atomic import check_writable, make_directory

    directories = _scalar_directories(args.out, runs)
    for directory in directories:
        check_directory(directory)
    for directory in directories:  # before anything is written to the first
        make_directory(directory)
        check_writable(directory / PAGE)
    count = sum(write_scalars(*each) for each in zip(directories, runs, strict=True))
    return f"{count:,} scalars, for tensorboard --logdir {args.out}"


def _scalar_directories(directory: Path, runs: "Sequence[RunFacts]") -> list[Path]:
    """One directory per run, named by its label, with a number if two names are equal."""
    if len(runs) == 1:
        return [directory]
    names = [re.sub(r"[^A-Za-z0-9._-]+", "_", each.label).strip(".") or "run" for each in runs]
    if len({name.lower() for name in names}) < len(names):
        names = [f"{number}_{name}" for number, name in enumerate(names, 1)]
    return [directory / name for name in names]
