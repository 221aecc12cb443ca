"""The full check of `verify`: forged contents."""

import numpy as np
import pytest

from mlperf_bert.data.index import masked_count_table, read_sidecar
from verify_cases import check, flip, problems, shard, sign, spoil

PAD, UNK, CLS, SEP, MASK = range(5)


def test_a_good_pair_passes_alike_with_one_process_and_two(made):
    alone, together = (check(made, full=True, workers=workers) for workers in (1, 2))
    assert alone.problems == []
    assert alone.to_text() == together.to_text()


def test_no_shard_is_read_of_a_set_whose_files_do_not_fit(pair):
    flip(shard(pair), 5)
    (pair / "train" / "vocab.txt").unlink()
    (found,) = problems(pair, full=True).splitlines()
    assert str(pair / "train" / "vocab.txt") in found


def without_sep_before_b(arrays):
    arrays["input_ids"][arrays["segment_b_start"][3] + arrays["offsets"][3] - 1] = CLS


def with_a_token_in_the_text(token):
    def change(arrays):
        free = np.ones(arrays["offsets"][1], dtype=bool)
        free[[0, arrays["segment_b_start"][0] - 1, -1]] = False
        free[arrays["masked_lm_positions"][: arrays["masked_lm_offsets"][1]]] = False
        arrays["input_ids"][np.flatnonzero(free)[0]] = token

    return change


def swap_positions(arrays):
    arrays["masked_lm_positions"][:2] = arrays["masked_lm_positions"][1::-1]


def shift_masked_count(arrays):
    arrays["masked_lm_offsets"][1] -= 1


def put(name, index, value):
    def change(arrays):
        arrays[name][index] = value

    return change


def shift_offset(arrays):
    """Give a sample the first token of the next, where neither needs other masked counts then."""
    table = masked_count_table(64, 10, 0.15)
    lengths = np.diff(arrays["offsets"])
    is_alike = (lengths < 64) & (table[np.minimum(lengths + 1, 64)] == table[lengths])
    is_alike[:-1] &= table[lengths[1:] - 1] == table[lengths[1:]]
    arrays["offsets"][np.flatnonzero(is_alike[:-1])[0] + 1] += 1


FORGERIES = {
    "position on [CLS]": (put("masked_lm_positions", 0, 0), "on [CLS]"),
    "position outside": (put("masked_lm_positions", -1, 63), "outside"),
    "unsorted": (swap_positions, "masked_lm_positions that do not ascend: sample 0"),
    "no [CLS]": (put("input_ids", 0, 7), "start with [CLS]: sample 0"),
    "no last [SEP]": (put("input_ids", -1, 7), "end with [SEP]"),
    "no middle [SEP]": (without_sep_before_b, "before segment B: sample 3"),
    "[SEP] in text": (with_a_token_in_the_text(SEP), "in its text: sample 0"),
    "[PAD] in text": (with_a_token_in_the_text(PAD), "in its text: sample 0"),
    "segment": (put("segment_b_start", 2, 1), "segment empty: sample 2"),
    "masked count": (shift_masked_count, "masked positions: sample 0"),
    "offsets": (shift_offset, "start with [CLS]: sample"),
}


@pytest.mark.parametrize(("change", "problem"), FORGERIES.values(), ids=FORGERIES)
def test_forged_contents(pair, change, problem):
    spoil(shard(pair), change)
    assert problems(pair) == ""
    found = problems(pair, full=True)
    assert str(shard(pair)) in found
    assert problem in found


def test_labels_all_1_of_a_whole_set(pair):
    for name in "abc":
        spoil(shard(pair, name), put("next_sentence_label", slice(None), 1))
    report = check(pair, full=True)
    assert report.problems == []  # single-sentence documents give it, and `prepare` takes them
    assert "next-sentence label 1: 100.00%" in report.to_text()


def test_offsets_that_lead_out_of_the_shard(pair):
    for name, limit in (("offsets", 64), ("masked_lm_offsets", 10)):
        place = read_sidecar(shard(pair)).datasets[name]
        array = np.memmap(shard(pair), "<i8", mode="r+", offset=place.offset, shape=(place.count,))
        before = array[1]
        for value in (0, limit + 1, -(2**63)):
            array[1] = value
            array.flush()
            sign(pair / "train")
            found = problems(pair / "train", full=True)
            words = f"contains samples with less than 1 or more than {limit} entries"
            assert f"{shard(pair)}: {name}: {words}" in found
        array[1] = before


def test_random_damage_with_right_digests_never_ends_in_a_traceback(pair):
    rng = np.random.default_rng(3)
    pristine = shard(pair).read_bytes()
    first = min(place.offset for place in read_sidecar(shard(pair)).datasets.values())
    found = 0
    for _ in range(20):
        damaged = bytearray(pristine)
        for place in rng.integers(first, len(pristine), 20):
            damaged[place] = rng.integers(256)
        shard(pair).write_bytes(damaged)
        sign(pair / "train")
        found += str(shard(pair)) in problems(pair / "train", full=True)
    assert found == 20


def test_a_vocabulary_for_another_text(pair):
    def without_words(arrays):
        arrays["input_ids"][arrays["input_ids"] > MASK] = UNK

    spoil(shard(pair, "held", "eval"), without_words)
    assert "of the tokens are [UNK]" in problems(pair, full=True)
