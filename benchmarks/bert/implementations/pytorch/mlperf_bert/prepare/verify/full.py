"""The full check of one set: each shard's digest, structure as HDF5, contents and labels.

The structure is compared with the sidecar (datasets, dtypes, sizes, places): training never opens
HDF5, so it would accept a file that other programs cannot read.

Of the contents as a whole it checks the share of [UNK], and that next-sentence labels change.
Whether masks are drawn at the reference's rates, and whether examples repeat, is not checked.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from mlperf_bert.common.errors import DataError
from mlperf_bert.common.untrusted import check_digest, file_size, in_brief
from mlperf_bert.data.index import REMEDY as INDEX_REMEDY
from mlperf_bert.data.index import (
    Baseline,
    LengthIndex,
    Manifest,
    ShardEntry,
    Sidecar,
    read_sidecar,
)
from mlperf_bert.data.set_checks import SHARD_REMEDY
from mlperf_bert.data.shards import Shard
from mlperf_bert.prepare.verify.contents import (
    ShardContents,
    Tally,
    baseline_of,
    check_arrays,
)
from mlperf_bert.prepare.verify.report import Check

SAMPLES_AT_A_TIME = 2**22

MAX_UNKNOWN_SHARE = 0.5
# Of samples with random labels: that all of them are 0 has a probability of 2**-32.
MIN_SAMPLES_OF_LABELS = 32


def check_structure(path: Path, sidecar: Sidecar) -> tuple[DataError, ...]:
    """Differences between the HDF5 file and its sidecar; h5py's own error if it cannot read it."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            problems = [
                DataError(f"{path}: {in_brief(name)}", "is no dataset of a shard", SHARD_REMEDY)
                for name in file
                if name not in sidecar.datasets
            ]
            for name, place in sidecar.datasets.items():
                dataset = file.get(name)
                if not isinstance(dataset, h5py.Dataset):
                    problem = "is no dataset of the file"
                    problems.append(DataError(f"{path}: {name}", problem, SHARD_REMEDY))
                    continue
                # No offset: the array is in chunks or in other files.
                expected = (place.dtype, (place.count,), place.offset)
                found = (dataset.dtype.str, dataset.shape, dataset.id.get_offset())
                if found != expected:
                    problem = (
                        f"has dtype, shape and offset {found} where its sidecar says {expected}"
                    )
                    problems.append(DataError(f"{path}: {name}", problem, SHARD_REMEDY))
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        return (DataError(str(path), f"cannot be read ({error})", SHARD_REMEDY),)
    return tuple(problems)


@dataclass(frozen=True, slots=True)
class VerifyJob:
    """One shard of the set `set_dir`.

    `manifest` comes without its long lists; `first_id` is None if the index is not compared;
    `with_contents` is false if the shard's sidecar is already known to be wrong.
    """

    set_dir: Path
    manifest: Manifest
    entry: ShardEntry
    first_id: int | None
    with_contents: bool

    @property
    def path(self) -> Path:
        """The shard."""
        return self.set_dir / "shards" / self.entry.file


@dataclass(frozen=True, slots=True)
class Findings:
    """Faults of a shard by the name of each check that was made, and the shard's contents."""

    problems: dict[str, tuple[DataError, ...]]
    contents: ShardContents | None = None


def verify_shard(job: VerifyJob) -> Findings:
    """Read one shard; never raises for the contents of its files."""
    try:
        check_digest(job.path, job.entry.sha256, SHARD_REMEDY)
    except DataError as error:
        return Findings({"shard digests": (error,)})
    problems: dict[str, tuple[DataError, ...]] = {"shard digests": (), **_structure(job)}
    if not job.with_contents:
        return Findings(problems)
    try:
        shard = Shard(job.path)
        arrays = (shard.lengths(), shard.masked_counts())
        contents = check_arrays(shard.arrays(), job.manifest)
    except DataError as error:
        return Findings(problems | {"shard contents": (error,)})
    faults = tuple(DataError(str(job.path), fault, SHARD_REMEDY) for fault in contents.faults)
    index = tuple(_compare_index(job, arrays))
    return Findings(problems | {"shard contents": faults, "index contents": index}, contents)


