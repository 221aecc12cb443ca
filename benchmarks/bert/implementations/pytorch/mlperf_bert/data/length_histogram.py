"""Lengths of real pre-training sequences: published counts, drawn lengths, shapes.

For benchmarks, simulations and plans that must not depend on a prepared set. No torch.
"""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from mlperf_bert.common.errors import DataError
from mlperf_bert.common.seeds import derive_seed
from mlperf_bert.common.untrusted import read_regular_file
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.config.sections import STORED_MASKING_RATE
from mlperf_bert.data.balance import planner_of_lengths
from mlperf_bert.data.capacity import StaticShape, plan_shapes
from mlperf_bert.data.shards import IntArray

LONGEST = 65_535  # tokens: lengths are held in 16 bits
_HEADER = "length,count"
_MOST_DIGITS = 12
_MAX_BYTES = 4 * 2**20  # 65,535 lines have a quarter of that
_REMEDY = f"give a CSV file: a line {_HEADER!r}, then one length and its count a line"

SHORTEST = 5  # [CLS] word [SEP] word [SEP]
PLANNED_SAMPLES = 2**16  # steps from which a run's shapes are planned


@dataclass(frozen=True, kw_only=True)
class LengthHistogram:
    """`counts[i]` sequences, at least one, have `lengths[i]` tokens; both int64 [n], ascending."""

    lengths: IntArray
    counts: IntArray

    @property
    def num_sequences(self) -> int:
        """Sequences counted."""
        return int(self.counts.sum())

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.lengths[-1])

    @property
    def mean_length(self) -> float:
        """Tokens of a sequence on average."""
        return float(self.lengths @ self.counts / self.num_sequences)

    def draw_evenly(self, count: int, seed: int) -> IntArray:
        """One length from each of `count` equally likely ranges, int64 [count], in random order.

        A few of them already have nearly the mean of all, as a benchmark of few batches needs.
        """
        generator = np.random.default_rng(seed)
        shares = (np.arange(count) + generator.random(count)) / count
        rank = (generator.permutation(shares) * self.num_sequences).astype(np.int64)
        return self.lengths[np.searchsorted(np.cumsum(self.counts), rank, side="right")]


def wikipedia_lengths() -> LengthHistogram:
    """The lengths of BERT's second phase on Wikipedia, at most 512 tokens (arXiv 2107.02027)."""
    name = "wikipedia_lengths.csv"
    text = resources.files("mlperf_bert.data").joinpath(name).read_text("utf-8")
    return _parse_histogram(text, name)


def read_histogram(path: Path) -> LengthHistogram:
    """Read a CSV file: a line `length,count`, then such pairs in any order; `#` begins a comment.

    Raises DataError, naming the line, for anything else; a count of 0 is as good as no line.
    """
    try:
        text = read_regular_file(path, _MAX_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise DataError(str(path), reason or "cannot be read", _REMEDY) from None
    return _parse_histogram(text, str(path))


def _parse_histogram(text: str, source: str) -> LengthHistogram:
    counts: dict[int, int] = {}
    header_seen = False
    for number, line in enumerate(text.splitlines(), start=1):
        where, row = f"{source}:{number}", line.strip()
        if not row or row.startswith("#"):
            continue
        if not header_seen:
            if row != _HEADER:
                raise DataError(where, f"is {row[:40]!r} where {_HEADER!r} belongs", _REMEDY)
            header_seen = True
            continue
        length, count = _parse_row(row, where)
        if length in counts:
            raise DataError(where, f"length {length} for the second time", "keep one of the lines")
        counts[length] = count
    present = sorted(length for length, count in counts.items() if count)
    if not present:
        raise DataError(source, "counts no sequence", _REMEDY)
    return LengthHistogram(
        lengths=np.array(present, dtype=np.int64),
        counts=np.array([counts[length] for length in present], dtype=np.int64),
    )


def _parse_row(row: str, where: str) -> tuple[int, int]:
    cells = row.split(",")
    if len(cells) != 2 or not all(cell.isascii() and cell.isdecimal() for cell in cells):
        raise DataError(where, f"{row[:40]!r} is not two whole numbers", _REMEDY)
    if max(map(len, cells)) > _MOST_DIGITS:
        raise DataError(where, f"has a number above {_MOST_DIGITS} digits", _REMEDY)
    length, count = map(int, cells)
    if not 1 <= length <= LONGEST:
        raise DataError(where, f"length {length}", f"the index holds lengths 1 to {LONGEST}")
    return length, count


def real_lengths(count: int, max_length: int, seed: int) -> IntArray:
    """Published lengths, int64 [count], scaled to `max_length`."""
    published = wikipedia_lengths()
    scaled = published.draw_evenly(count, seed) * max_length
    return np.maximum(-(-scaled // published.max_length), SHORTEST)


def masked_counts_of(lengths: IntArray, most: int, rate: float = STORED_MASKING_RATE) -> IntArray:
    """Masked positions of sequences of these lengths, a share of their tokens, at most `most`."""
    counts: IntArray = np.clip(np.rint(rate * lengths), 1, most).astype(np.int64)
    return counts


def run_shapes(config: RunConfig) -> tuple[StaticShape, ...]:
    """The shapes to which a captured run of `config` pads its forwards, planned as in a run."""
    longest, most_masked = config.data.max_seq_length, config.data.max_predictions
    seed = 1 if config.run.seed == "random" else config.run.seed
    count = max(PLANNED_SAMPLES, config.parallel.global_batch_size)
    lengths = real_lengths(count, longest, derive_seed(seed, "planned lengths"))
    planner = planner_of_lengths(
        config,
        seed,
        lengths.astype(np.uint16),
        masked_counts_of(lengths, most_masked, config.data.masking_rate).astype(np.uint16),
        np.argsort(lengths, kind="stable"),
        np.bincount(lengths, minlength=longest + 1).tolist(),
    )
    return plan_shapes(planner, config.max_steps, max_seqlen=longest, max_masked=most_masked)
