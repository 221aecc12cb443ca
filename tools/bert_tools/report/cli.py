"""The sub-command `report`: its arguments, its printing, and its files."""

import argparse
import os
import platform
import re
import time
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from mlperf_bert.errors import ConfigError, one_line

if TYPE_CHECKING:
    from bert_tools.report.run import Run

PAGE = "report.html"
_NOT_SCALARS = ("step", "samples")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands of `report`."""
    commands = parser.add_subparsers(required=True, metavar="KIND")
    page = commands.add_parser("page", help="a page to open in a browser")
    page.set_defaults(make=_page)
    tensorboard = commands.add_parser("tensorboard", help="all numbers as TensorBoard scalars")
    tensorboard.set_defaults(make=_tensorboard)
    for command in (page, tensorboard):
        text = "run directory, or its run_<i>; several are compared side by side"
        command.add_argument("run_paths", type=Path, nargs="+", metavar="RUN", help=text)
    text = f"default: {PAGE} in the run, or in runs/"
    page.add_argument("--out", type=Path, metavar="FILE", help=text)
    tensorboard.add_argument("--out", type=Path, metavar="DIR", required=True, help="log directory")


def run(args: argparse.Namespace) -> int:
    """Write the requested files and print how the runs ended and the files' names; return 0.

    Raises ConfigError for options that do not fit, DataError for files that are missing or wrong.
    """
    from bert_tools.report.run import find_runs, read_run

    runs = [read_run(folder, label) for label, folder in find_runs(args.run_paths).items()]
    written = args.make(args, runs)
    for line in (*(f"{each.name}: {each.state}" for each in runs), written):
        print(one_line(line))
    return 0


def _page(args: argparse.Namespace, runs: "Sequence[Run]") -> str:
    from mlperf_bert.files import check_writable, make_directory, write_file

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


def _tensorboard(args: argparse.Namespace, runs: "Sequence[Run]") -> str:
    from mlperf_bert.files import check_writable, make_directory

    directories = _scalar_directories(args.out, runs)
    for directory in directories:
        _check_directory(directory)
    for directory in directories:  # before anything is written to the first
        make_directory(directory)
        check_writable(directory / PAGE)
    count = sum(_write_scalars(*each) for each in zip(directories, runs, strict=True))
    return f"{count:,} scalars, for tensorboard --logdir {args.out}"


def _scalar_directories(directory: Path, runs: "Sequence[Run]") -> list[Path]:
    """One directory per run, named by its label, with a number if two names are equal."""
    if len(runs) == 1:
        return [directory]
    names = [re.sub(r"[^A-Za-z0-9._-]+", "_", each.label).strip(".") or "run" for each in runs]
    if len({name.lower() for name in names}) < len(names):
        names = [f"{number}_{name}" for number, name in enumerate(names, 1)]
    return [directory / name for name in names]


def _check_directory(directory: Path) -> None:
    """Raise ConfigError if TensorBoard is not installed, or would find an event file already."""
    try:
        import tensorboard.compat.proto.event_pb2
        import tensorboard.compat.proto.summary_pb2  # noqa: F401
    except ImportError:
        remedy = "run in the checkout: tools/venv.sh tensorboard"
        raise ConfigError("tensorboard", "is not installed", remedy) from None
    if any(directory.glob("events.out.tfevents.*")):
        problem = "holds an event file already"
        raise ConfigError(str(directory), problem, "name another directory, or remove the file")


def _write_scalars(directory: Path, run: "Run") -> int:
    """Write one event file into a directory that `_check_directory` accepted; number of scalars.

    The time of a record is not known and is 0. Raises DataError if it cannot be written.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    from mlperf_bert.files import write_file

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
