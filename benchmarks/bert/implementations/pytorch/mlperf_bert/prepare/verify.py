"""Check that a prepared set, or a pair of train/ and eval/, is complete and correct.

The fast check compares the manifest, vocabulary, sidecars, file sizes and index with each other, as
training does when it starts. It also hashes the shards if they are small. The check continues after
a problem, so that one report lists every wrong file. The full check begins with the fast check. If
the fast check finds no problem, the full check reads every shard, and checks its digest, its
samples and their entries in the index.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

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
    SMALL_BYTES,
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
from mlperf_bert.files import check_digest, check_size
from mlperf_bert.prepare.contents import (
    Tally,
    check_arrays,
    check_labels,
    check_unknown,
    read_counts,
)
from mlperf_bert.prepare.pool import run_with_progress
from mlperf_bert.vocabulary.any_vocabulary import load_any_vocabulary
from mlperf_bert.vocabulary.word_pieces import SPECIAL_TOKENS

PAIR = ("train", "eval")


@dataclass(slots=True)
class Report:
    """The result of a check: lines about each set, all problems, and a verdict."""

    directory: Path
    is_full: bool
    num_shards: int = 0
    num_examples: int = 0
    lines: list[str] = field(default_factory=list)
    problems: list[DataError] = field(default_factory=list)

    def to_text(self) -> str:
        """Return the report as text: the lines, the problems and, last, the verdict."""
        lines = [f"{self.directory}, {self._check} check", *self.lines]
        lines += [f"  {problem}" for problem in self.problems]
        return "\n".join(one_line(line) for line in [*lines, self.verdict])

    @property
    def verdict(self) -> str:
        """One line that tells whether the data is OK."""
        if self.problems:
            return f"FAILED: {self._count_in_words()}, listed above"
        return (
            f"OK: {self.num_shards:,} shards with {self.num_examples:,} examples, and the "
            f"{self._check} check found no problem"
        )

    def raise_if_wrong(self) -> None:
        """Raise DataError with the number of problems and the first one, if there are any."""
        if self.problems:
            where, problem, remedy = (one_line(text) for text in self.problems[0].args)
            first = f"{where}: {problem}"
            several = len(self.problems) > 1
            summary = f"{self._count_in_words()}, the first: {first}" if several else first
            raise DataError(one_line(str(self.directory)), summary, remedy)

    def note(self, check: Callable[..., object], *args: object) -> None:
        """Call `check` with `args`, and add a DataError that it raises to the problems."""
        try:
            check(*args)
        except DataError as error:
            self.problems.append(error)

    @property
    def _check(self) -> str:
        return "full" if self.is_full else "fast"

    def _count_in_words(self) -> str:
        count = len(self.problems)
        return f"{count} problem{'s' if count > 1 else ''}"


def verify(directory: Path, *, full: bool, workers: int, quiet: bool = False) -> Report:
    """Check a prepared set, or a directory with the two sets train/ and eval/.

    Args:
        directory: the prepared set, or the directory of the two sets.
        full: whether to read the shards too.
        workers: number of processes that read shards.
        quiet: whether to print no progress.

    Raises:
        ConfigError: `workers` is out of range.
        DataError: there is no such directory, or a worker process died. Problems of the files are
            in the report instead.
    """
    if not 1 <= workers <= 4096:
        raise ConfigError("workers", f"is {workers}", "use a value from 1 to 4096")
    if not directory.is_dir():
        raise DataError(str(directory), "no such directory", "pass a prepared set or its parent")
    is_pair = any((directory / name).is_dir() for name in PAIR)
    is_pair = is_pair and not (directory / "index").exists()
    report = Report(directory, full)
    sets: list[_Set] = []
    for set_dir in [directory / name for name in PAIR] if is_pair else [directory]:
        problems_before = len(report.problems)
        try:
            manifest = Manifest.load(set_dir)
        except DataError as error:
            report.problems.append(error)
            continue
        sidecars = _check_files(set_dir, manifest, report)
        sets.append(_Set(set_dir, manifest, sidecars))
        report.lines.append(_summary(set_dir, manifest))
        report.num_shards += len(manifest.shards)
        report.num_examples += manifest.num_samples
        if full and len(report.problems) == problems_before:
            _check_contents(set_dir, manifest, sidecars, report, workers, quiet)
    if len(sets) == len(PAIR):
        train, held_out = sets
        report.note(_check_vocabularies, held_out.path, train.manifest, held_out.manifest)
        report.problems += shared_texts(held_out.path, train.sidecars, held_out.sidecars)
    if not full:
        report.lines.append(_hash_small(sets, report))
    return report


class _Set(NamedTuple):
    """A prepared set with its manifest, and its valid sidecars by shard file name."""

    path: Path
    manifest: Manifest
    sidecars: dict[str, Sidecar]


def _hash_small(sets: list[_Set], report: Report) -> str:
    """Check the digests of all shards if the shards are small in total.

    Returns a line that describes what was checked. Problems are added to the report.
    """
    num_bytes = sum(each.shard_bytes for found in sets for each in found.sidecars.values())
    if num_bytes > SMALL_BYTES:
        size = f"{num_bytes / 2**30:.1f} GiB"
        return f"shards not hashed, because they have {size} in all; use --full to read every byte"
    for path, manifest, sidecars in sets:
        for entry in manifest.shards:
            if entry.file in sidecars:
                shard = path / "shards" / entry.file
                report.note(check_digest, shard, entry.sha256, SHARD_REMEDY)
    count = sum(len(found.sidecars) for found in sets)
    return f"{count:,} shards hashed; use --full to check their samples"


def _check_vocabularies(held_out_dir: Path, train: Manifest, held_out: Manifest) -> None:
    if held_out.vocabulary_sha256 != train.vocabulary_sha256:
        problem = f"has the vocabulary {held_out.vocabulary_sha256}"
        problem += f", but the training set has {train.vocabulary_sha256}"
        raise DataError(str(held_out_dir), problem, PAIR_REMEDY)


def _summary(set_dir: Path, manifest: Manifest) -> str:
    num_tokens = sum(tokens * count for tokens, count in enumerate(manifest.length_histogram))
    return (
        f"{set_dir.name}: {len(manifest.shards):,} shards, {manifest.num_samples:,} examples, "
        f"{num_tokens:,} tokens, mean length {num_tokens / manifest.num_samples:.1f} tokens"
    )


def _check_files(set_dir: Path, manifest: Manifest, report: Report) -> dict[str, Sidecar]:
    """Check everything except the contents of the shards, and add problems to the report.

    Returns the valid sidecars by the file names of their shards.
    """
    report.note(check_vocabulary, set_dir, manifest)
    sidecars = {}
    for entry in manifest.shards:
        try:
            sidecars[entry.file] = check_shard_files(set_dir, entry)
        except DataError as error:
            report.problems.append(error)
    if sidecars:
        report.problems += wrong_settings(set_dir, manifest, sidecars)
        report.problems += repeated_texts(set_dir, sidecars)
    before = len(report.problems)
    for file in manifest.index_files:
        report.note(check_index_file, set_dir, file)
    if len(report.problems) == before:
        report.note(_check_ranges, set_dir)
    return sidecars


def _check_ranges(set_dir: Path) -> None:
    check_index_ranges(set_dir, LengthIndex.open(set_dir))


def _check_contents(
    set_dir: Path,
    manifest: Manifest,
    sidecars: dict[str, Sidecar],
    report: Report,
    workers: int,
    quiet: bool,
) -> None:
    """Read all shards of a set, compare the index with them, and add problems to the report.

    The fast check must have found no problem in the set.
    """
    small = replace(manifest, shards=(), length_histogram=(), index_files=())
    before = len(report.problems)
    tally = Tally()
    for _, found in run_with_progress(
        partial(_read_shard, set_dir, small),
        manifest.shards,
        workers,
        sizes=[sidecars[entry.file].shard_bytes for entry in manifest.shards],
        activity="verifying shards",
        quiet=quiet,
        stderr=True,  # Only the report goes to stdout.
    ):
        if isinstance(found, DataError):
            report.problems.append(found)
        else:
            tally += found
    if len(report.problems) > before:
        return
    report.note(
        check_unknown, set_dir, tally, "prepare the text with a vocabulary for its language"
    )
    report.note(_compare_index, set_dir)
    report.lines.append(f"  unknown words: {100 * tally.unknown / tally.tokens:.2f}% of the tokens")
    if manifest.segments == "pair":
        share = 100 * tally.random_next / tally.samples
        report.lines.append(
            f"  next-sentence label 1: {share:.2f}% of the examples (about 50% or more is normal)"
        )


def _read_shard(set_dir: Path, manifest: Manifest, entry: ShardEntry) -> Tally | DataError:
    """Check a shard. Return the counts over its samples, or the error if the shard is wrong."""
    path = set_dir / "shards" / entry.file
    try:
        check_digest(path, entry.sha256, SHARD_REMEDY)
        shard = Shard(path)
        shard.lengths()
        shard.masked_counts()
        tally, _ = check_arrays(path, shard.arrays(), manifest, SHARD_REMEDY)
        if manifest.segments == "pair":
            check_labels(path, tally, SHARD_REMEDY)
    except DataError as error:
        return error
    return tally


def _compare_index(set_dir: Path) -> None:
    """Raise DataError unless the index equals the one that `prepare` would write for the shards."""
    index = LengthIndex.open(set_dir)
    manifest = index.manifest
    lengths, masked_counts = read_counts(set_dir, manifest.shards)
    expected = (lengths, masked_counts, np.argsort(lengths, kind="stable"))
    found = (index.lengths, index.masked_counts, index.order_by_length)
    for (name, _), ours, theirs in zip(manifest.index_arrays, found, expected, strict=True):
        wrong = np.flatnonzero(ours != theirs)
        if len(wrong):
            problem = f"differs from the shards at element {wrong[0]}"
            raise DataError(str(set_dir / "index" / name), problem, INDEX_REMEDY)
    histogram = np.bincount(lengths, minlength=len(manifest.length_histogram))
    if tuple(histogram.tolist()) != manifest.length_histogram:
        where = f"{set_dir / 'index' / 'dataset.json'}: length_histogram"
        raise DataError(where, "does not match the lengths in the index", INDEX_REMEDY)


def check_vocabulary(set_dir: Path, manifest: Manifest) -> None:
    """Raise DataError unless the set's vocabulary has the manifest's digest, size and ids.

    The ids are those of the special tokens.
    """
    path = set_dir / manifest.vocabulary_file
    vocabulary = load_any_vocabulary(path)
    names = [f"{token[1:-1].lower()}_id" for token in SPECIAL_TOKENS]
    ids = {name: getattr(vocabulary, name) for name in names}
    found = {"vocabulary_sha256": vocabulary.sha256, "vocab_size": len(vocabulary), **ids}
    for key, value in found.items():
        if value != getattr(manifest, key):
            problem = f"has {key} = {value}, but the manifest has {getattr(manifest, key)}"
            raise DataError(str(path), problem, VOCABULARY_REMEDY)


def check_shard_files(set_dir: Path, entry: ShardEntry) -> Sidecar:
    """Check that the manifest, the sidecar and the size of a shard agree, and return the sidecar.

    The function does not read the shard. Raises DataError if a digest, a number of samples or the
    size differs.
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
            problem = f"is {found}, but {wanted} in the manifest"
            raise DataError(f"{sidecar_path(path)}: {key}", problem, SHARD_REMEDY)
    check_size(path, sidecar.shard_bytes, SHARD_REMEDY)
    return sidecar
