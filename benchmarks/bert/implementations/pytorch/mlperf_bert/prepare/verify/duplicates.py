"""Examples that occur twice, and held-out texts that occur in training, by 64-bit hashes.

Memory: 16 bytes a sample. By chance two of 160 million hashes agree in one set of a thousand.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mlperf_bert.common.errors import DataError
from mlperf_bert.prepare.verify.contents import Hashes, ShardContents, repeated
from mlperf_bert.prepare.verify.report import Check

# A handful of copies does no harm to training; a text that was prepared twice makes far more.
MAX_COPIED_SHARE = 0.001
# Short texts are found in both sets by chance and boilerplate does occur; more is a leak.
MAX_LEAKED_SHARE = 0.01


class HashStore:
    """The hashes of all samples of a set, in two arrays made once."""

    def __init__(self, num_samples: int) -> None:
        self._texts = np.empty(num_samples, dtype=np.uint64)
        self._copies = np.empty(num_samples, dtype=np.uint64)
        self._num_texts = 0
        self._num_copies = 0

    def add(self, contents: ShardContents) -> None:
        """Take one shard's hashes."""
        self._num_texts = _append(self._texts, self._num_texts, contents.texts)
        self._num_copies = _append(self._copies, self._num_copies, contents.copies)

    def sort(self) -> None:
        """Once, after the last `add` and before anything else."""
        self.texts.sort()
        self._copies[: self._num_copies].sort()

    @property
    def texts(self) -> Hashes:
        """Hashes of the texts, one a sample."""
        return self._texts[: self._num_texts]

    def repeated_text_share(self) -> float:
        """Share of the samples whose text another one before it has."""
        return repeated(self.texts) / max(1, self._num_texts)

    @property
    def comparable(self) -> int:
        """Samples with masks enough to tell a copy from chance."""
        return self._num_copies

    def copied_samples(self) -> int:
        """Samples equal to one before them in text and masking."""
        return repeated(self._copies[: self._num_copies])


def check_duplicates(set_dir: Path, hashes: HashStore, copied: Mapping[Path, int]) -> Check:
    """Whole examples hardly ever repeat: each pass over a text draws other masks.

    Only samples count that have 2**32 ways of masking or more; shorter ones repeat by chance.
    `hashes` are sorted; `copied` counts the copies within each shard.
    """
    total = hashes.copied_samples()
    problems = []
    if total > MAX_COPIED_SHARE * len(hashes.texts):
        problem = f"{total:,} of {len(hashes.texts):,} examples are copies of others"
        remedy = "find the text that is there twice and prepare without it"
        worst = max(copied, key=lambda path: copied[path])
        if copied[worst]:
            problem += f", {copied[worst]:,} of them within {worst.name}"
        problems.append(DataError(str(set_dir), problem, remedy))
    summary = (
        f"{total:,} copies among {hashes.comparable:,} examples with masks enough to tell; "
        f"{100 * hashes.repeated_text_share():.2f} % of the texts repeat"
    )
    return Check("duplicates", summary, tuple(problems), was_made=hashes.comparable > 0)


def check_leak(eval_dir: Path, train: HashStore, held_out: HashStore) -> Check:
    """Held-out texts do not occur in train; both stores sorted."""
    name = "held-out texts"
    if not len(train.texts) or not len(held_out.texts):
        return Check(name, "not compared: a set could not be read", was_made=False)
    places = np.searchsorted(train.texts, held_out.texts)
    is_leaked = train.texts[np.minimum(places, len(train.texts) - 1)] == held_out.texts
    share = float(is_leaked.mean())
    problems = []
    if share > MAX_LEAKED_SHARE:
        problem = f"{100 * share:.2f} % of the held-out texts occur in train"
        remedy = "prepare train without the held-out documents"
        problems.append(DataError(str(eval_dir), problem, remedy))
    return Check(name, f"{100 * share:.2f} % occur in train", tuple(problems))


def _append(store: Hashes, used: int, values: Hashes) -> int:
    store[used : used + len(values)] = values
    return used + len(values)
