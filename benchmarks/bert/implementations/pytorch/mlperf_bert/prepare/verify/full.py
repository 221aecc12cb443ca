"""The full check of one set: each shard's digest, structure as HDF5 and contents, and their rates.

The structure is compared with the sidecar (datasets, dtypes, sizes, places): training never opens
HDF5, so it would accept a file that other programs cannot read.

Rates are compared with those of the reference procedure on any text. Masked positions are drawn
independently, so a shard's counts are binomial. Each shard is judged alone: all start from the same
seed, so their draws are alike and their deviations can add up. A count is refused if its
probability is below e**-20, about 6.3 standard errors; the bound (Chernoff's) holds for small
counts too.

Duplicate examples, and held-out texts that occur in training, are found by 64-bit hashes, 16 bytes
per sample. By chance two of 160 million hashes agree in one set of a thousand.
"""

import math
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
    special_ids,
)
from mlperf_bert.data.set_checks import SHARD_REMEDY, VOCABULARY_REMEDY
from mlperf_bert.data.shards import Shard
from mlperf_bert.prepare.verify.contents import (
    Hashes,
    ShardContents,
    Tally,
    baseline_of,
    check_arrays,
    repeated,
)
from mlperf_bert.prepare.verify.report import Check

SAMPLES_AT_A_TIME = 2**22

MAX_SURPRISE = 20.0
MAX_UNKNOWN_SHARE = 0.5

# A few copies do not harm training; a text that was prepared twice makes far more.
MAX_COPIED_SHARE = 0.001
# Short texts and boilerplate may occur in both sets by chance; more is a leak.
MAX_LEAKED_SHARE = 0.01


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
        # At most as many as fit into shards of the sizes that the sidecars give.
        most = sum(sidecars[file].num_samples for file in self._readable)
        self.texts, self._copies = CollectedHashes(most), CollectedHashes(most)
        self._problems: dict[str, dict[str, tuple[DataError, ...]]] = {}
        self._tallies: dict[Path, Tally] = {}
        self._copied: dict[Path, int] = {}
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
            self._copied[job.path] = findings.contents.copied
            self._label_counts += findings.contents.label_counts
            self.texts.add(findings.contents.texts)
            self._copies.add(findings.contents.copies)

    def checks(self) -> tuple[list[Check], dict[str, Any]]:
        """Return all checks and the set's rates. Call it once, after the last `take`."""
        texts, copies = self.texts.values, self._copies.values
        texts.sort()
        copies.sort()
        names = ("shard digests", "HDF5 structure", "shard contents")
        checks = [*map(self._per_shard, names), *self._index_checks()]
        total = sum(self._tallies.values(), Tally())
        if total.samples == 0:
            skipped = "no shard could be read"
            return [*checks, Check("rates, duplicates", skipped, was_made=False)], {}
        manifest = self._manifest
        checks += rate_checks(self._set_dir, manifest, self._tallies, total)
        checks.append(check_duplicates(self._set_dir, texts, copies, self._copied))
        all_right = all(
            problems.get("shard contents") == () for problems in self._problems.values()
        )
        if manifest.baseline is not None and all_right:
            measured = baseline_of(total, self._label_counts)
            checks.append(check_baseline(self._set_dir, manifest.baseline, measured))
        rates = rate_statistics(total)
        rates["repeated_text_share"] = repeated(texts) / max(1, len(texts))
        return checks, rates

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


def surprise(trials: int, count: int, chance: float) -> float:
    """-log of a bound on a deviation's probability: trials x relative entropy, in nats."""
    share = count / trials
    terms = ((share, chance), (1 - share, 1 - chance))
    return trials * sum(p * math.log(p / q) for p, q in terms if p > 0)


def rate_checks(
    where: Path, manifest: Manifest, tallies: Mapping[Path, Tally], total: Tally
) -> list[Check]:
    """Checks of the random draws in a set or file `where`, for each shard or in total."""
    special = special_ids(manifest)
    is_pair = manifest.segments == "pair"
    checks = [
        check_masking(tallies, total, manifest.vocab_size, 0 if is_pair else len(special)),
        check_vocabulary_size(tallies, total, manifest.vocab_size, special),
    ]
    if is_pair:
        checks.append(check_next_sentence(tallies, total))
    return [*checks, check_unknown(where, total)]


def check_masking(
    tallies: Mapping[Path, Tally], total: Tally, vocab_size: int, num_excluded: int
) -> Check:
    """Check 80 % [MASK], 10 % kept, 10 % random, where a random token is uniform over all V.

    In single segments it is never one of the `num_excluded` special tokens (data/index.py).
    """
    by_chance = 0.1 / (vocab_size - num_excluded)  # the random token equals the label
    is_mask = 0.0 if num_excluded else by_chance  # it is [MASK]
    expected = {
        "[MASK]": 0.8 + is_mask,
        "kept": 0.1 + by_chance,
        "replaced": 0.1 - is_mask - by_chance,
    }
    problems = []
    for path, tally in tallies.items():
        for name, count in _outcomes(tally).items():
            if tally.masked and surprise(tally.masked, count, expected[name]) > MAX_SURPRISE:
                problem = (
                    f"{count:,} of {tally.masked:,} masked positions are {name}, about "
                    f"{expected[name] * tally.masked:,.0f} belong"
                )
                problems.append(DataError(str(path), problem, SHARD_REMEDY))
    shares = [f"{_percent(n, total.masked)} {name}" for name, n in _outcomes(total).items()]
    return Check("masking 80/10/10", f"{', '.join(shares)} of {total.masked:,}", tuple(problems))


