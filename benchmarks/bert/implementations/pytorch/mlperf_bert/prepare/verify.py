"""Checks that a prepared set, or a pair of train/ and eval/, is complete and right.

The fast check compares manifest, vocabulary, sidecars, sizes and index with each other, as training
does when it starts. It goes on after a problem, so one report names every wrong file. It hashes the
shards too if those are small together. The full check reads every shard: its digest, its samples,
and the index against them.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.data.contents import SMALL_BYTES
from mlperf_bert.data.index import REMEDY as INDEX_REMEDY
from mlperf_bert.data.index import (
    LengthIndex,
    Manifest,
    ShardEntry,
    Sidecar,
    read_sidecar,
    sidecar_path,
)
from mlperf_bert.data.set_checks import (
    PAIR_REMEDY,
    SHARD_REMEDY,
    VOCABULARY_REMEDY,
    check_index_file,
    check_index_ranges,
    check_sidecar_digest,
    repeated_texts,
    shared_texts,
    wrong_settings,
)
from mlperf_bert.data.shards import Shard
from mlperf_bert.errors import ConfigError, DataError, one_line
from mlperf_bert.files import check_digest, check_size, is_temporary, names_in
from mlperf_bert.prepare.contents import Tally, check_arrays, check_labels, check_unknown
from mlperf_bert.prepare.pool import finished_in_sight
from mlperf_bert.vocabulary.any_vocabulary import load_any_vocabulary
from mlperf_bert.vocabulary.word_pieces import SPECIAL_TOKENS

PAIR = ("train", "eval")
MAX_PROBLEM_LINES = 20
SAMPLES_AT_A_TIME = 2**22


@dataclass(slots=True)
class Report:
    """What was found: a few lines about each set, and all problems."""

    directory: Path
    is_full: bool
    lines: list[str] = field(default_factory=list)
    problems: list[DataError] = field(default_factory=list)

    def to_text(self) -> str:
        """The lines, then the problems, of which the first twenty are shown."""
        check = "full" if self.is_full else "fast"
        lines = [f"{self.directory}, {check} check", *self.lines]
        count = len(self.problems)
        lines.append(f"{count} problem{'s' if count > 1 else ''}:" if count else "no problem found")
        lines += [f"  {problem}" for problem in self.problems[:MAX_PROBLEM_LINES]]
        if len(self.problems) > MAX_PROBLEM_LINES:
            lines.append(f"  and {len(self.problems) - MAX_PROBLEM_LINES} more")
        return "\n".join(one_line(line) for line in lines)

    def raise_if_wrong(self) -> None:
        """Raise a DataError that counts the problems and names the first."""
        if self.problems:
            where, problem, remedy = (one_line(text) for text in self.problems[0].args)
            summary = f"{len(self.problems)} wrong, the first: {where}: {problem}"
            raise DataError(one_line(str(self.directory)), summary, remedy)

    def note(self, check: Callable[..., object], *args: object) -> bool:
        """Make a check, keep the DataError that it may raise; True if it raised none."""
        try:
            check(*args)
        except DataError as error:
            self.problems.append(error)
            return False
        return True


def verify(directory: Path, *, full: bool, workers: int, quiet: bool = False) -> Report:
    """Check `directory`: one prepared set, or the parent of the sets train/ and eval/.

    Args:
        directory: the set or the pair.
        full: read the shards too, in `workers` processes, and show progress unless `quiet`.

    Raises:
        ConfigError: `workers` out of range.
        DataError: there is no such directory, or a worker process died. What is wrong with the
            files is in the report.
    """
    if not 1 <= workers <= 4096:
        raise ConfigError("workers", f"is {workers}", "set it within 1 .. 4096")
    if not directory.is_dir():
        raise DataError(str(directory), "is not a directory", "name a prepared set or its parent")
    is_pair = any((directory / name).is_dir() for name in PAIR)
    is_pair = is_pair and not (directory / "index").exists()
    set_dirs = [directory / name for name in PAIR] if is_pair else [directory]
    report = Report(directory, full)
    sets = [_Set(set_dir, report) for set_dir in set_dirs]
    if is_pair:
        _check_pair(report, *sets)
    jobs = [job for each in sets for job in each.jobs(with_samples=full)]
    num_bytes = sum(job.num_bytes for job in jobs)
    if full or num_bytes <= SMALL_BYTES:
        _read_shards({each.set_dir: each for each in sets}, jobs, workers if full else 1, quiet)
        if full:
            for each in sets:
                each.check_whole()
    for each in sets:
        report.lines += each.lines()
    if not full and num_bytes > SMALL_BYTES:
        size = f"{num_bytes / 2**30:,.1f} GiB"
        report.lines.append(f"shards not hashed, {size} in all: --full reads every byte")
    return report


@dataclass(frozen=True, slots=True)
class _Job:
    """A shard to read. `manifest` comes without its long lists.

    `first_id` is the number of its first sample in the set's index, None if that is wrong. Without
    `with_samples` the shard is only hashed.
    """

    set_dir: Path
    manifest: Manifest
    entry: ShardEntry
    first_id: int | None
    num_bytes: int
    with_samples: bool

    @property
    def path(self) -> Path:
        """The shard."""
        return self.set_dir / "shards" / self.entry.file


@dataclass(frozen=True, slots=True)
class _Findings:
    """What is wrong with a shard, if anything, and counts over its samples if they were read."""

    problem: DataError | None = None
    tally: Tally | None = None


class _Set:
    """One prepared set; to make it is to make the fast checks."""

    def __init__(self, set_dir: Path, report: Report) -> None:
        self.set_dir = set_dir
        self.manifest: Manifest | None = None
        self.sidecars: dict[str, Sidecar] = {}  # by the shard's file name: those that parse
        self._report = report
        self._right_files: set[str] = set()  # shards in which nothing was found to be wrong
        self._vocabulary_is_right = False
        self._index_is_right = False
        self._num_read = 0
        self._tally = Tally()
        if report.note(self._load_manifest):
            self._check_files()

    def _load_manifest(self) -> None:
        self.manifest = Manifest.load(self.set_dir)

    def _check_files(self) -> None:
        """Everything but the shards' contents."""
        manifest, set_dir, report = self.manifest, self.set_dir, self._report
        assert manifest is not None
        self._vocabulary_is_right = report.note(check_vocabulary, set_dir, manifest)
        for entry in manifest.shards:
            if report.note(self._check_shard, entry):
                self._right_files.add(entry.file)
        if self.sidecars:
            report.problems += wrong_settings(set_dir, manifest, self.sidecars)
            report.problems += repeated_texts(set_dir, self.sidecars)
        index = [report.note(check_index_file, set_dir, file) for file in manifest.index_files]
        self._index_is_right = all(index) and report.note(check_index, set_dir)
        report.note(check_no_other_files, set_dir, manifest)

    def _check_shard(self, entry: ShardEntry) -> None:
        self.sidecars[entry.file] = check_shard_files(self.set_dir, entry)

    def jobs(self, *, with_samples: bool) -> Iterator[_Job]:
        """Yield a job for each shard whose files fit together."""
        if self.manifest is None:
            return
        small = replace(self.manifest, shards=(), length_histogram=(), index_files=())
        first_id = 0
        for entry in self.manifest.shards:
            if entry.file in self._right_files:
                sidecar = self.sidecars[entry.file]
                yield _Job(
                    set_dir=self.set_dir,
                    manifest=small,
                    entry=entry,
                    first_id=first_id if self._index_is_right else None,
                    num_bytes=sidecar.shard_bytes,
                    with_samples=with_samples and self._may_read(self.manifest, sidecar),
                )
            first_id += entry.num_samples

    def _may_read(self, manifest: Manifest, sidecar: Sidecar) -> bool:
        """True if all sizes of tables are right."""
        found = (sidecar.settings.max_seq_length, sidecar.settings.max_predictions)
        is_alike = found == (manifest.max_seq_length, manifest.max_predictions)
        return self._vocabulary_is_right and is_alike

    def take(self, findings: _Findings) -> None:
        """Keep the findings of one shard."""
        if findings.problem is not None:
            self._report.problems.append(findings.problem)
        self._num_read += 1
        if findings.tally is not None:
            self._tally += findings.tally

    def check_whole(self) -> None:
        """What only shows when all shards were read."""
        remedy = "prepare with a vocabulary for this text"
        self._report.note(check_unknown, self.set_dir, self._tally, remedy)
        if self._index_is_right:
            self._report.note(check_order, self.set_dir)

    def lines(self) -> Iterator[str]:
        """Yield what the report says about this set."""
        manifest = self.manifest
        if manifest is None:
            return
        num_tokens = sum(tokens * count for tokens, count in enumerate(manifest.length_histogram))
        yield (
            f"{self.set_dir.name}: {len(manifest.shards):,} shards, {manifest.num_samples:,} "
            f"examples of {num_tokens:,} tokens, mean length "
            f"{num_tokens / manifest.num_samples:.1f}; {self._num_read} shards hashed"
        )
        tally = self._tally
        if tally.samples:
            yield f"  unknown words: {100 * tally.unknown / tally.tokens:.2f} %"
            if manifest.segments == "pair":
                share = 100 * tally.random_next / tally.samples
                yield f"  next-sentence label 1: {share:.2f} % (about 50 % or more)"


