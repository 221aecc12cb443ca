"""Runs every engine with every seed, one after the other; finished runs are kept."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bert_tools.common.figures import png
from bert_tools.squad.comparison import RESULT, RunRecord, compare_runs, in_words, read_run
from bert_tools.squad.plot import timeline_figure
from bert_tools.squad.settings import SquadSettings
from mlperf_bert.distributed.spawn import run_on_ranks
from mlperf_bert.errors import STOPPED, ConfigError, DataError, say
from mlperf_bert.files import file_sha256, write_file, write_json

RUNS, RECORD, TABLE, PICTURE = "runs", "result.json", "table.md", "timeline.png"
_GOES_ON = "finished runs are kept, and the same command continues"


@dataclass(frozen=True, slots=True)
class Job:
    """One run: its settings, and its directory inside the comparison's."""

    settings: SquadSettings
    directory: Path

    @property
    def title(self) -> str:
        """Title of the run for people."""
        settings = self.settings
        return f"{settings.engine}, batch {settings.global_batch}, seed {settings.seed}"

    @property
    def has_ended(self) -> bool:
        """True if a run has left its record there."""
        return (self.directory / RESULT).exists()


def make_jobs(out: Path, per_engine: Sequence[SquadSettings], batches: Sequence[int]) -> list[Job]:
    """Jobs of every engine at every batch, seed by seed, so that slow spells hit all engines.

    `per_engine` are settings at the first batch for every seed and engine, in order. Raises
    ConfigError for a batch that does not divide the samples of the run.
    """
    jobs = []
    for settings in per_engine:
        for batch in batches:
            changed = at_batch(settings, batch)
            name = str(changed.engine).replace(":", "_")
            name = f"{name}-batch_{batch}-seed_{changed.seed}"
            jobs.append(Job(changed, out / RUNS / name))
    if len({job.directory for job in jobs}) < len(jobs):
        raise ConfigError("--engines", "has one of them twice", "name each once")
    return jobs


def at_batch(settings: SquadSettings, batch: int) -> SquadSettings:
    """Settings for the same samples in batches of another size.

    The learning rate follows the root of the batch, as suits Adam and its kin.
    """
    first = settings.global_batch
    updates = settings.updates
    if updates is not None:
        if updates * first % batch:
            problem = f"{batch} does not divide the {updates * first:,} samples of a run"
            raise ConfigError("--batches", problem, "choose --updates so that all of them do")
        updates = updates * first // batch
    rate = settings.learning_rate * math.sqrt(batch / first)
    return replace(settings, global_batch=batch, updates=updates, learning_rate=rate)


def read_ended(jobs: Sequence[Job]) -> list[RunRecord]:
    """The records of the jobs that have ended; `jobs` share their question sets and vocabulary.

    Raises DataError if a record cannot be read, or is of a run with other settings or files.
    """
    ended = [job for job in jobs if job.has_ended]
    runs = [read_run(job.directory) for job in ended]
    digests = _digests(ended[0].settings) if ended else {}
    for job, run in zip(ended, runs, strict=True):
        before = run.settings | {name: run.same.get(f"data.{name}") for name in digests}
        for key, now in (job.settings.to_record() | digests).items():
            if before.get(key) != now:
                problem = f"{key} is {now!r} now, and was {before.get(key)!r}"
                remedy = "give another --out, or the same options as before"
                raise DataError(str(job.directory), problem, remedy)
    return runs


def _digests(settings: SquadSettings) -> dict[str, str]:
    """Digests of the question sets, and of the vocabulary if there is one already."""
    files = {"train_sha256": settings.train, "dev_sha256": settings.dev}
    if settings.vocab is not None and settings.vocab.exists():
        files["vocabulary_sha256"] = settings.vocab
    try:
        return {name: file_sha256(path) for name, path in files.items()}
    except OSError as error:
        problem = f"{error.filename or 'a file'}: {error.strerror or 'cannot be read'}"
        raise DataError("--train, --dev, --vocab", problem, "give files that exist") from None


def run_jobs(jobs: Sequence[Job]) -> int:
    """Run the unfinished jobs; returns 0, or the status of the run that failed and ended them."""
    waiting = [job for job in jobs if not job.has_ended]
    if len(waiting) < len(jobs):
        say(f"{len(jobs) - len(waiting)} of {len(jobs)} runs have ended before and are kept")
    begun = time.monotonic()
    for done, job in enumerate(waiting):
        say(f"{done + 1} of {len(waiting)}: {job.title}{_left(begun, done, len(waiting))}")
        words = ["squad", "train", "--record-only", "--run-dir", str(job.directory.absolute())]
        status = run_on_ranks(words + job.settings.as_words(), job.settings.engine.ranks)
        if status != 0:
            what = "stopped" if status == STOPPED else f"ended with status {status}"
            say(f"{job.title}: {what}; {_GOES_ON}")
            return status
    return 0


def _left(begun: float, done: int, of: int) -> str:
    if not done:
        return ""
    seconds = (time.monotonic() - begun) / done * (of - done)
    shown = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
    return f"; about {shown} left"


def write_comparison(out: Path, runs: Sequence[RunRecord], initial_batch: int) -> dict[str, Any]:
    """Write the record, the table made of it and the picture; returns the record."""
    comparison = compare_runs(runs, initial_batch)
    write_file(out / RECORD, write_json(comparison))
    write_file(out / TABLE, (in_words(comparison) + "\n").encode("utf-8"))
    first_seed = min(run.seed for run in runs)
    figure = timeline_figure([run for run in runs if run.seed == first_seed])
    if figure is not None:
        write_file(out / PICTURE, png(figure, 110))
    return comparison
