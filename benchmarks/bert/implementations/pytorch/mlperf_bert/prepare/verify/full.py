"""The full check of one set: each shard's digest, structure as HDF5 and contents, and their sum.

The structure is compared with the sidecar (datasets, dtypes, sizes, places): training never opens
HDF5, so a file that others cannot read would train all the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.common.errors import DataError
from mlperf_bert.common.untrusted import check_digest, file_size, in_brief
from mlperf_bert.data.index import (
    INDEX_ARRAYS,
    Manifest,
    ShardEntry,
    Sidecar,
    read_sidecar,
    special_ids,
)
from mlperf_bert.data.index import REMEDY as INDEX_REMEDY
from mlperf_bert.data.set_checks import SHARD_REMEDY
from mlperf_bert.data.shards import Shard
from mlperf_bert.prepare.sandbox import Sandbox
from mlperf_bert.prepare.verify.contents import ShardContents, Tally, check_arrays
from mlperf_bert.prepare.verify.rates import (
    HashStore,
    check_baseline,
    check_duplicates,
    check_masking,
    check_next_sentence,
    check_unknown,
    check_vocabulary_size,
    rate_statistics,
)
from mlperf_bert.prepare.verify.report import Check
from mlperf_bert.prepare.verify.set_files import check_order

LAYOUT_READER = "mlperf_bert.prepare.hdf5_reader:read_layout"


def check_structure(path: Path, sidecar: Sidecar, sandbox: Sandbox) -> tuple[DataError, ...]:
    """What in the file differs from its sidecar; `sandbox` runs LAYOUT_READER."""
    try:
        entries = sandbox.read_record(path, SHARD_REMEDY).record("entries")
        problems = [
            DataError(f"{path}: {in_brief(name)}", "is no dataset of a shard", SHARD_REMEDY)
            for name in entries.values
            if name not in sidecar.datasets
        ]
        for name, place in sidecar.datasets.items():
            if name not in entries.values:
                problems.append(DataError(f"{path}: {name}", "is not in the file", SHARD_REMEDY))
                continue
            expected = {
                "kind": "contiguous",
                "dtype": place.dtype,
                "shape": str(place.count),
                "offset": place.offset,
            }
            found = entries.record(name).values
            problems += [
                DataError(
                    f"{path}: {name}",
                    f"has {key} {in_brief(found.get(key))} where its sidecar says {value!r}",
                    SHARD_REMEDY,
                )
                for key, value in expected.items()
                if found.get(key) != value
            ]
    except DataError as error:
        return (error,)
    return tuple(problems)


@dataclass(frozen=True, slots=True)
class VerifyJob:
    """One shard of the set `set_dir`.

    `manifest` comes without its long lists; `first_id` is None where the index is not to be
    compared; `with_contents` is false where the shard's sidecar is already known to be wrong.
    """

    set_dir: Path
    manifest: Manifest
    entry: ShardEntry
    first_id: int | None
    with_contents: bool
    sandbox: Sandbox

    @property
    def path(self) -> Path:
        """The shard."""
        return self.set_dir / "shards" / self.entry.file


@dataclass(frozen=True, slots=True)
class Findings:
    """What is wrong with a shard, by check.

    `wrong_structure` is None where there was nothing to compare, `contents` where they could not
    be read.
    """

    wrong_structure: tuple[DataError, ...] | None = None
    wrong_digest: tuple[DataError, ...] = ()
    wrong_contents: tuple[DataError, ...] = ()
    wrong_index: tuple[DataError, ...] = ()
    contents: ShardContents | None = None


def verify_shard(job: VerifyJob) -> Findings:
    """Read one shard; never raises for what its files hold."""
    structure = _structure(job)
    try:
        check_digest(job.path, job.entry.sha256, SHARD_REMEDY)
    except DataError as error:
        return Findings(wrong_structure=structure, wrong_digest=(error,))
    if not job.with_contents:
        return Findings(wrong_structure=structure)
    try:
        shard = Shard(job.path)
        lengths, masked_counts = shard.lengths(), shard.masked_counts()
        contents = check_arrays(shard.arrays(), job.manifest)
    except DataError as error:
        return Findings(wrong_structure=structure, wrong_contents=(error,))
    faults = tuple(DataError(str(job.path), fault, SHARD_REMEDY) for fault in contents.faults)
    return Findings(
        wrong_structure=structure,
        wrong_contents=faults,
        wrong_index=_compare_index(job, lengths, masked_counts),
        contents=contents,
    )


def _structure(job: VerifyJob) -> tuple[DataError, ...] | None:
    """Looked at whatever the digest: of a damaged file, whether HDF5 can still read it."""
    if not job.path.is_file():
        return None
    try:
        sidecar = read_sidecar(job.path)
    except DataError:
        return None  # reported by the fast check
    return check_structure(job.path, sidecar, job.sandbox)


def _compare_index(
    job: VerifyJob, lengths: NDArray[np.int64], masked_counts: NDArray[np.int64]
) -> tuple[DataError, ...]:
    if job.first_id is None:
        return ()
    span = slice(job.first_id, job.first_id + len(lengths))
    problems = []
    for (name, dtype), expected in zip(INDEX_ARRAYS, (lengths, masked_counts), strict=False):
        path = job.set_dir / "index" / name
        wrong = np.flatnonzero(np.memmap(path, dtype=dtype, mode="r")[span] != expected)
        if len(wrong):
            problem = (
                f"differs from {job.entry.file} at sample {wrong[0]} and {len(wrong) - 1} more"
            )
            problems.append(DataError(str(path), problem, INDEX_REMEDY))
    return tuple(problems)


class FullCheck:
    """Hands out the shards of a set, takes their findings in any order, then judges.

    Args:
        set_dir: the set.
        manifest: its manifest; `vocab.txt` must be right, as tables are sized by it.
        sidecars: those that parse, by the shard's file name.
        index_is_right: whether the index files have their digests, so that they can be compared.
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
        # A shard is read where its sidecar fits the manifest in all that sizes a table.
        self._readable = {
            entry.file
            for entry in manifest.shards
            if entry.file in sidecars and _fits(set_dir, entry, sidecars[entry.file], manifest)
        }
        # No more than the shards have room for: their sizes are what the sidecars say.
        self.hashes = HashStore(sum(sidecars[file].num_samples for file in self._readable))
        self._digests: dict[str, tuple[DataError, ...]] = {}
        self._structure: dict[str, tuple[DataError, ...]] = {}
        self._contents: dict[str, tuple[DataError, ...]] = {}
        self._index: dict[str, tuple[DataError, ...]] = {}
        self._tallies: dict[str, Tally] = {}
        self._copied: dict[str, int] = {}
        self._label_counts = np.zeros(manifest.vocab_size, dtype=np.int64)

    def jobs(self, sandbox: Sandbox) -> Iterator[VerifyJob]:
        """One job a shard; `sandbox` runs LAYOUT_READER."""
        small = replace(self._manifest, shards=(), length_histogram=(), index_files=())
        first_id = 0
        for entry in self._manifest.shards:
            yield VerifyJob(
                set_dir=self._set_dir,
                manifest=small,
                entry=entry,
                first_id=first_id if self._index_is_right else None,
                with_contents=entry.file in self._readable,
                sandbox=sandbox,
            )
            first_id += entry.num_samples

    def take(self, file: str, findings: Findings) -> None:
        """Keep what the reading of one shard found."""
        self._digests[file] = findings.wrong_digest
        if findings.wrong_structure is not None:
            self._structure[file] = findings.wrong_structure
        self._contents[file] = findings.wrong_contents
        self._index[file] = findings.wrong_index
        if findings.contents is not None:
            self._tallies[file] = findings.contents.tally
            self._copied[file] = findings.contents.copied
            self._label_counts += findings.contents.label_counts
            self.hashes.add(findings.contents)

    def checks(self) -> tuple[list[Check], dict[str, Any]]:
        """All checks, and the set's rates. Call once, after the last `take`."""
        self.hashes.sort()
        files = [entry.file for entry in self._manifest.shards]
        is_right = {file: file in self._tallies and not self._contents[file] for file in files}
        is_read = {file: file in self._tallies or bool(self._contents[file]) for file in files}
        checks = [
            self._per_shard("shard digests", self._digests, dict.fromkeys(files, True)),
            self._per_shard(
                "HDF5 structure", self._structure, {file: file in self._structure for file in files}
            ),
            self._per_shard("shard contents", self._contents, is_read),
            *self._index_checks(),
        ]
        total = sum(self._tallies.values(), Tally())
        if total.samples == 0:
            skipped = "no shard could be read"
            return [*checks, Check("rates, duplicates", skipped, was_made=False)], {}
        shards_dir = self._set_dir / "shards"
        by_path = {shards_dir / file: tally for file, tally in self._tallies.items()}
        copied = {shards_dir / file: count for file, count in self._copied.items()}
        manifest = self._manifest
        is_pair = manifest.segments == "pair"
        special = special_ids(manifest)
        excluded = 0 if is_pair else len(special)
        checks += [
            check_masking(by_path, total, manifest.vocab_size, excluded),
            check_vocabulary_size(by_path, total, manifest.vocab_size, special),
        ]
        if is_pair:
            checks.append(check_next_sentence(by_path, total))
        checks += [
            check_unknown(self._set_dir, total),
            check_duplicates(self._set_dir, self.hashes, copied),
        ]
        baseline = self._manifest.baseline
        if baseline is not None and all(is_right.values()):
            most_frequent = int(self._label_counts.max())
            checks.append(check_baseline(self._set_dir, baseline, total, most_frequent))
        rates = rate_statistics(total)
        rates["repeated_text_share"] = self.hashes.repeated_text_share()
        return checks, rates

    def _per_shard(
        self, name: str, problems: dict[str, tuple[DataError, ...]], is_read: dict[str, bool]
    ) -> Check:
        in_order = tuple(problem for file in is_read for problem in problems.get(file, ()))
        num_right = sum(is_read[file] and not problems[file] for file in is_read)
        unread = [file for file in is_read if not is_read[file]]
        summary = f"{num_right} of {len(is_read)}"
        if unread:
            others = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
            summary += f"; not read: {unread[0]:.80}{others}"
        return Check(name, summary, in_order, was_made=not unread or bool(in_order))

    def _index_checks(self) -> list[Check]:
        if not self._index_is_right:
            return [Check("index contents", "its files are wrong, see above", was_made=False)]
        is_read = {entry.file: entry.file in self._tallies for entry in self._manifest.shards}
        return [
            self._per_shard("index contents", self._index, is_read),
            check_order(self._set_dir),
        ]


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
