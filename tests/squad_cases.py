"""Windows and a small model that tests of fine-tuning share."""

import numpy as np
from numpy.typing import NDArray

from bert_tools.squad.settings import SquadSettings, parse_engine
from bert_tools.squad.windows import Windows
from mlperf_bert.config.sections import ModelSection

VOCABULARY = 64
LONGEST = 24
SMALL = ModelSection(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_layers=4,
    num_heads=2,
    intermediate_size=64,
    max_position_embeddings=LONGEST,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)


NONE = np.zeros(0, dtype=np.int64)


def windows_of(
    input_ids: NDArray[np.int64],
    lengths: NDArray[np.int64],
    segment_b_start: NDArray[np.int64],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> Windows:
    """Windows of no text."""
    return Windows(
        input_ids=input_ids,
        lengths=lengths,
        segment_b_start=segment_b_start,
        starts=starts,
        ends=ends,
        question_of=NONE,
        first_piece=NONE,
        piece_starts=NONE,
        piece_ends=NONE,
        remarks=(),
    )


def made_up_windows(count: int) -> Windows:
    """Random words; the answer, where there is one, begins at a word of its own: learnable."""
    random = np.random.default_rng(5)
    lengths = random.integers(8, LONGEST + 1, count)
    segment_b_start = random.integers(2, 6, count)
    starts = np.where(
        random.random(count) < 2 / 3, random.integers(segment_b_start, lengths - 1), 0
    )
    ends = np.where(starts > 0, np.minimum(starts + random.integers(0, 3, count), lengths - 1), 0)
    input_ids = random.integers(3, VOCABULARY, lengths.sum())
    first = np.cumsum(lengths) - lengths
    answered = starts > 0
    input_ids[(first + starts)[answered]] = 1
    input_ids[(first + ends)[answered]] = 2
    return windows_of(input_ids, lengths, segment_b_start, starts, ends)


def small_settings(engine: str, **changes: object) -> SquadSettings:
    """A short run with a tiny epsilon's trouble kept out: 1e-6."""
    same = {"global_batch": 8, "microbatches": 4, "learning_rate": 1e-3, "updates": 50}
    same |= {"max_length": LONGEST, "epsilon": 1e-6}
    return SquadSettings(engine=parse_engine(engine), **{**same, **changes})  # type: ignore[arg-type]