def _structure(job: VerifyJob) -> dict[str, tuple[DataError, ...]]:
    """The structure of a file with the right digest: a damaged one could send HDF5 into a loop."""
    try:
        sidecar = read_sidecar(job.path)
    except DataError:
        return {}  # reported by the fast check
    return {"HDF5 structure": check_structure(job.path, sidecar)}


def _compare_index(job: VerifyJob, arrays: tuple[NDArray[np.int64], ...]) -> Iterator[DataError]:
    if job.first_id is None:
        return
    span = slice(job.first_id, job.first_id + len(arrays[0]))
    for (name, dtype), expected in zip(job.manifest.index_arrays, arrays, strict=False):
        path = job.set_dir / "index" / name
        wrong = np.flatnonzero(np.memmap(path, dtype=dtype, mode="r")[span] != expected)
        if len(wrong):
            others = f"and {len(wrong) - 1} more"
            problem = f"differs from {job.entry.file} at sample {wrong[0]} {others}"
            yield DataError(str(path), problem, INDEX_REMEDY)


class FullCheck:
    """The full check of a set: gives the jobs, takes findings in any order, then judges.

    The vocabulary file must be right, because it gives the size of tables. `sidecars` are those
    that parse, by the shard's file name; `index_is_right` if the index files have their digests, so
    that they can be compared.
    """

    def __init__(
        self,
        set_dir: Path,
        manifest: Manifest,
        sidecars: dict[str, Sidecar],
        *,
        index_is_right: bool,
    ) -> None:
        self._set_dir = set_dir
        self._manifest = manifest
        self._index_is_right = index_is_right
        # A shard is read if its sidecar agrees with the manifest on all sizes of tables.
        self._readable = {
            entry.file
            for entry in manifest.shards
            if entry.file in sidecars and _fits(set_dir, entry, sidecars[entry.file], manifest)
        }
        self._problems: dict[str, dict[str, tuple[DataError, ...]]] = {}
        self._tallies: dict[Path, Tally] = {}
        self._label_counts = np.zeros(manifest.vocab_size, dtype=np.int64)

    def jobs(self) -> Iterator[VerifyJob]:
        """Yield one job per shard."""
        small = replace(self._manifest, shards=(), length_histogram=(), index_files=())
        first_id = 0
        for entry in self._manifest.shards:
            yield VerifyJob(
                set_dir=self._set_dir,
                manifest=small,
                entry=entry,
                first_id=first_id if self._index_is_right else None,
                with_contents=entry.file in self._readable,
            )
            first_id += entry.num_samples

    def take(self, job: VerifyJob, findings: Findings) -> None:
        """Keep the findings of one shard."""
        self._problems[job.entry.file] = findings.problems
        if findings.contents is not None:
            self._tallies[job.path] = findings.contents.tally
            self._label_counts += findings.contents.label_counts

    def checks(self) -> tuple[list[Check], dict[str, Any]]:
        """Return all checks and the set's rates. Call it once, after the last `take`."""
        names = ("shard digests", "HDF5 structure", "shard contents")
        checks = [*map(self._per_shard, names), *self._index_checks()]
        total = sum(self._tallies.values(), Tally())
        if total.samples == 0:
            skipped = "no shard could be read"
            return [*checks, Check("rates", skipped, was_made=False)], {}
        manifest = self._manifest
        checks += rate_checks(self._set_dir, manifest, self._tallies, total)
        all_right = all(
            problems.get("shard contents") == () for problems in self._problems.values()
        )
        if manifest.baseline is not None and all_right:
            measured = baseline_of(total, self._label_counts)
            checks.append(check_baseline(self._set_dir, manifest.baseline, measured))
        return checks, rate_statistics(total)

    def _per_shard(self, name: str) -> Check:
        files = [entry.file for entry in self._manifest.shards]
        found = {file: self._problems[file].get(name) for file in files}
        problems = tuple(problem for each in found.values() for problem in each or ())
        summary = f"{sum(each == () for each in found.values())} of {len(files)}"
        unread = [file for file in files if found[file] is None]
        if unread:
            others = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
            summary += f"; not read: {unread[0]:.80}{others}"
        return Check(name, summary, problems, was_made=not unread or bool(problems))

    def _index_checks(self) -> list[Check]:
        if not self._index_is_right:
            return [Check("index contents", "its files are wrong, see above", was_made=False)]
        return [self._per_shard("index contents"), check_order(self._set_dir)]


