"""Checks that a prepared set, or a pair of train/ and eval/, is complete and right.

The fast checks compare manifest, vocabulary, sidecars, sizes and index with each other, and find a
damaged, missing or foreign file in seconds. They hash the shards too if those are small together,
as a run does. The full checks read every byte of every shard as samples too, in parallel. Nothing
is trusted: names and counts may be hostile.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mlperf_bert.common.atomic import is_temporary
from mlperf_bert.common.errors import ConfigError, DataError
from mlperf_bert.common.untrusted import check_digest, check_size, file_size
from mlperf_bert.data.contents import SMALL_BYTES
from mlperf_bert.data.index import REMEDY as INDEX_REMEDY
from mlperf_bert.data.index import (
    Manifest,
    Sidecar,
    read_sidecar,
    sidecar_path,
)
from mlperf_bert.data.set_checks import (
    PAIR_REMEDY,
    SHARD_REMEDY,
    VOCABULARY_REMEDY,
    check_index_file,
    check_sidecar_digest,
    repeated_texts,
    shared_texts,
    wrong_settings,
)
from mlperf_bert.prepare.pool import finished_in_sight
from mlperf_bert.prepare.verify.full import (
    SAMPLES_AT_A_TIME,
    FullCheck,
    VerifyJob,
    verify_shard,
)
from mlperf_bert.prepare.verify.report import Check, Report, SetReport, length_statistics
from mlperf_bert.vocabulary.any_vocabulary import load_any_vocabulary
from mlperf_bert.vocabulary.word_pieces import SPECIAL_TOKENS

PAIR = ("train", "eval")


def verify(
    directory: Path,
    *,
    full: bool,
    workers: int,
    quiet: bool = False,
) -> Report:
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
    names = {name: directory / name for name in PAIR} if is_pair else {"set": directory}
    sets = [_Set(set_dir, name, full=full) for name, set_dir in names.items()]
    if full:
        _examine(sets, workers, quiet)
        for part in sets:
            part.judge()
    else:
        num_bytes = sum(part.shard_bytes for part in sets)
        for part in sets:
            part.hash_shards(num_bytes)
    reports = [SetReport(part.name, tuple(part.checks), part.statistics) for part in sets]
    if is_pair:
        reports.append(SetReport("train and eval", tuple(_between(*sets))))
    return Report(directory, "full" if full else "fast", tuple(reports))


class _Set:
    """One prepared set: it runs the fast checks at once, the full ones in `judge`."""

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
            total = len(self.sidecars)
            # All shards come from one preparation, and no two from the same text.
            wrong = wrong_settings(set_dir, manifest, self.sidecars)
            self.checks.append(_of_all("settings alike", total, wrong))
            repeated = repeated_texts(set_dir, self.sidecars)
            self.checks.append(_of_all("different texts", total, repeated))
        index = check_index(set_dir, manifest)
        self.checks += [check_file_names(set_dir, manifest), index]
        self.statistics = length_statistics(manifest.length_histogram)
        if full and vocabulary.status == "ok":
            is_right = index.status == "ok"
            self.full = FullCheck(set_dir, manifest, self.sidecars, index_is_right=is_right)

    @property
    def shard_bytes(self) -> int:
        """Bytes of the shards together, by their sidecars."""
        return sum(sidecar.shard_bytes for sidecar in self.sidecars.values())

    def hash_shards(self, num_bytes: int) -> None:
        """Compare the shards with their digests if `num_bytes`, of all sets, are few."""
        if self.manifest is None:
            return
        name, why = "shard digests", ""
        if num_bytes > SMALL_BYTES:
            why = f"not read: {num_bytes / 2**30:,.1f} GiB in all; --full reads every byte"
        if why:
            self.checks.append(Check(name, why, was_made=False))
            return
        problems: list[DataError] = []
        num_right = 0
        for entry in self.manifest.shards:
            path, sidecar = self.set_dir / "shards" / entry.file, self.sidecars.get(entry.file)
            if sidecar is not None and _size(path) == sidecar.shard_bytes:  # else already reported
                found = _problems_of(check_digest, path, entry.sha256, SHARD_REMEDY)
                problems += found
                num_right += not found
        summary = f"{num_right} of {len(self.manifest.shards)}"
        self.checks.append(Check(name, summary, tuple(problems)))

    def jobs(self) -> Iterator[VerifyJob]:
        """Jobs for the shards that the full check reads."""
        return iter(()) if self.full is None else self.full.jobs()

    def judge(self) -> None:
        """Add the full checks after every shard was read."""
        if self.full is None:
            problem = "not read: manifest or vocabulary is wrong"
            self.checks.append(Check("shards in full", problem, was_made=False))
            return
        checks, rates = self.full.checks()
        self.checks += checks
        self.statistics |= rates


def _examine(sets: list[_Set], workers: int, quiet: bool) -> None:
    parts = {part.set_dir: part for part in sets}
    jobs = [job for part in sets for job in part.jobs()]
    for job, findings in finished_in_sight(
        verify_shard,
        jobs,
        workers,
        sizes=[_size(job.path) for job in jobs],
        words=("verified", "shards"),
        quiet=quiet,
        died="a worker process died: want of memory, or a shard was cut while it was read",
        stream=sys.stderr,  # the report has stdout to itself
    ):
        full = parts[job.set_dir].full
        assert full is not None
        full.take(job, findings)


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


def check_manifest(set_dir: Path) -> tuple[Check, Manifest | None]:
    """The manifest parses, agrees with itself and has its own digest."""
    try:
        manifest = Manifest.load(set_dir)
    except DataError as error:
        return Check("manifest", "", (error,)), None
    summary = f"{len(manifest.shards):,} shards, {manifest.num_samples:,} examples"
    return Check("manifest", summary), manifest


def check_vocabulary(set_dir: Path, manifest: Manifest) -> Check:
    """The vocabulary file matches the manifest: digest, size and the five special ids."""
    path = set_dir / manifest.vocabulary_file
    try:
        vocabulary = load_any_vocabulary(path)
    except DataError as error:
        return Check("vocabulary", "", (error,))
    names = [f"{token[1:-1].lower()}_id" for token in SPECIAL_TOKENS]
    ids = {name: getattr(vocabulary, name) for name in names}
    found = {"vocabulary_sha256": vocabulary.sha256, "vocab_size": len(vocabulary), **ids}
    problems = tuple(
        DataError(
            str(path),
            f"has {key} = {value} where the manifest says {getattr(manifest, key)}",
            VOCABULARY_REMEDY,
        )
        for key, value in found.items()
        if value != getattr(manifest, key)
    )
    return Check("vocabulary", f"{manifest.vocab_size:,} tokens", problems)


def check_sidecars(set_dir: Path, manifest: Manifest) -> tuple[Check, dict[str, Sidecar]]:
    """Each sidecar exists, has its digest, parses, and agrees with the manifest about its shard.

    Returns the check and the sidecars that parse, by the shard's file name.
    """
    sidecars: dict[str, Sidecar] = {}
    problems = []
    for entry in manifest.shards:
        shard_path = set_dir / "shards" / entry.file
        path = sidecar_path(shard_path)
        try:
            sidecar = sidecars[entry.file] = read_sidecar(shard_path)
        except DataError as error:
            problems.append(error)
            continue
        problems += _problems_of(check_sidecar_digest, set_dir, entry)
        pairs = {
            "num_samples": (sidecar.num_samples, entry.num_samples),
            "shard_sha256": (sidecar.shard_sha256, entry.sha256),
        }
        for key, (found, wanted) in pairs.items():
            if found != wanted:
                problem = f"is {found} where the manifest says {wanted}"
                problems.append(DataError(f"{path}: {key}", problem, SHARD_REMEDY))
    summary = f"{len(sidecars)} of {len(manifest.shards)}"
    return Check("sidecars", summary, tuple(problems)), sidecars


def check_sizes(set_dir: Path, manifest: Manifest, sidecars: dict[str, Sidecar]) -> Check:
    """Each shard exists and has the size that its sidecar gives."""
    problems: list[DataError] = []
    for entry in manifest.shards:
        path = set_dir / "shards" / entry.file
        if entry.file in sidecars:
            wanted = sidecars[entry.file].shard_bytes
            problems += _problems_of(check_size, path, wanted, SHARD_REMEDY)
        else:
            problems += _problems_of(file_size, path, SHARD_REMEDY)
    return _of_all("shard sizes", len(manifest.shards), problems)


def check_file_names(set_dir: Path, manifest: Manifest) -> Check:
    """`shards/` and `index/` hold only the files that the manifest names; no left-overs."""
    shards = {entry.file for entry in manifest.shards}
    known: dict[Path, set[str]] = {
        set_dir: {manifest.vocabulary_file},
        set_dir / "shards": shards | {f"{name}.json" for name in shards},
        set_dir / "index": {"dataset.json", *(file.file for file in manifest.index_files)},
    }
    problems = []
    for directory, names in known.items():
        try:
            found = sorted(path.name for path in directory.iterdir())
        except OSError as error:
            reason = error.strerror or "cannot be listed"
            problems.append(DataError(str(directory), reason, INDEX_REMEDY))
            continue
        for name in found:
            path = str(directory / name)
            if is_temporary(name, names):
                remedy = "delete it once no `mlperf_bert prepare` is running here"
                problems.append(DataError(path, "was left by an interrupted writer", remedy))
            elif directory != set_dir and name not in names:  # the user's notes may lie there
                remedy = "move it away, or prepare the set again with its text"
                problems.append(DataError(path, "is not in the manifest", remedy))
    return Check("no other files", "", tuple(problems))


def check_index(set_dir: Path, manifest: Manifest) -> Check:
    """Each index file has the size and digest of the manifest, and the histogram is right."""
    problems: list[DataError] = []
    for file in manifest.index_files:
        problems += _problems_of(check_index_file, set_dir, file)
    if not problems and _histogram(set_dir, manifest) != manifest.length_histogram:
        path = set_dir / "index" / "dataset.json"
        problem = "does not count the lengths of lengths.u16"
        problems.append(DataError(f"{path}: length_histogram", problem, INDEX_REMEDY))
    return Check("index files", f"{len(manifest.index_files)}", tuple(problems))


def _histogram(set_dir: Path, manifest: Manifest) -> tuple[int, ...]:
    name, dtype = manifest.index_arrays[0]
    lengths = np.memmap(set_dir / "index" / name, dtype=dtype, mode="r")
    counts = np.zeros(2**16, dtype=np.int64)
    for first in range(0, len(lengths), SAMPLES_AT_A_TIME):
        counts += np.bincount(lengths[first : first + SAMPLES_AT_A_TIME], minlength=2**16)
    used = max(manifest.max_seq_length + 1, int(np.flatnonzero(counts)[-1]) + 1)
    return tuple(counts[:used].tolist())


def _problems_of(check: Callable[..., object], *args: object) -> list[DataError]:
    try:
        check(*args)
    except DataError as error:
        return [error]
    return []


def _of_all(name: str, total: int, problems: list[DataError]) -> Check:
    return Check(name, f"{total - len(problems)} of {total}", tuple(problems))
