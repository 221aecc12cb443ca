"""The sub-command `report`: its arguments, its printing, and its files."""

import argparse
import os
import platform
import time
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from bert_tools.report.run import Run, find_runs, read_run
from mlperf_bert.errors import ConfigError, one_line
from mlperf_bert.files import check_writable, make_directory, write_file

PAGE = "report.html"
_NOT_SCALARS = ("step", "samples")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands of `report`."""
    commands = parser.add_subparsers(required=True, metavar="KIND")
    page = commands.add_parser("page", help="a page to open in a browser")
    page.set_defaults(make=_page)
    tensorboard = commands.add_parser("tensorboard", help="all numbers as TensorBoard scalars")
    tensorboard.set_defaults(make=_tensorboard)
    text = "run directory, or its run_<i>; several are compared side by side"
    page.add_argument("run_paths", type=Path, nargs="+", metavar="RUN", help=text)
    text = "run directory with one run, or its run_<i>"
    tensorboard.add_argument("run_paths", type=Path, nargs=1, metavar="RUN", help=text)
    text = f"default: {PAGE} in the run, or in runs/"
    page.add_argument("--out", type=Path, metavar="FILE", help=text)
    tensorboard.add_argument("--out", type=Path, metavar="DIR", required=True, help="log directory")


def run(args: argparse.Namespace) -> int:
    """Write the requested files and print how the runs ended and the files' names; return 0.

    Raises ConfigError for options that do not fit, DataError for files that are missing or wrong.
    """
    runs = [read_run(folder, label) for label, folder in find_runs(args.run_paths).items()]
    written = args.make(args, runs)
    for line in (*(f"{each.name}: {each.state}" for each in runs), written):
        print(one_line(line))
    return 0


def _page(args: argparse.Namespace, runs: Sequence[Run]) -> str:
    page, paths = args.out, args.run_paths
    if page is None:
        page = (paths[0] if len(paths) == 1 else Path("runs")) / PAGE
        make_directory(page.parent)
    if page.is_dir():
        raise ConfigError("--out", f"{page} is a directory", f"name a file, as {page / PAGE}")
    check_writable(page)
    from bert_tools.report.page import report_page  # with jinja2

    contents = report_page(runs).encode("utf-8")
    write_file(page, contents)
    return f"page, {len(contents) / 1e3:,.0f} kB, to be opened in a browser: {page}"


def _tensorboard(args: argparse.Namespace, runs: Sequence[Run]) -> str:
    """Write one event file. Raises ConfigError if TensorBoard would find another beside it."""
    if len(runs) > 1:
        problem = f"holds {len(runs)} runs"
        raise ConfigError(str(args.run_paths[0]), problem, f"name one, as {runs[0].name}")
    try:
        import tensorboard.compat.proto.event_pb2
        import tensorboard.compat.proto.summary_pb2  # noqa: F401
    except ImportError:
        remedy = "run in the checkout: tools/venv.sh tensorboard"
        raise ConfigError("tensorboard", "is not installed", remedy) from None
    if any(args.out.glob("events.out.tfevents.*")):
        problem = "holds an event file already"
        raise ConfigError(str(args.out), problem, "name another directory, or remove the file")
    make_directory(args.out)
    check_writable(args.out / PAGE)
    count = _write_scalars(args.out, runs[0])
    return f"{count:,} scalars, for tensorboard --logdir {args.out}"


def _write_scalars(directory: Path, run: Run) -> int:
    """Write one event file into the directory; the number of its scalars.

    The time of a record is not known and is 0. Raises DataError if it cannot be written.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    contents = BytesIO()
    # Not its EventFileWriter, whose thread prints a traceback on a full disk.
    writer = RecordWriter(contents)
    writer.write(Event(file_version="brain.Event:2").SerializeToString())
    count = 0
    for record in run.records:
        for name, value in record.items():
            if name not in _NOT_SCALARS and value is not None:
                summary = Summary(value=[Summary.Value(tag=name, simple_value=float(value))])
                writer.write(Event(step=record["step"], summary=summary).SerializeToString())
                count += 1
    name = f"events.out.tfevents.{int(time.time()):010d}.{platform.node()}.{os.getpid()}"
    write_file(directory / name, contents.getvalue())
    return count
