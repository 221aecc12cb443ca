"""One shard read in full: digest, structure as HDF5, and where the digest matches its contents."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.common.errors import DataError
from mlperf_bert.common.untrusted import check_digest
from mlperf_bert.data.index import INDEX_ARRAYS, Manifest, ShardEntry, read_sidecar
from mlperf_bert.data.index import REMEDY as INDEX_REMEDY
from mlperf_bert.data.set_checks import SHARD_REMEDY
from mlperf_bert.data.shards import Shard
from mlperf_bert.prepare.sandbox import Sandbox
from mlperf_bert.prepare.verify.contents import ShardContents, check_arrays
from mlperf_bert.prepare.verify.structure import check_structure


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
