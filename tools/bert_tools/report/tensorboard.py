"""A run's numbers as TensorBoard scalars; needs the extra `tensorboard`."""

import os
import platform
import time
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from bert_tools.report.run import Run
from mlperf_bert.errors import ConfigError
from mlperf_bert.files import write_file

_NOT_SCALARS = ("step", "samples")


def check_directory(directory: Path) -> None:
    """Raise ConfigError where TensorBoard is not installed, cannot name the directory, or would
    find an event file in it already.
    """
    try:
        import tensorboard.compat.proto.event_pb2
        import tensorboard.compat.proto.summary_pb2  # noqa: F401
    except ImportError:
        remedy = "run in the checkout: tools/venv.sh tensorboard"
        raise ConfigError("tensorboard", "is not installed", remedy) from None
    try:
        str(directory).encode("utf-8")
    except UnicodeEncodeError:
        problem = "has a name that is not UTF-8, which TensorBoard cannot write to"
        raise ConfigError(str(directory), problem, "name another directory") from None
    if any(directory.glob("events.out.tfevents.*")):
        problem = "holds an event file already"
        raise ConfigError(str(directory), problem, "name another directory, or remove the file")


class _Events:
    """An event file that is being written. The time of a record is not known and is 0."""

    def __init__(self, file: BinaryIO) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        # Not its EventFileWriter, whose thread prints a traceback on a full disk.
        self._records = RecordWriter(file)
        self._records.write(Event(file_version="brain.Event:2").SerializeToString())

    def add(self, step: int, name: str, value: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
        self._records.write(Event(step=step, summary=summary).SerializeToString())


def write_scalars(directory: Path, run: Run) -> int:
    """Write one event file into a directory that `check_directory` accepted; number of scalars.

    Raises DataError if it cannot be written.
    """
    contents = BytesIO()
    events = _Events(contents)
    scalars = [each for record in run.records for each in _scalars(record)]
    for scalar in scalars:
        events.add(*scalar)
    write_file(directory / _file_name(), contents.getvalue())
    return len(scalars)


def _scalars(record: Mapping[str, Any]) -> Iterator[tuple[int, str, float]]:
    for name, value in record.items():
        if name not in _NOT_SCALARS and value is not None:
            yield record["step"], name, float(value)


def _file_name() -> str:
    return f"events.out.tfevents.{int(time.time()):010d}.{platform.node()}.{os.getpid()}"
