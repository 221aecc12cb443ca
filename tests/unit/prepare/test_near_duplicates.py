"""Held-out text that training text repeats is found, exactly as sets of windows would say."""

import random

import numpy as np

from mlperf_bert.prepare.own_parts import (
    WINDOW,
    held_out_windows,
    mark_seen,
    shares,
    windows_of,
)


def made_up(rng: random.Random, num_words: int) -> str:
    letters = "abcdefghijklmnopqrstuvwxyzäß中文"
    return " ".join("".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(num_words))


def windows_as_text(text: str) -> set[str]:
    kept = "".join(char for char in text.casefold() if char.isalnum())
    return {kept[i : i + WINDOW] for i in range(len(kept) - WINDOW + 1)}


def measured(held_out: list[str], train: list[str]) -> list[float]:
    windows = held_out_windows(held_out)
    seen = np.zeros(len(windows.hashes), dtype=bool)
    for text in train:
        mark_seen(text, windows.hashes, seen)
    return shares(windows, seen)


def test_shares_are_those_of_sets_of_windows() -> None:
    rng = random.Random(3)
    held_out = [made_up(rng, num_words) for num_words in (40, 200, 12, 90, 6)]
    words = [text.split() for text in held_out]
    train = [
        made_up(rng, 300),
        " ".join(words[1][30:90]) + " " + made_up(rng, 20),  # a part of one
        held_out[2].upper() + "!",  # all of another, written otherwise
        " ".join([*words[3][:10], "new", *words[3][11:]]),  # one word changed
    ]
    in_train = set().union(*map(windows_as_text, train))
    expected = [
        len(found & in_train) / len(found) if (found := windows_as_text(text)) else 0.0
        for text in held_out
    ]
    assert measured(held_out, train) == expected
    assert expected[0] == 0
    assert 0.2 < expected[1] < 0.4
    assert expected[2] == 1
    assert expected[3] > 0.8


def test_spaces_case_and_punctuation_make_no_difference() -> None:
    text = made_up(random.Random(1), 60)
    other = ", ".join(text.upper().split())
    assert set(windows_of(text).tolist()) == set(windows_of(other).tolist())


def test_short_and_empty_texts_have_no_windows() -> None:
    assert len(windows_of("")) == 0
    assert len(windows_of("a" * (WINDOW - 1) + " . ")) == 0
    assert len(windows_of("a" * WINDOW)) == 1
    assert measured(["too short"], ["too short"]) == [0.0]
    assert measured([], ["anything at all, as long as it may be for a window"]) == []


def test_places_in_a_text_make_no_difference_to_a_hash() -> None:
    rng = random.Random(2)
    inside = made_up(rng, 30)
    whole = windows_of(made_up(rng, 1000) + inside + made_up(rng, 10))
    assert set(windows_of(inside).tolist()) <= set(whole.tolist())
    assert len(set(whole.tolist())) == len(whole)
