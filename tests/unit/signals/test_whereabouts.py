"""What a rank is doing, in words, and what of it must go on."""

import pytest

from mlperf_bert.signals.whereabouts import Doing, Whereabouts


@pytest.mark.parametrize(
    ("doing", "number", "words", "must_go_on"),
    [
        ("batch", 38, "waiting for the batch of step 38", True),
        ("step", 37, "step 37", True),
        ("evaluation", 16384, "evaluation after 16,384 samples", True),
        ("checkpoint", 120, "checkpoint of step 120", False),
        ("end", None, "end of the run", False),
    ],
)
def test_words(doing: Doing, number: int | None, words: str, must_go_on: bool) -> None:
    whereabouts = Whereabouts()
    assert (whereabouts.in_words, whereabouts.in_start_up) == ("start-up", True)
    assert whereabouts.sign_of_life() is None
    whereabouts.at(doing, number)
    assert (whereabouts.in_words, whereabouts.in_start_up) == (words, False)
    assert (whereabouts.sign_of_life() is not None) == must_go_on


def test_the_same_words_again_are_a_sign_of_life() -> None:
    whereabouts = Whereabouts()
    signs = []
    for _ in range(3):
        whereabouts.at("evaluation", 5)
        signs.append(whereabouts.sign_of_life())
        assert whereabouts.sign_of_life() == signs[-1]
    assert len(set(signs)) == 3