def _check_pair(report: Report, train: _Set, held_out: _Set) -> None:
    if train.manifest is not None and held_out.manifest is not None:
        ours, theirs = held_out.manifest.vocabulary_sha256, train.manifest.vocabulary_sha256
        if ours != theirs:
            problem = f"has the vocabulary {ours}, train has {theirs}"
            report.problems.append(DataError(str(held_out.set_dir), problem, PAIR_REMEDY))
    report.problems += shared_texts(held_out.set_dir, train.sidecars, held_out.sidecars)


def _read_shards(sets: dict[Path, _Set], jobs: list[_Job], workers: int, quiet: bool) -> None:
    for job, findings in finished_in_sight(
        _read_shard,
        jobs,
        workers,
        sizes=[job.num_bytes for job in jobs],
        words=("verified", "shards"),
        quiet=quiet,
        died="a worker process died: want of memory, or a shard was cut while it was read",
        stream=sys.stderr,  # the report has stdout to itself
    ):
        sets[job.set_dir].take(findings)


def _read_shard(job: _Job) -> _Findings:
    try:
        check_digest(job.path, job.entry.sha256, SHARD_REMEDY)
        if not job.with_samples:
            return _Findings()
        shard = Shard(job.path)
        arrays = (shard.lengths(), shard.masked_counts())
        contents = check_arrays(shard.arrays(), job.manifest)
        if contents.faults:
            raise DataError(str(job.path), "; also ".join(contents.faults), SHARD_REMEDY)
        if job.manifest.segments == "pair":
            check_labels(job.path, contents.tally, SHARD_REMEDY)
        if job.first_id is not None:
            _compare_index(job, job.first_id, arrays)
    except DataError as error:
        return _Findings(error)
    return _Findings(tally=contents.tally)


