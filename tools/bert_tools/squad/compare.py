"""Runs every engine with every seed, one after the other; finished runs are kept."""

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from bert_tools.bench.flops import measure_peak
from bert_tools.common.figures import png
from bert_tools.common.machine import read_machine
from bert_tools.squad.comparison import RESULT, Comparison, RunRecord, read_run
from bert_tools.squad.noise_scale import learning_rate_gain
from bert_tools.squad.plot import goodput_figure, timeline_figure
from bert_tools.squad.settings import SquadSettings
from bert_tools.squad.table import TITLE, in_words, published_study
from mlperf_bert.checkpoint.manifest import read_config
from mlperf_bert.common.atomic import make_directory, write_file
from mlperf_bert.common.errors import STOPPED, ConfigError, DataError, say
from mlperf_bert.common.machine import usable_cpus
from mlperf_bert.common.records import read_record, write_json
from mlperf_bert.common.untrusted import file_sha256
from mlperf_bert.distributed.spawn import run_on_ranks

Begun = Literal["new", "same", "other"]
RateRule = Literal["square_root", "keep"]

STUDY, RUNS, PEAK, TABLE = "comparison.json", "runs", "peak.json", "table.md"
PEAK_SECONDS = 3.0
_PEAK_ROWS = 4096  # tokens: enough that a product is bound by arithmetic
SCHEMA_VERSION = 1
_REMEDY = "give another --out, or the same options as before"
_GOES_ON = "finished runs are kept, and the same command continues"


@dataclass(frozen=True, slots=True)
class Job:
    """One run: its settings, and its directory inside the comparison's."""

    settings: SquadSettings
    directory: Path

    @property
    def title(self) -> str:
        """Title of the run for people."""
        engine = self.settings.engine
        schedule = f"@{engine.schedule}" if engine.schedule not in (None, "1f1b") else ""
        batch = self.settings.global_batch
        return f"{engine}{schedule}, batch {batch}, seed {self.settings.seed}"


def make_jobs(
    out: Path, per_engine: Sequence[SquadSettings], batches: Sequence[int], rule: RateRule
) -> list[Job]:
    """Jobs of every engine at every batch, seed by seed, so that slow spells hit all engines.

    `per_engine` are settings at the first batch for every seed and engine, in order. Every batch
    trains on as many samples as the first; the learning rate follows the batch by the rule. Raises
    ConfigError for a batch that does not divide the samples of the run.
    """
    jobs = []
    for settings in per_engine:
        for batch in batches:
            changed = at_batch(settings, batch, rule)
            engine = changed.engine
            name = f"{engine}-{engine.schedule}" if engine.schedule else str(engine)
            name = f"{name.replace(':', '_')}-batch_{batch}-seed_{changed.seed}"
            jobs.append(Job(changed, out / RUNS / name))
    if len({job.directory for job in jobs}) < len(jobs):
        raise ConfigError("--engines", "has one of them twice", "name each once")
    return jobs


def at_batch(settings: SquadSettings, batch: int, rule: RateRule) -> SquadSettings:
    """Settings for the same samples in batches of another size."""
    first = settings.global_batch
    updates = settings.updates
    if updates is not None:
        if updates * first % batch:
            problem = f"{batch} does not divide the {updates * first:,} samples of a run"
            raise ConfigError("--batches", problem, "choose --updates so that all of them do")
        updates = updates * first // batch
    rate = settings.learning_rate
    if rule == "square_root":
        rate *= learning_rate_gain(0.0, first, batch, "square_root")
    return replace(settings, global_batch=batch, updates=updates, learning_rate=rate)


def hold_to_comparison(out: Path, facts: dict[str, Any]) -> Begun:
    """Record what is compared, or check that it is the same as before.

    Returns "same" if the comparison continues; "new" if there was none; "other" if it replaces one
    without a finished run, as after a mistake in the options. Raises DataError if the directory has
    runs of another comparison, or cannot be written.
    """
    path = out / STUDY
    begun: Begun = "new"
    if path.exists():
        difference = _difference(path, facts)
        if difference is None:
            return "same"
        if any(map(_has_ended, (out / RUNS).glob("*"))):
            raise DataError(str(out), difference, _REMEDY)
        begun = "other"
        (out / PEAK).unlink(missing_ok=True)  # of another model, perhaps
    make_directory(out)
    write_file(path, write_json({"schema_version": SCHEMA_VERSION, "same": facts}))
    return begun


def _difference(path: Path, facts: dict[str, Any]) -> str | None:
    """The difference to the earlier comparison in words; None if there is none."""
    before = read_record(path, missing="is missing", remedy=_REMEDY)
    before.integer("schema_version", SCHEMA_VERSION, SCHEMA_VERSION)
    old = before.record("same").values
    now = json.loads(json.dumps(facts))
    for key in sorted(old.keys() | now.keys()):
        if old.get(key) != now.get(key):
            return f"{key} is {now.get(key)!r} now, and was {old.get(key)!r}"
    return None


