"""Made-up batches: real lengths, asked-for totals, and the shapes of a captured run."""

import numpy as np
import pytest

from bert_tools.bench.batches import make_updates, padded, run_updates, shape_of, with_total
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.data.length_histogram import SHORTEST, real_lengths, run_shapes, wikipedia_lengths
from support import CONFIGS

LONGEST = 64


@pytest.fixture
def config() -> RunConfig:
    changes = ("parallel.local_batch_size=6", "parallel.grad_accum_steps=2", "run.seed=3")
    return load_config(CONFIGS / "cpu_tiny.toml", [*changes, "parallel.ranks_per_node=1"])


def test_lengths_are_published_ones_or_in_proportion() -> None:
    published = wikipedia_lengths()
    lengths = real_lengths(400, published.max_length, seed=1)
    np.testing.assert_array_equal(lengths, published.draw_evenly(400, seed=1))
    shorter = real_lengths(400, 64, seed=1)
    assert shorter.max() == 64
    assert shorter.min() >= SHORTEST
    assert shorter.mean() / 64 == pytest.approx(lengths.mean() / 512, abs=1 / 64)


def test_denominators_are_those_of_the_whole_update() -> None:
    updates = make_updates(
        np.arange(10, 22), 2, forwards=3, vocab_size=50, max_predictions=9, seed=1
    )
    assert [[batch.lengths for batch in update] for update in updates] == [
        [(10, 11), (12, 13), (14, 15)],
        [(16, 17), (18, 19), (20, 21)],
    ]
    for update in updates:
        num_masked = sum(len(batch.labels) for batch in update)
        for batch in update:
            assert batch.mlm_denominator == num_masked
            assert batch.nsp_denominator == 6
    ids = np.concatenate([batch.sample_ids for update in updates for batch in update])
    assert ids.tolist() == list(range(12))


@pytest.mark.parametrize("total", [6 * SHORTEST, 100, 200, 6 * LONGEST])
def test_lengths_with_a_total(total: int) -> None:
    lengths = real_lengths(6, LONGEST, seed=1)
    changed = with_total(lengths, total, LONGEST)
    assert changed.sum() == total
    assert changed.min() >= SHORTEST
    assert changed.max() <= LONGEST


def test_updates_of_a_run_have_the_tokens_asked_for(config: RunConfig) -> None:
    updates = run_updates(config, 3, tokens=256)
    assert [[len(batch.input_ids) for batch in update] for update in updates] == [[256] * 2] * 3
    shape = shape_of(config, updates)
    assert shape.tokens == 256
    for update in updates:
        for batch in padded(update, (shape,)):
            assert batch.shape == shape
            assert len(batch.input_ids) == 256


def test_updates_are_padded_to_the_smallest_shape_that_holds_them(config: RunConfig) -> None:
    shapes = run_shapes(config)
    assert [shape.tokens for shape in shapes] == sorted({shape.tokens for shape in shapes})
    for update in run_updates(config, 3):
        tokens = max(len(batch.input_ids) for batch in update)
        for batch in padded(update, shapes):
            assert batch.shape is not None
            assert batch.shape.tokens == min(s.tokens for s in shapes if s.tokens >= tokens)


def test_an_update_that_no_shape_holds_stays_as_it_is(config: RunConfig) -> None:
    small, large = run_updates(config, 1, tokens=128), run_updates(config, 1, tokens=256)
    assert padded(large[0], (shape_of(config, small),)) == large[0]
