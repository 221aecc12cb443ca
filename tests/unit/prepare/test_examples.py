"""Taking examples out of many: by number and evenly."""

import numpy as np

from mlperf_bert.prepare.examples import ExampleArrays, pick_evenly, take_examples


def examples_of(lengths: list[int], masked_counts: list[int]) -> ExampleArrays:
    count, num_tokens, num_masked = len(lengths), sum(lengths), sum(masked_counts)
    return ExampleArrays(
        input_ids=np.arange(num_tokens, dtype=np.uint32),
        offsets=np.cumsum([0, *lengths]),
        segment_b_start=np.arange(count, dtype=np.uint16),
        masked_lm_positions=np.arange(num_masked, dtype=np.uint16),
        masked_lm_ids=np.arange(100, 100 + num_masked, dtype=np.uint32),
        masked_lm_offsets=np.cumsum([0, *masked_counts]),
        next_sentence_label=np.arange(count, dtype=np.uint8) % 2,
    )


def test_take_examples_keeps_each_whole() -> None:
    found = take_examples(examples_of([3, 1, 4, 2], [1, 2, 1, 3]), np.array([2, 0, 2]))
    assert found.input_ids.tolist() == [4, 5, 6, 7, 0, 1, 2, 4, 5, 6, 7]
    assert found.offsets.tolist() == [0, 4, 7, 11]
    assert found.segment_b_start.tolist() == [2, 0, 2]
    assert found.masked_lm_positions.tolist() == [3, 0, 3]
    assert found.masked_lm_ids.tolist() == [103, 100, 103]
    assert found.masked_lm_offsets.tolist() == [0, 1, 2, 3]
    assert found.next_sentence_label.tolist() == [0, 0, 0]


def test_pick_evenly_follows_the_formula() -> None:
    picked = pick_evenly(examples_of([1] * 17, [1] * 17), 5)
    assert picked.segment_b_start.tolist() == [int(i * 17 / 5) for i in range(5)]