def _compare_index(job: _Job, first_id: int, arrays: tuple[NDArray[np.int64], ...]) -> None:
    span = slice(first_id, first_id + job.entry.num_samples)
    for (name, dtype), expected in zip(job.manifest.index_arrays, arrays, strict=False):
        path = job.set_dir / "index" / name
        wrong = np.flatnonzero(np.memmap(path, dtype=dtype, mode="r")[span] != expected)
        if len(wrong):
            others = f"and {len(wrong) - 1} more"
            problem = f"differs from {job.entry.file} at sample {wrong[0]} {others}"
            raise DataError(str(path), problem, INDEX_REMEDY)


def check_vocabulary(set_dir: Path, manifest: Manifest) -> None:
    """Raise DataError unless the vocabulary has the manifest's digest, size and special ids."""
    path = set_dir / manifest.vocabulary_file
    vocabulary = load_any_vocabulary(path)
    names = [f"{token[1:-1].lower()}_id" for token in SPECIAL_TOKENS]
    ids = {name: getattr(vocabulary, name) for name in names}
    found = {"vocabulary_sha256": vocabulary.sha256, "vocab_size": len(vocabulary), **ids}
    for key, value in found.items():
        if value != getattr(manifest, key):
            problem = f"has {key} = {value} where the manifest says {getattr(manifest, key)}"
            raise DataError(str(path), problem, VOCABULARY_REMEDY)


