"""Rates of a set against what the reference procedure makes of any text, and what occurs twice.

Each masked position is drawn by itself, so a shard's counts are binomial. Shards are judged one by
one, never summed: all start from the same seed, so their draws are alike and their deviations can
add up. A count is refused where chance gives it with less than e**-20, about 6.3 standard errors;
the bound (Chernoff's) holds for small counts too.

Examples that occur twice, and held-out texts that occur in training, are found by 64-bit hashes, 16
bytes a sample. By chance two of 160 million hashes agree in one set of a thousand.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.common.errors import DataError
from mlperf_bert.data.index import REMEDY as INDEX_REMEDY
from mlperf_bert.data.index import Baseline
from mlperf_bert.data.set_checks import SHARD_REMEDY, VOCABULARY_REMEDY
from mlperf_bert.prepare.verify.contents import Hashes, ShardContents, Tally, repeated
from mlperf_bert.prepare.verify.report import Check

MAX_SURPRISE = 20.0
MAX_UNKNOWN_SHARE = 0.5

# A handful of copies does no harm to training; a text that was prepared twice makes far more.
MAX_COPIED_SHARE = 0.001
# Short texts are found in both sets by chance and boilerplate does occur; more is a leak.
MAX_LEAKED_SHARE = 0.01


def surprise(trials: int, count: int, chance: float) -> float:
    """-log of a bound on the chance to be this far off: trials x relative entropy, in nats."""
    share = count / trials
    terms = ((share, chance), (1 - share, 1 - chance))
    return trials * sum(p * math.log(p / q) for p, q in terms if p > 0)


def check_masking(
    tallies: Mapping[Path, Tally], total: Tally, vocab_size: int, num_excluded: int = 0
) -> Check:
    """80 % [MASK], 10 % kept, 10 % random, where a random token is one of all V alike.

    In single segments it is none of the special ones, which are `num_excluded` (data/index.py).
    """
    by_chance = 0.1 / (vocab_size - num_excluded)  # the random token is the one that was there
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
    """Random tokens reach up to the end of the vocabulary, as they are any of it alike.

    Ids that end early are of a smaller vocabulary, whose tokens mean something else. Only those of
    `special` may never be put in for a word: int64, ascending.
    """
    problems = []
    for path, tally in tallies.items():
        replaced = _outcomes(tally)["replaced"]
        unseen = vocab_size - 1 - tally.highest_id
        unseen -= int(np.count_nonzero(special > tally.highest_id))
        # -log of the chance that none of them is one of these.
        if unseen > 0 and -replaced * math.log1p(-unseen / vocab_size) > MAX_SURPRISE:
            problem = (
                f"has no token above {tally.highest_id:,}, among them {replaced:,} random ones: "
                f"the vocabulary of {vocab_size:,} is larger than the one it was made with"
            )
            problems.append(DataError(str(path), problem, VOCABULARY_REMEDY))
    summary = f"ids up to {total.highest_id:,} of {vocab_size:,}"
    return Check("vocabulary used", summary, tuple(problems))


def check_next_sentence(tallies: Mapping[Path, Tally], total: Tally) -> Check:
    """The share of label 1 is a half or, with short documents or samples, more: up to all."""
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
    """At most half of the text is [UNK]; more means another language or vocabulary."""
    problems = []
    if total.unknown > MAX_UNKNOWN_SHARE * total.tokens:
        problem = f"{_percent(total.unknown, total.tokens)} of the tokens are [UNK]"
        remedy = "prepare with a vocabulary for this text"
        problems.append(DataError(str(set_dir), problem, remedy))
    return Check("unknown words", _percent(total.unknown, total.tokens), tuple(problems))


def check_baseline(set_dir: Path, baseline: Baseline, total: Tally, most_frequent: int) -> Check:
    """The stored context-free baseline is that of the contents; see prepare/build.

    `most_frequent` counts the most frequent label among the [MASK] inputs.
    """
    measured = Baseline(
        context_free_accuracy=(total.kept + most_frequent) / max(1, total.masked),
        mask_only_accuracy=most_frequent / max(1, total.mask_inputs),
        masked_tokens=total.masked,
        mask_inputs=total.mask_inputs,
    )
    problems = []
    if measured != baseline:
        problem = f"is {baseline} where the shards give {measured}"
        problems.append(
            DataError(f"{set_dir / 'index' / 'dataset.json'}: baseline", problem, INDEX_REMEDY)
        )
    return Check("baseline", f"{measured.context_free_accuracy:.4f}", tuple(problems))


def rate_statistics(total: Tally) -> dict[str, float]:
    """The shares of a set, for the report."""
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