def facts_of(settings: SquadSettings) -> dict[str, Any]:
    """Facts that all runs of a comparison share: data digests, weights, settings, machine.

    Engines, seeds and batches may be added later.
    """
    free = ("global_batch", "updates", "learning_rate", "evaluate_every")
    files = {"train": settings.train, "dev": settings.dev, "vocabulary": settings.vocab}
    begins, updates = settings.init_checkpoint, settings.updates
    return {
        **{name: None if path is None else _digest(path) for name, path in files.items()},
        "init_checkpoint": None if begins is None else str(begins),
        "model": None if begins else [settings.layers, settings.hidden, settings.heads],
        "device": settings.device,
        "machine": _machine(settings.device),
        "precision": settings.precision,
        **{key: value for key, value in settings.to_record().items() if key not in free},
        "samples": None if updates is None else updates * settings.global_batch,
        "learning_rate_over_root_of_batch": settings.learning_rate
        / math.sqrt(settings.global_batch),
    }


def _digest(path: Path) -> str:
    try:
        return file_sha256(path)
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise DataError(str(path), reason, "give a file that can be read") from None


def _machine(device: str) -> list[str | int]:
    """The machine: times on another processor or fewer cores belong to another comparison."""
    found: list[str | int] = [read_machine().cpu_model or "unknown", len(usable_cpus())]
    if device != "cpu" and torch.cuda.is_available():
        found += [torch.cuda.get_device_name(0), torch.cuda.device_count()]
    return found


def peak_of_machine(out: Path, settings: SquadSettings) -> dict[str, Any]:
    """Peak of matrix products on this machine, measured once per comparison.

    `tflops` is that of one GPU, or of all cores, the base of MFU; None if unknown. `means` says how
    it was measured, or why not. Raises DataError for a file that is none of ours.
    """
    path = out / PEAK
    if path.exists():
        remedy = "remove it: it is measured again"
        record = read_record(path, missing="is missing", remedy=remedy)
        tflops = record.number("tflops") if record.has("tflops") else None
        return {"tflops": tflops, "means": record.text("means")}
    peak = _measure_peak(settings)
    write_file(path, write_json(peak))
    return peak


def _measure_peak(settings: SquadSettings) -> dict[str, Any]:
    if settings.precision == "fp64":
        return {"tflops": None, "means": "not measured in fp64"}
    model = settings.random_model(1)
    if settings.init_checkpoint is not None:
        model = read_config(settings.init_checkpoint).model
    model = replace(model, precision=settings.precision)
    on_gpu = settings.device != "cpu" and torch.cuda.is_available()
    say(f"measuring the peak of matrix products, {PEAK_SECONDS:g} s")
    before = torch.get_num_threads()
    if not on_gpu:
        torch.set_num_threads(len(usable_cpus()))
    try:
        device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        peak = measure_peak(model, _PEAK_ROWS, device, PEAK_SECONDS)
    finally:
        torch.set_num_threads(before)
    where = "one GPU" if on_gpu else f"all {len(usable_cpus())} cores"
    words = (
        f"what {peak.dtype} products of the feed-forward part reach on {where}, measured for "
        f"{PEAK_SECONDS:g} s before the runs"
    )
    return {"tflops": peak.long_tflops, "means": peak.reason or words}


def run_jobs(jobs: Sequence[Job]) -> tuple[list[RunRecord], int]:
    """Run the unfinished jobs; returns all records, and 0 or the status of the failed run.

    Raises DataError if a run left no readable record.
    """
    waiting = [job for job in jobs if not _has_ended(job.directory)]
    if len(waiting) < len(jobs):
        say(f"{len(jobs) - len(waiting)} of {len(jobs)} runs have ended before and are kept")
    begun, status = time.monotonic(), 0
    for done, job in enumerate(waiting):
        say(f"{done + 1} of {len(waiting)}: {job.title}{_left(begun, done, len(waiting))}")
        words = ["squad", "train", "--quiet", "--save", "nothing"]
        words += ["--run-dir", str(job.directory.absolute()), *job.settings.as_words()]
        status = run_on_ranks(words, job.settings.engine.ranks)
        if status != 0:
            what = "stopped" if status == STOPPED else f"ended with status {status}"
            say(f"{job.title}: {what}; {_GOES_ON}")
            break
    return [read_run(job.directory) for job in jobs if _has_ended(job.directory)], status


def _has_ended(directory: Path) -> bool:
    """True if a run has left its record there, readable or not."""
    return os.path.lexists(directory / RESULT)


def _left(begun: float, done: int, of: int) -> str:
    if not done:
        return ""
    seconds = (time.monotonic() - begun) / done * (of - done)
    shown = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
    return f"; about {shown} left"


def write_comparison(out: Path, comparison: Comparison) -> dict[str, Any]:
    """Write table, JSON and pictures; returns the JSON object."""
    first_seed = min(run.seed for run in comparison.runs)
    figures = {
        "goodput.png": goodput_figure(comparison),
        "timeline.png": timeline_figure([run for run in comparison.runs if run.seed == first_seed]),
    }
    pictures = {name: png(each, 110) for name, each in figures.items() if each is not None}
    answer = {
        "schema_version": 1,
        **comparison.as_json(),
        "study": {"title": TITLE, "rows": published_study()},
        "pictures": [str(out / name) for name in pictures],
    }
    for name, picture in pictures.items():
        write_file(out / name, picture)
    write_file(out / TABLE, (in_words(comparison) + "\n").encode("utf-8"))
    write_file(out / "result.json", write_json(answer))
    return answer
