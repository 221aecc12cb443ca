"""Compiled example making gives the arrays of the plain-Python one, whatever the text."""

import os
import random
import signal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlperf_bert.data.index import ShardSettings
from mlperf_bert.prepare import examples
from mlperf_bert.prepare.examples import between, make_examples, new_stream, shuffle, uniform
from mlperf_bert.vocabulary.word_pieces import SPECIAL_TOKENS, parse_vocabulary
from plain_examples import as_documents, plain_examples

SIZES = {"max_seq_length": 64, "max_predictions": 10}


VOCABULARIES = {
    size: parse_vocabulary("\n".join([*SPECIAL_TOKENS, *map(str, range(5, size))]).encode(), "")
    for size in (6, 1000, 65_536, 65_537)
}


def assert_both_agree(nested, vocab_size, **settings):
    documents, vocabulary = as_documents(nested, vocab_size), VOCABULARIES[vocab_size]
    plain = plain_examples(documents, vocabulary, ShardSettings(**settings))
    compiled = make_examples(documents, vocabulary, ShardSettings(**settings))
    for name in plain.__slots__:
        expected, found = getattr(plain, name), getattr(compiled, name)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected, err_msg=name)
    return compiled


SENTENCE_LENGTHS = st.one_of(st.integers(1, 6), st.integers(1, 40), st.integers(100, 700))
TEXT_SHAPE = st.lists(st.lists(SENTENCE_LENGTHS, min_size=1, max_size=9), min_size=2, max_size=8)


@settings(max_examples=50, deadline=None)
@given(
    shape=TEXT_SHAPE,
    vocab_size=st.sampled_from(sorted(VOCABULARIES)),
    max_seq_length=st.one_of(st.integers(8, 64), st.sampled_from([128, 512, 65_535])),
    max_predictions=st.integers(1, 400),
    dupe_factor=st.integers(1, 4),
    seed=st.integers(0, 2**63 - 1),
)
def test_any_text(shape, vocab_size, seed, **sizes):
    rng = random.Random(seed)
    nested = [
        [[rng.randrange(5, vocab_size) for _ in range(length)] for length in document]
        for document in shape
    ]
    assert_both_agree(nested, vocab_size, seed=seed, **sizes)


def test_the_longest_examples():
    sizes = {"max_seq_length": 65_535, "max_predictions": 255}
    made = assert_both_agree([[[7] * 70_000], [[5]]], 1000, dupe_factor=2, seed=0, **sizes)
    assert np.diff(made.offsets).max() == 65_535


def test_an_interrupt_waits_for_compiled_code(monkeypatch):
    """There it would crash the process."""
    add_pass, done = examples.add_pass, []

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        done.append(add_pass(*arguments))
        return done[-1]

    monkeypatch.setattr(examples, "add_pass", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            assert_both_agree([[[7] * 9], [[5]]], 1000, dupe_factor=2, seed=0, **SIZES)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(done) == 1


# Around powers of two; the largest is the widest range that one 32-bit word can decide.
WIDTHS = st.builds(
    lambda bits, more: max(1, 2**bits + more), st.integers(0, 31), st.integers(-1, 1)
)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    ranges=st.lists(st.tuples(st.integers(0, 2**31), WIDTHS | st.just(2**32 - 1)), max_size=20),
    count=st.integers(0, 20) | st.integers(100, 2000),
)
def test_the_stream_is_that_of_the_standard_library(seed, ranges, count):
    stream, rng = new_stream(seed), random.Random(seed)
    # 624 words make 312 numbers: the state is renewed.
    assert [uniform(stream) for _ in range(400)] == [rng.random() for _ in range(400)]
    for low, width in ranges:
        for _ in range(10):
            assert between(stream, low, low + width - 1) == rng.randint(low, low + width - 1)
    ours, theirs = np.arange(count), list(range(count))
    shuffle(stream, ours)
    rng.shuffle(theirs)
    assert ours.tolist() == theirs
    assert uniform(stream) == rng.random()  # as many words drawn
