"""Example making: the written-out shuffle, the invariants of every example, the index dtype."""

import random

import numpy as np
import pytest

from mlperf_bert.prepare.examples import ExampleMaker, pick_evenly, shuffle_in_place
from mlperf_bert.prepare.vocabulary import SPECIAL_TOKENS, Vocabulary


def vocabulary_of(size: int) -> Vocabulary:
    tokens = (*SPECIAL_TOKENS, *(f"w{i}" for i in range(size - 5)))
    return Vocabulary(tokens, {token: i for i, token in enumerate(tokens)}, "0" * 64, b"")


@pytest.mark.parametrize("count", [*range(0, 70), 127, 128, 129, 509, 1025])
def test_shuffle_in_place_is_cpythons(count: int) -> None:
    ours, theirs = list(range(count)), list(range(count))
    our_rng, their_rng = random.Random(count), random.Random(count)
    shuffle_in_place(ours, our_rng)
    their_rng.shuffle(theirs)
    assert ours == theirs
    assert our_rng.getstate() == their_rng.getstate()


@pytest.mark.parametrize(
    ("size", "dtype"), [(100, np.uint16), (65_536, np.uint16), (65_537, np.uint32)]
)
def test_examples_are_well_formed(size: int, dtype: type) -> None:
    rng = random.Random(size)
    documents = [
        [
            [rng.randrange(5, size) for _ in range(rng.randint(1, 40))]
            for _ in range(rng.randint(1, 12))
        ]
        for _ in range(30)
    ]
    vocabulary = vocabulary_of(size)
    maker = ExampleMaker(vocabulary, max_seq_length=48, max_predictions=5, seed=3)
    examples = maker.make(documents, 2)
    assert examples.input_ids.dtype == examples.masked_lm_ids.dtype == dtype
    assert {0, 1} == set(examples.next_sentence_label.tolist())
    for i in range(len(examples)):
        tokens = examples.input_ids[examples.offsets[i] : examples.offsets[i + 1]].tolist()
        start, end = examples.masked_lm_offsets[i : i + 2]
        positions = examples.masked_lm_positions[start:end].tolist()
        start_of_b = int(examples.segment_b_start[i])
        fixed = {0, start_of_b - 1, len(tokens) - 1}
        assert 5 <= len(tokens) <= 48
        assert tokens[0] == 2
        assert tokens[start_of_b - 1] == tokens[-1] == 3
        assert len(positions) == min(5, max(1, round(len(tokens) * 0.15)))
        assert positions == sorted(set(positions))
        assert not fixed & set(positions)
        assert 3 <= start_of_b < len(tokens) - 1
    assert (examples.masked_lm_ids >= 5).all()


def test_pick_evenly_follows_the_formula() -> None:
    maker = ExampleMaker(vocabulary_of(50), max_seq_length=16, max_predictions=3, seed=0)
    examples = maker.make([[[7, 8, 9]] * 20, [[10, 11]] * 20], 2)
    picked = pick_evenly(examples, 5)
    assert len(picked) == 5
    for i in range(5):
        number = int(i * len(examples) / 5)
        np.testing.assert_array_equal(
            picked.input_ids[picked.offsets[i] : picked.offsets[i + 1]],
            examples.input_ids[examples.offsets[number] : examples.offsets[number + 1]],
        )
