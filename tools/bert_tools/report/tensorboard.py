"""A run's numbers as TensorBoard scalars, written after the fact; needs the extra `tensorboard`."""

import os
import platform
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from bert_tools.report.facts import RunFacts
from mlperf_bert.common.atomic import write_file
from mlperf_bert.common.errors import ConfigError

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


def write_scalars(directory: Path, facts: RunFacts) -> int:
    """Write one event file into a directory that `check_directory` let pass; how many scalars.

    Steps are the run's steps; of a run without metrics, whose steps are not known, its samples.
    The time of a record is not known and is 0. Raises DataError where it cannot be written.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    # Not its EventFileWriter: the thread of that prints a traceback where the disk is full.
    contents = BytesIO()
    records = RecordWriter(contents)
    records.write(Event(file_version="brain.Event:2").SerializeToString())
    count = 0
    for step, name, value in _scalars(facts):
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
        records.write(Event(step=step, summary=summary).SerializeToString())
        count += 1
    name = f"events.out.tfevents.{int(time.time()):010d}.{platform.node()}.{os.getpid()}"
    write_file(directory / name, contents.getvalue())
    return count


def _scalars(facts: RunFacts) -> Iterator[tuple[int, str, float]]:
    for record in facts.run.records:
        for name, value in record.items():
            if name not in _NOT_SCALARS and value is not None:
                yield record["step"], name, float(value)
    if not facts.run.records:
        for each in facts.run.evaluations:
            yield each.samples, "mlm_accuracy", each.accuracy
        for samples, rate in facts.run.timing.rates if facts.run.timing else ():
            yield samples, "samples_per_s", rate
