"""Made-up samples and batches: shaped as prepared ones, real lengths, a captured run's shapes."""

import numpy as np
import pytest
from bench_cases import tiny

from bert_tools.bench.training_run import padded, run_updates, synthetic_samples
from bert_tools.common.length_histogram import SHORTEST, run_shapes
from mlperf_bert.data.shards import Samples

LENGTHS = np.array([SHORTEST, 6, 10, 13, 30, 31, 200, 506, 512])
VOCAB_SIZE = 50
LONGEST = 64


def make(max_predictions=76, seed=2):
    return synthetic_samples(
        LENGTHS, vocab_size=VOCAB_SIZE, max_predictions=max_predictions, seed=seed
    )


def test_masked_counts_are_those_of_preparation():
    # arXiv 1810.04805: 15 %, rounded half to even, at least one and at most max_predictions.
    for limit in (20, 76):
        expected = [min(limit, max(1, round(length * 0.15))) for length in LENGTHS.tolist()]
        assert make(limit).masked_counts.tolist() == expected


def test_samples_have_the_shape_of_prepared_ones():
    samples = make()
    start = samples.segment_b_start
    assert (start >= 3).all() and (LENGTHS - start >= 2).all()  # a word in both segments
    ends = np.cumsum(samples.masked_counts)
    parts = np.split(samples.masked_positions, ends[:-1])
    for positions, length, first in zip(parts, LENGTHS, start, strict=True):
        assert (np.diff(positions) > 0).all()  # ascending, none twice
        assert not {0, first - 1, length - 1} & set(positions.tolist())  # [CLS] and both [SEP]
        assert positions[0] > 0 and positions[-1] < length
    assert len(samples.input_ids) == LENGTHS.sum()
    assert len(samples.masked_ids) == samples.masked_counts.sum()
    for words in (samples.input_ids, samples.masked_ids):
        assert words.min() > 0 and words.max() < VOCAB_SIZE
    assert set(samples.next_sentence_label.tolist()) == {0, 1}
    assert all(getattr(samples, name).dtype == np.int64 for name in Samples.__dataclass_fields__)
    np.testing.assert_array_equal(samples.input_ids, make().input_ids)
    assert (samples.input_ids != make(seed=6).input_ids).any()


@pytest.fixture
def config():
    changes = ("parallel.local_batch_size=6", "parallel.grad_accum_steps=2")
    lengths = (f"data.max_seq_length={LONGEST}", f"model.max_position_embeddings={LONGEST}")
    return tiny(*changes, *lengths, seed=3)


def test_updates_are_those_of_the_sampler_and_the_balance():
    """Otherwise a step would be measured that is larger than that of the run, or not captured."""
    changes = ("parallel.local_batch_size=16", "parallel.grad_accum_steps=4")
    lengths = (f"data.max_seq_length={LONGEST}", f"model.max_position_embeddings={LONGEST}")
    spread = {}
    for balance in ("none", "presort_global"):
        config = tiny(*changes, *lengths, f"data.balance={balance}", "data.sampler=quantile")
        tokens = [[len(batch.input_ids) for batch in each] for each in run_updates(config, 4)]
        spread[balance] = max(max(each) / np.mean(each) for each in tokens)
        for update in run_updates(config, 4):
            assert None not in {batch.shape for batch in padded(update, run_shapes(config))}
    assert 1 <= spread["presort_global"] < 1.02 < spread["none"]


def test_updates_are_padded_to_the_smallest_shape_that_holds_them(config):
    shapes = run_shapes(config)
    assert [shape.tokens for shape in shapes] == sorted({shape.tokens for shape in shapes})
    for update in run_updates(config, 3):
        tokens = max(len(batch.input_ids) for batch in update)
        for batch in padded(update, shapes):
            assert batch.shape is not None
            assert batch.shape.tokens == min(s.tokens for s in shapes if s.tokens >= tokens)