def _fits(set_dir: Path, entry: ShardEntry, sidecar: Sidecar, manifest: Manifest) -> bool:
    try:
        size = file_size(set_dir / "shards" / entry.file, SHARD_REMEDY)
    except DataError:
        return False  # reported by the fast check
    settings = sidecar.settings
    return (size, sidecar.num_samples, settings.max_seq_length, settings.max_predictions) == (
        sidecar.shard_bytes,
        entry.num_samples,
        manifest.max_seq_length,
        manifest.max_predictions,
    )


def check_order(set_dir: Path) -> Check:
    """`order_by_length` numbers every sample once, by length, ties by number.

    Neighbours ascend in (length, number), so all differ; N different numbers below N are all. Call
    only where `check_index` found nothing.
    """
    index = LengthIndex.open(set_dir)
    lengths, order = index.lengths, index.order_by_length
    path = set_dir / "index" / index.manifest.index_arrays[2][0]
    for first in range(0, len(order), SAMPLES_AT_A_TIME):
        ids = np.asarray(order[first : first + SAMPLES_AT_A_TIME + 1], dtype=np.int64)
        is_wrong = ids >= len(order)
        if not is_wrong.any():
            keys = lengths[ids].astype(np.int64) << 32 | ids
            is_wrong = np.append(False, keys[1:] <= keys[:-1])
        if is_wrong.any():
            problem = f"is not the order by length at element {first + int(is_wrong.argmax())}"
            return Check("order by length", "", (DataError(str(path), problem, INDEX_REMEDY),))
    return Check("order by length", f"{len(order):,} samples")


def rate_checks(
    where: Path, manifest: Manifest, tallies: Mapping[Path, Tally], total: Tally
) -> list[Check]:
    """Checks of labels and words in a set or file `where`, for each shard or in total."""
    checks = [check_unknown(where, total)]
    if manifest.segments == "pair":
        checks.insert(0, check_next_sentence(tallies, total))
    return checks


def check_next_sentence(tallies: Mapping[Path, Tally], total: Tally) -> Check:
    """Check that label 1 occurs: it has a share of a half or, with short documents, more."""
    problems = [
        DataError(
            f"{path}: next_sentence_label",
            f"is 0 in all {tally.samples:,} samples, half of them or more should be 1",
            SHARD_REMEDY,
        )
        for path, tally in tallies.items()
        if tally.samples >= MIN_SAMPLES_OF_LABELS and tally.random_next == 0
    ]
    summary = f"label 1: {_percent(total.random_next, total.samples)} (about 50 % or more)"
    if total.random_next == total.samples:
        summary = "label 1 everywhere: nothing to learn from it"
    return Check("next sentence", summary, tuple(problems))


def check_unknown(set_dir: Path, total: Tally) -> Check:
    """Check that at most half of the text is [UNK]; more means another language or vocabulary."""
    problems = []
    if total.unknown > MAX_UNKNOWN_SHARE * total.tokens:
        problem = f"{_percent(total.unknown, total.tokens)} of the tokens are [UNK]"
        remedy = "prepare with a vocabulary for this text"
        problems.append(DataError(str(set_dir), problem, remedy))
    return Check("unknown words", _percent(total.unknown, total.tokens), tuple(problems))


def check_baseline(set_dir: Path, baseline: Baseline, measured: Baseline) -> Check:
    """Check that the stored context-free baseline is that of the contents; see prepare/build."""
    problems = []
    if measured != baseline:
        problem = f"is {baseline} where the shards give {measured}"
        problems.append(
            DataError(f"{set_dir / 'index' / 'dataset.json'}: baseline", problem, INDEX_REMEDY)
        )
    return Check("baseline", f"{measured.context_free_accuracy:.4f}", tuple(problems))


def rate_statistics(total: Tally) -> dict[str, float]:
    """Rates of a set for the report."""
    return {
        "random_next_share": total.random_next / max(1, total.samples),
        "unknown_share": total.unknown / max(1, total.tokens),
    }


def _percent(count: int, total: int) -> str:
    return f"{100 * count / max(1, total):.2f} %"