def check_index(set_dir: Path) -> None:
    """Raise DataError if a number of the index is out of range, or the histogram is not its own."""
    index = LengthIndex.open(set_dir)
    check_index_ranges(set_dir, index)
    lengths, histogram = index.lengths, index.manifest.length_histogram
    counts = np.zeros(len(histogram), dtype=np.int64)
    for first in range(0, len(lengths), SAMPLES_AT_A_TIME):
        part = lengths[first : first + SAMPLES_AT_A_TIME]
        counts += np.bincount(part, minlength=len(histogram))
    if tuple(counts.tolist()) != histogram:
        where = f"{set_dir / 'index' / 'dataset.json'}: length_histogram"
        raise DataError(where, "does not count the lengths of the index", INDEX_REMEDY)


def check_shard_files(set_dir: Path, entry: ShardEntry) -> Sidecar:
    """Return the sidecar of a shard whose files fit together: digests, size, number of samples.

    Raises DataError for anything else. The shard itself is not read.
    """
    path = set_dir / "shards" / entry.file
    sidecar = read_sidecar(path)
    check_sidecar_digest(set_dir, entry)
    pairs = {
        "num_samples": (sidecar.num_samples, entry.num_samples),
        "shard_sha256": (sidecar.shard_sha256, entry.sha256),
    }
    for key, (found, wanted) in pairs.items():
        if found != wanted:
            problem = f"is {found} where the manifest says {wanted}"
            raise DataError(f"{sidecar_path(path)}: {key}", problem, SHARD_REMEDY)
    check_size(path, sidecar.shard_bytes, SHARD_REMEDY)
    return sidecar


def check_no_other_files(set_dir: Path, manifest: Manifest) -> None:
    """Raise DataError for the first file of `shards/` or `index/` not in the manifest."""
    shards = {entry.file for entry in manifest.shards}
    known: dict[Path, set[str]] = {
        set_dir: {manifest.vocabulary_file},
        set_dir / "shards": shards | {f"{name}.json" for name in shards},
        set_dir / "index": {"dataset.json", *(file.file for file in manifest.index_files)},
    }
    for directory, names in known.items():
        for name in names_in(directory):
            if is_temporary(name, names):
                remedy = "delete it once no `mlperf_bert prepare` is running here"
                raise DataError(str(directory / name), "was left by an interrupted writer", remedy)
            if directory != set_dir and name not in names:  # the user's notes may lie there
                remedy = "move it away, or prepare the set again with its text"
                raise DataError(str(directory / name), "is not in the manifest", remedy)


def check_order(set_dir: Path) -> None:
    """Raise DataError unless `order_by_length` numbers every sample, by length, ties by number.

    Neighbours ascend in (length, number), so all differ; N different numbers below N are all.
    """
    index = LengthIndex.open(set_dir)
    lengths, order = index.lengths, index.order_by_length
    for first in range(0, len(order), SAMPLES_AT_A_TIME):
        ids = np.asarray(order[first : first + SAMPLES_AT_A_TIME + 1], dtype=np.int64)
        keys = lengths[ids].astype(np.int64) << 32 | ids
        wrong = np.flatnonzero(keys[1:] <= keys[:-1])
        if len(wrong):
            path = set_dir / "index" / index.manifest.index_arrays[2][0]
            problem = f"is not the order by length at element {first + wrong[0]}"
            raise DataError(str(path), problem, INDEX_REMEDY)
