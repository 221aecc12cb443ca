"""The activity of a rank in words, and the number that tells if it goes on."""

import pytest

from mlperf_bert.distributed.whereabouts import Doing, Whereabouts


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
    assert whereabouts.progress is None
    whereabouts.at(doing, number)
    assert (whereabouts.in_words, whereabouts.in_start_up) == (words, False)
    assert (whereabouts.progress is not None) == must_go_on


def test_the_same_words_again_are_progress() -> None:
    whereabouts = Whereabouts()
    seen = []
    for _ in range(3):
        whereabouts.at("evaluation", 5)
        seen.append(whereabouts.progress)
        assert whereabouts.progress == seen[-1]
    assert len(set(seen)) == 3
