"""Intervals and verdicts, compared with values that were computed by hand."""

import math

import numpy as np
import pytest

from bert_tools.score.report import (
    BAG_OF_WORDS,
    BETTER,
    NO_DIFFERENCE,
    PROBE,
    WORSE,
    Score,
    conclusion,
    interval,
    picture,
    summarize,
    table,
    verdict,
)

similarity = pytest.importorskip("bert_tools.score.similarity")
classify = pytest.importorskip("bert_tools.score.classify")


def test_an_interval_by_hand():
    # Mean 0.8, standard deviation 0.1, t of 2 degrees of freedom 4.302653.
    found = interval([0.7, 0.8, 0.9], 1 / 3, 100)
    assert math.isclose(found["mean"], 0.8)
    assert math.isclose(
        found["half_width"], 4.302653 * 0.1 * math.sqrt(1 / 3 + 1 / 3), rel_tol=1e-6
    )
    assert interval([0.7], 1 / 3, 100) == {"mean": 0.7, "half_width": None}


def test_equal_scores_have_an_interval_of_one_test_example():
    found = interval([1.0, 1.0, 1.0], 1 / 3, 20)
    assert math.isclose(found["half_width"], 4.302653 / 20 * math.sqrt(2 / 3), rel_tol=1e-6)


def test_a_verdict_needs_an_interval_without_zero():
    assert verdict(0.01, 0.2) == BETTER and verdict(-0.2, -0.01) == WORSE
    for bounds in ((-0.1, 0.2), (0.0, 0.1), (-0.1, 0.0), (None, None)):
        assert verdict(*bounds) == NO_DIFFERENCE


def summary(own, words):
    scores = [
        Score(way, model, seed, value, value)
        for way, model, values in ((PROBE, "m", own), (BAG_OF_WORDS, None, words))
        for seed, value in enumerate(values, 1)
    ]
    labelled = summarize(scores, ["m"], 1 / 3, 100)
    settings = {"seeds": len(own)}
    return {"model": {"name": "m"}, "against": None, "settings": settings, "labelled": labelled}


@pytest.mark.parametrize(
    ("own", "words", "said"),
    [
        ((0.9, 0.91, 0.92), (0.7, 0.72, 0.71), BETTER),
        ((0.7, 0.72, 0.71), (0.9, 0.91, 0.92), WORSE),
        ((0.7, 0.9, 0.8), (0.8, 0.7, 0.9), NO_DIFFERENCE),
        ((0.9, 0.9, 0.9), (0.8, 0.8, 0.8), BETTER),
        ((0.9, 0.9, 0.9), (0.89, 0.89, 0.89), NO_DIFFERENCE),  # one of 100 test examples
        ((0.9,), (0.2,), NO_DIFFERENCE),
    ],
)
def test_the_conclusion_says_what_the_interval_shows(own, words, said):
    result = summary(own, words)
    (sentence,) = conclusion(result)
    assert sentence.startswith(f"m compared with the bag of words: {said} with frozen features")
    assert ("use --seeds 2" in sentence) == (len(own) == 1)
    lines = table(result)
    assert len(lines) == 3 and lines[1].startswith("m, frozen features")


def test_differences_are_paired_by_seed():
    """The scores spread widely, but their differences do not."""
    result = summary((0.5, 0.7, 0.9), (0.45, 0.64, 0.85))
    (found,) = result["labelled"]["differences"]
    assert found["verdict"] == BETTER and found["accuracy"]["half_width"] < 0.04


def test_spearman_by_hand():
    values = np.array([1.0, 2.0, 3.0, 4.0])
    assert similarity.spearman(values, values**3) == pytest.approx(1.0)
    # Ranks 1 2 3 4 and 2 1 4 3: 1 - 6 * 4 / (4 * 15) = 0.6
    assert similarity.spearman(values, np.array([5.0, 2.0, 9.0, 7.0])) == pytest.approx(0.6)
    assert similarity.spearman(np.zeros(4), values) == 0.0


def test_a_bootstrap_interval_holds_the_middle():
    found = similarity.interval(np.arange(1001.0))
    assert (found["low"], found["high"]) == (25.0, 975.0)


