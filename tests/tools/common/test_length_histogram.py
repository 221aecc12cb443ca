"""The published length counts, and draws that follow them."""

import numpy as np

from bert_tools.common.length_histogram import LengthHistogram, wikipedia_lengths

THREE = LengthHistogram(lengths=np.array([5, 9, 20]), counts=np.array([1, 2, 7]))


def test_published_facts():
    # arXiv 2107.02027: 16,279,552 sequences of at most 512 tokens, half of that on average.
    published = wikipedia_lengths()
    assert published.num_sequences == 16_279_552
    assert published.max_length == 512
    mean = published.lengths @ published.counts / published.num_sequences
    assert round(mean, 2) == 255.83
    assert (np.diff(published.lengths) > 0).all()
    assert (published.counts > 0).all()


def test_even_draws_take_every_range_once_and_follow_their_seed():
    assert (THREE.num_sequences, THREE.max_length) == (10, 20)
    every = np.repeat(THREE.lengths, THREE.counts).tolist()
    assert sorted(THREE.draw_evenly(10, seed=4)) == every
    draw = wikipedia_lengths().draw_evenly
    np.testing.assert_array_equal(draw(100, seed=7), draw(100, seed=7))
    assert (draw(100, seed=7) != draw(100, seed=8)).any()
