"""Whether a prepared set, or a pair of train/ and eval/, is whole and right.

The fast check reads no sample; the full one reads every byte of every shard, in parallel.
"""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.common.file_progress import progress_of
from mlperf_bert.data.index import Manifest, Sidecar, is_partial
from mlperf_bert.data.set_checks import PAIR_REMEDY, shared_texts
from mlperf_bert.prepare.pool import finished
from mlperf_bert.prepare.sandbox import Sandbox, sandbox
from mlperf_bert.prepare.verify.full import LAYOUT_READER, FullCheck, VerifyJob, verify_shard
from mlperf_bert.prepare.verify.rates import check_leak
from mlperf_bert.prepare.verify.report import Check, Report, SetReport, length_statistics
from mlperf_bert.prepare.verify.set_files import (
    check_file_names,
    check_index,
    check_manifest,
    check_settings,
    check_sidecars,
    check_sizes,
    check_sources,
    check_vocabulary,
)

PAIR = ("train", "eval")


def verify(
    directory: Path,
    *,
    full: bool,
    workers: int,
    quiet: bool = False,
    layouts: Sandbox | None = None,
) -> Report:
    """Check `directory`: one prepared set, or the parent of the sets train/ and eval/.

    Args:
        directory: the set or the pair.
        full: read the shards too.
        workers: processes of a full check; 1 works in this process.
        quiet: show no progress of a full check.
        layouts: a running sandbox with LAYOUT_READER for a full check; None: start one.

    Raises:
        ConfigError: `workers` out of range, or no sandbox can be started.
        DataError: there is no such directory, or a worker process died. What is wrong with the
            files is in the report.
    """
    if not 1 <= workers <= 4096:
        raise ConfigError("workers", f"is {workers}", "set it within 1 .. 4096")
    if not directory.is_dir():
        raise DataError(str(directory), "is not a directory", "name a prepared set or its parent")
    is_pair = any((directory / name).is_dir() for name in PAIR)
    is_pair = is_pair and not (directory / "index").exists()
    names = {name: directory / name for name in PAIR} if is_pair else {"set": directory}
    sets = [_Set(set_dir, name, full=full) for name, set_dir in names.items()]
    if full:
        with nullcontext(layouts) if layouts else sandbox(LAYOUT_READER) as running:
            _examine(sets, running, workers, quiet)
        for part in sets:
            part.judge()
    reports = [SetReport(part.name, tuple(part.checks), part.statistics) for part in sets]
    if is_pair:
        reports.append(SetReport("train and eval", tuple(_between(*sets))))
    return Report(directory, "full" if full else "fast", tuple(reports))


class _Set:
    """One prepared set: its fast checks are made here, its full ones when `judge` is called."""

    def __init__(self, set_dir: Path, name: str, *, full: bool) -> None:
        self.set_dir = set_dir
        self.name = name
        self.full: FullCheck | None = None
        self.sidecars: dict[str, Sidecar] = {}
        self.statistics: dict[str, Any] = {}
        check, self.manifest = check_manifest(set_dir)
        self.checks = [check]
        if self.manifest is not None:
            self._add_fast_checks(self.manifest, full)

    def _add_fast_checks(self, manifest: Manifest, full: bool) -> None:
        set_dir = self.set_dir
        vocabulary = check_vocabulary(set_dir, manifest)
        sidecars, self.sidecars = check_sidecars(set_dir, manifest)
        self.checks += [vocabulary, sidecars, check_sizes(set_dir, manifest, self.sidecars)]
        if self.sidecars:
            self.checks.append(check_settings(set_dir, manifest, self.sidecars))
            self.checks.append(check_sources(set_dir, self.sidecars))
        index = check_index(set_dir, manifest)
        self.checks += [check_file_names(set_dir, manifest), index]
        self.statistics = length_statistics(manifest.length_histogram)
        if full and vocabulary.status == "ok" and not is_partial(set_dir):
            is_right = index.status == "ok"
            self.full = FullCheck(set_dir, manifest, self.sidecars, index_is_right=is_right)

    def jobs(self, layouts: Sandbox) -> Iterator[VerifyJob]:
        """The shards to read for the full check."""
        return iter(()) if self.full is None else self.full.jobs(layouts)

    def judge(self) -> None:
        """Add the full checks, once every shard was read."""
        if self.full is None:
            problem = "not read: manifest or vocabulary is wrong"
            if self.manifest is not None and is_partial(self.set_dir):
                problem = "not read: a partial stage (stage.json) holds some samples only"
            self.checks.append(Check("shards in full", problem, was_made=False))
            return
        checks, rates = self.full.checks()
        self.checks += checks
        self.statistics |= rates


def _examine(sets: list[_Set], layouts: Sandbox, workers: int, quiet: bool) -> None:
    parts = {part.set_dir: part for part in sets}
    jobs = [job for part in sets for job in part.jobs(layouts)]
    sizes = {job.path: _size(job.path) for job in jobs}
    words = ("verified", "shards")
    died = "a worker process died: want of memory, or a shard was cut while it was read"
    # The report has stdout to itself.
    with progress_of(
        len(jobs), sum(sizes.values()), quiet=quiet, words=words, stream=sys.stderr
    ) as advance:
        for job, findings in finished(verify_shard, jobs, workers, died=died):
            part = parts[job.set_dir]
            assert part.full is not None
            part.full.take(job.entry.file, findings)
            # Not the file's name: it may be hostile, and the bar takes it for markup.
            advance(part.name, sizes[job.path])


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return 0  # reported by the fast check


def _between(train: _Set, held_out: _Set) -> Iterator[Check]:
    problems = []
    if train.manifest is not None and held_out.manifest is not None:
        ours, theirs = held_out.manifest.vocabulary_sha256, train.manifest.vocabulary_sha256
        if ours != theirs:
            problem = f"has the vocabulary {ours}, train has {theirs}"
            problems.append(DataError(str(held_out.set_dir), problem, PAIR_REMEDY))
        yield Check("one vocabulary", "", tuple(problems))
    problems = shared_texts(held_out.set_dir, train.sidecars, held_out.sidecars)
    yield Check("separate texts", "", tuple(problems))
    if train.full is not None and held_out.full is not None:
        yield check_leak(held_out.set_dir, train.full.hashes, held_out.full.hashes)