def check_vocabulary_size(
    tallies: Mapping[Path, Tally], total: Tally, vocab_size: int, special: NDArray[np.int64]
) -> Check:
    """Check that random tokens, uniform over the vocabulary, reach its end.

    Ids that end early come from a smaller vocabulary, whose tokens mean something else. `special`,
    int64 and ascending, are the ids that never replace a word.
    """
    problems = []
    for path, tally in tallies.items():
        replaced = _outcomes(tally)["replaced"]
        unseen = vocab_size - 1 - tally.highest_id
        unseen -= int(np.count_nonzero(special > tally.highest_id))
        # -log of the probability that none of them is one of these.
        if unseen > 0 and -replaced * math.log1p(-unseen / vocab_size) > MAX_SURPRISE:
            problem = (
                f"has no token above {tally.highest_id:,}, among them {replaced:,} random ones: "
                f"the vocabulary of {vocab_size:,} is larger than the one it was made with"
            )
            problems.append(DataError(str(path), problem, VOCABULARY_REMEDY))
    summary = f"ids up to {total.highest_id:,} of {vocab_size:,}"
    return Check("vocabulary used", summary, tuple(problems))


def check_next_sentence(tallies: Mapping[Path, Tally], total: Tally) -> Check:
    """Check that label 1 has a share of a half or, with short documents or samples, more."""
    problems = []
    for path, tally in tallies.items():
        if 2 * tally.random_next >= tally.samples:
            continue
        if surprise(tally.samples, tally.random_next, 0.5) > MAX_SURPRISE:
            problem = (
                f"{tally.random_next:,} of {tally.samples:,} labels are 1, half or more belong"
            )
            problems.append(DataError(f"{path}: next_sentence_label", problem, SHARD_REMEDY))
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
    masked = max(1, total.masked)
    return {
        "masked_share": total.masked / max(1, total.tokens),
        **{f"{name.strip('[]').lower()}_share": n / masked for name, n in _outcomes(total).items()},
        "random_next_share": total.random_next / max(1, total.samples),
        "unknown_share": total.unknown / max(1, total.tokens),
    }


def _outcomes(tally: Tally) -> dict[str, int]:
    replaced = tally.masked - tally.mask_inputs - tally.kept
    return {"[MASK]": tally.mask_inputs, "kept": tally.kept, "replaced": replaced}


def _percent(count: int, total: int) -> str:
    return f"{100 * count / max(1, total):.2f} %"


class CollectedHashes:
    """Hashes of at most `most` samples of a set, in an array that is allocated once."""

    def __init__(self, most: int) -> None:
        self._room = np.empty(most, dtype=np.uint64)
        self.values: Hashes = self._room[:0]

    def add(self, hashes: Hashes) -> None:
        """Add the hashes of one shard."""
        first = len(self.values)
        self.values = self._room[: first + len(hashes)]
        self.values[first:] = hashes


def check_duplicates(
    set_dir: Path, texts: Hashes, copies: Hashes, copied: Mapping[Path, int]
) -> Check:
    """Check that whole examples hardly ever repeat: each pass over a text draws new masks.

    Only samples with at least 2**32 possible maskings count, because shorter ones repeat by chance.
    Both kinds of hashes are sorted; `copied` counts the copies within each shard.
    """
    total = repeated(copies)
    problems = []
    if total > MAX_COPIED_SHARE * len(texts):
        problem = f"{total:,} of {len(texts):,} examples are copies of others"
        remedy = "find the text that is there twice and prepare without it"
        worst = max(copied, key=lambda path: copied[path])
        if copied[worst]:
            problem += f", {copied[worst]:,} of them within {worst.name}"
        problems.append(DataError(str(set_dir), problem, remedy))
    summary = (
        f"{total:,} copies among {len(copies):,} examples with masks enough to tell; "
        f"{_percent(repeated(texts), len(texts))} of the texts repeat"
    )
    return Check("duplicates", summary, tuple(problems), was_made=len(copies) > 0)


def check_leak(eval_dir: Path, train: Hashes, held_out: Hashes) -> Check:
    """Check that held-out texts do not occur in train; the hashes of both are sorted."""
    name = "held-out texts"
    if not len(train) or not len(held_out):
        return Check(name, "not compared: a set could not be read", was_made=False)
    places = np.minimum(np.searchsorted(train, held_out), len(train) - 1)
    share = float((train[places] == held_out).mean())
    problems = []
    if share > MAX_LEAKED_SHARE:
        problem = f"{100 * share:.2f} % of the held-out texts occur in train"
        remedy = "prepare train without the held-out documents"
        problems.append(DataError(str(eval_dir), problem, remedy))
    return Check(name, f"{100 * share:.2f} % occur in train", tuple(problems))
