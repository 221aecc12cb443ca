"""Defines the sub-command `report`, which writes an HTML page or TensorBoard scalars."""

import argparse
import os
import platform
import time
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from bert_tools.report.run import Run, find_runs, read_run
from mlperf_bert.arguments import add_command
from mlperf_bert.errors import ConfigError, one_line
from mlperf_bert.extras import require_packages
from mlperf_bert.files import check_writable, write_file

PAGE = "report.html"
_NOT_SCALARS = ("step", "samples")  # positions, not measurements


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands of `report` to its parser."""
    parser.description = "Write the records of finished or running runs as a page or as scalars."
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    page = add_command(
        commands,
        "page",
        "write an HTML page about one or several runs",
        "Write one HTML page with the curves, settings and metrics of one run, or of several runs "
        "side by side. The command needs no network.",
        "mlperf_bert report page runs/two --out report.html",
    )
    page.set_defaults(make=_page)
    tensorboard = add_command(
        commands,
        "tensorboard",
        "write all metrics as TensorBoard scalars",
        "Write all metrics of one run as TensorBoard scalars.",
        "mlperf_bert report tensorboard runs/two --out runs/two/tensorboard",
    )
    tensorboard.set_defaults(make=_tensorboard)
    text = "run directories, or their folders run_N, which the page shows side by side"
    page.add_argument("run_paths", type=Path, nargs="+", metavar="RUN", help=text)
    text = "run directory with a single run, or one of its folders run_N"
    tensorboard.add_argument("run_paths", type=Path, nargs=1, metavar="RUN", help=text)
    text = f"file to write the page to (default: {PAGE} in the run, or in runs/ for several runs)"
    page.add_argument("--out", type=Path, metavar="FILE", help=text)
    text = "directory to write the event file to"
    tensorboard.add_argument("--out", type=Path, metavar="DIR", required=True, help=text)


def run(args: argparse.Namespace) -> int:
    """Write the requested files, print how the runs ended and the files' names, and return 0.

    Raises ConfigError for an option that cannot be used, and DataError for a file that is missing
    or damaged.
    """
    if args.make is _tensorboard:
        require_packages("report tensorboard", "tensorboard", "tensorboard")
    runs = [read_run(folder, label) for label, folder in find_runs(args.run_paths).items()]
    written = args.make(args, runs)
    for line in (*(f"{each.name}: {each.state}" for each in runs), written):
        print(one_line(line))
    return 0


def _page(args: argparse.Namespace, runs: Sequence[Run]) -> str:
    """Write the HTML page and return a line with its size and path."""
    page, paths = args.out, args.run_paths
    if page is None:
        page = (paths[0] if len(paths) == 1 else Path("runs")) / PAGE
    if page.is_dir():
        raise ConfigError("--out", f"{page} is a directory", f"pass a file, such as {page / PAGE}")
    check_writable(page)
    from bert_tools.report.page import report_page  # imports jinja2, which only this command needs

    contents = report_page(runs).encode("utf-8")
    write_file(page, contents)
    return f"open this page ({len(contents) / 1e3:,.0f} kB) in a browser: {page}"


def _tensorboard(args: argparse.Namespace, runs: Sequence[Run]) -> str:
    """Write a run's TensorBoard event file and return a line with the command that shows it.

    Raises ConfigError if there are several runs, or if the directory already contains an event
    file, because TensorBoard would merge both files.
    """
    if len(runs) > 1:
        problem = f"has {len(runs)} runs"
        raise ConfigError(str(args.run_paths[0]), problem, f"pass one run, such as {runs[0].name}")
    if any(args.out.glob("events.out.tfevents.*")):
        problem = "already contains an event file"
        raise ConfigError(str(args.out), problem, "pass another directory, or remove the file")
    check_writable(args.out / PAGE)
    count = _write_scalars(args.out, runs[0])
    return f"wrote {count:,} scalars; to show them: tensorboard --logdir {args.out}"


def _write_scalars(directory: Path, run: Run) -> int:
    """Write a run's metrics to a TensorBoard event file and return the number of scalars in it.

    The wall time of every event is 0, because metrics.jsonl has no times. Raises DataError if the
    file cannot be written.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    contents = BytesIO()
    # TensorBoard's EventFileWriter is not used, because its thread prints a traceback when the
    # disk is full.
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