def test_features_of_a_pair_by_hand():
    first = np.array([[3.0, 4.0]])
    second = np.array([[4.0, 3.0]])
    dense = [3, 4, 4, 3, 1, 1, 12, 12, 24 / 25]
    found = classify.pair_features(first, second, similarity.cosine(first, second))
    assert found == pytest.approx(np.array([dense]))
    sparse = list(map(classify.scipy.sparse.csr_matrix, (first, second)))
    found = classify.pair_features(*sparse, similarity.cosine(*sparse))
    assert found.toarray() == pytest.approx(np.array([[*dense[:-1], 5 * 24 / 25]]))


@pytest.mark.parametrize("form", [np.array, classify.scipy.sparse.csr_matrix])
def test_texts_without_a_known_word_are_not_similar(form):
    first = form([[0.0, 0.0], [3.0, 4.0], [0.0, 0.0], [0.0, 2.0]])
    second = form([[0.0, 0.0], [0.0, 0.0], [0.0, 1.0], [3.0, 4.0]])
    assert similarity.cosine(first, second).tolist() == pytest.approx([0, 0, 0, 0.8])


def test_a_bag_of_words_compares_words_that_it_was_not_trained_on():
    seconds = ["a b", "c d", "new words", "other ones"]
    texts = classify.Texts(None, ["a b", "a b", "new words", "new words"], seconds, [])
    last = classify.bag_of_words(texts, np.array([0, 1])).toarray()[:, -1]
    assert last == pytest.approx([5, 0, 5, 0])


def test_a_text_without_words_has_features():
    texts = classify.Texts(None, ["\N{GRINNING FACE}", "!", "a"], None, [])
    assert classify.bag_of_words(texts, np.arange(2)).toarray().tolist() == [[0, 1], [1, 0], [0, 0]]


def test_a_small_set_gets_more_epochs():
    settings = classify.Settings(seeds=1, epochs=None, learning_rate=None)
    assert [settings.epochs_for(count) for count in (16, 225, 3200, 10**6)] == [200, 14, 4, 4]


def test_what_is_printed(snapshot):
    """Two models with two seeds each, and pairs."""
    scores = [
        Score(way, model, seed, value, value - 0.1)
        for way, model, values in (
            ("fine-tuned", "m", (0.9, 0.91)),
            (PROBE, "m", (0.8, 0.7)),
            ("fine-tuned", "other", (0.95, 0.97)),
            (PROBE, "other", (0.6, 0.5)),
            (BAG_OF_WORDS, None, (0.5, 0.51)),
            ("most frequent class", None, (0.3, 0.3)),
        )
        for seed, value in enumerate(values, 1)
    ]
    row = {"spearman": 0.5, "low": 0.4, "high": 0.6}
    change = {"method": "m", "spearman": -0.1, "low": -0.2, "high": -0.05}
    pairs = {
        "correlations": [{"method": name, **row} for name in ("m", "other", "tf-idf cosine")],
        "differences": [{**change, "compared_with": "other"}],
    }
    result = {
        "model": {"name": "m"},
        "against": {"name": "other"},
        "settings": {"seeds": 2},
        "labelled": summarize(scores, ["m", "other"], 1 / 3, 100),
        "pairs": pairs,
    }
    assert "\n".join([*table(result), "", *conclusion(result)]) == snapshot


def test_a_model_has_its_color_if_its_name_begins_another():
    """A baseline is grey."""
    row = {"spearman": 0.5, "low": 0.6, "high": 0.7}  # a bootstrap interval may miss the value
    scores = [
        Score(PROBE, "m", 1, 0.5, 0.5),
        Score(PROBE, "m2", 1, 0.5, 0.5),
        Score(BAG_OF_WORDS, None, 1, 0.5, 0.5),
    ]
    result = {
        "model": {"name": "m"},
        "against": {"name": "m2"},
        "labelled": summarize(scores, ["m", "m2"], 1 / 3, 100),
        "pairs": {"correlations": [{"method": n, **row} for n in ("m", "m2", "tf-idf cosine")]},
    }
    (axes,) = picture(result).axes
    colors = [bar.get_facecolor() for bar in axes.patches]
    assert colors[:3] == colors[3:] and len(set(colors)) == 3
