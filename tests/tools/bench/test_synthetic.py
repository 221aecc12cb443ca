"""Made-up samples have the shape of prepared ones."""

import numpy as np

from bert_tools.bench.synthetic import synthetic_samples
from mlperf_bert.data.length_histogram import SHORTEST
from mlperf_bert.data.shards import Samples

LENGTHS = np.array([SHORTEST, 6, 10, 13, 30, 31, 200, 506, 512])
VOCAB_SIZE = 50


def make(max_predictions: int = 76, seed: int = 2) -> Samples:
    return synthetic_samples(
        LENGTHS, vocab_size=VOCAB_SIZE, max_predictions=max_predictions, seed=seed
    )


def test_masked_counts_are_those_of_preparation() -> None:
    # arXiv 1810.04805: 15 %, rounded half to even, at least one and at most max_predictions.
    for limit in (20, 76):
        expected = [min(limit, max(1, round(length * 0.15))) for length in LENGTHS.tolist()]
        assert make(limit).masked_counts.tolist() == expected


def test_masked_positions_are_words_of_their_sample() -> None:
    samples = make()
    ends = np.cumsum(samples.masked_counts)
    parts = np.split(samples.masked_positions, ends[:-1])
    for positions, length, start in zip(parts, LENGTHS, samples.segment_b_start, strict=True):
        assert (np.diff(positions) > 0).all()  # ascending, none twice
        assert not {0, start - 1, length - 1} & set(positions.tolist())  # [CLS] and both [SEP]
        assert positions[0] > 0
        assert positions[-1] < length


def test_both_segments_have_a_word() -> None:
    start = make().segment_b_start
    assert (start >= 3).all()
    assert (LENGTHS - start >= 2).all()


def test_values_are_in_range_and_arrays_fit() -> None:
    samples = make()
    assert len(samples.input_ids) == LENGTHS.sum()
    assert len(samples.masked_ids) == samples.masked_counts.sum()
    for words in (samples.input_ids, samples.masked_ids):
        assert words.min() > 0
        assert words.max() < VOCAB_SIZE
    assert set(samples.next_sentence_label.tolist()) == {0, 1}
    assert all(getattr(samples, name).dtype == np.int64 for name in Samples.__dataclass_fields__)


def test_a_seed_is_one_set_of_samples() -> None:
    np.testing.assert_array_equal(make(seed=5).input_ids, make(seed=5).input_ids)
    assert (make(seed=5).input_ids != make(seed=6).input_ids).any()
