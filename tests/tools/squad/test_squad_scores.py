"""Exact match, F1 and the best threshold; every expected value is derived beside it."""

import pytest

from bert_tools.squad import scores as scores_module
from bert_tools.squad.answers import FoundAnswer
from bert_tools.squad.questions import Answer, Question, Questions
from bert_tools.squad.scores import (
    Measure,
    best_of,
    best_threshold,
    evaluate,
    normalized,
    score,
    texts,
)
from squad_sets import qa, questions_of

CONTEXT = "the cat sat on a mat. The an, a! Cat"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Cat", "cat"),  # lower case, and no article
        ("a cat, an ant; THE end.", "cat ant end"),
        ("theory another banana", "theory another banana"),  # articles are whole words
        (" two\t \n spaces ", "two spaces"),
        ("the-cat", "thecat"),  # punctuation goes first and joins: no article is left to remove
        ("U.S.A.", "usa"),
        ("a.", ""),  # without its full stop an article
        ("\u2014 caf\u00e9\u2019s", "\u2014 caf\u00e9\u2019s"),  # only ASCII's punctuation goes
        ("$5 (five)", "5 five"),
        ("the A an", ""),
        ("!?.", ""),
        ("", ""),
    ],
)
def test_normalized(text: str, expected: str) -> None:
    assert normalized(text) == expected


def asked(*answers: tuple[str, int]) -> Questions:
    return questions_of((CONTEXT, [qa("q", "Who?", *answers)]))


CAT, CAT_SAT, MAT = ("cat", 4), ("cat sat", 4), ("mat", 17)


@pytest.mark.parametrize(
    ("right", "answer", "exact", "words"),
    [
        (["cat"], "cat", 1, 1),
        (["the cat"], "Cat!", 1, 1),  # both are "cat"
        (["cat"], "dog", 0, 0),
        # Right has 3 words, the answer 2, both of them right: precision 2/2, recall 2/3,
        # F1 = 2 (1 x 2/3) / (1 + 2/3) = 4/5.
        (["big black cat"], "black cat", 0, 0.8),
        # Right has 2 words, the answer 4, of which 1 is right: precision 1/4, recall 1/2,
        # F1 = 2 (1/4 x 1/2) / (3/4) = 1/3.
        (["black cat"], "cat on some mat", 0, 1 / 3),
        # The article is no word: right has 1, the answer 1, both the same.
        (["a mat"], "the mat", 1, 1),
        # A word counts as often as in both: right has "two" twice, the answer three times, so 2 are
        # common: precision 2/3, recall 2/2, F1 = 2 (2/3) / (5/3) = 4/5.
        (["two two"], "two two two", 0, 0.8),
        (["cat black"], "black cat", 0, 1),  # F1 knows no order
        (["cat"], "", 0, 0),
        ([""], "cat", 0, 0),
        ([""], "", 1, 1),
        ([""], "the", 1, 1),  # the answer normalises to nothing, too
        (["cat"], "a", 0, 0),
        (["cat", "mat"], "mat", 1, 1),  # the best of several: equal to the second
        # Against "cat" F1 is 0; against "cat sat", with 1 word of 1 right of 2, 2 x 1/2 / 3/2.
        (["mat", "cat sat"], "sat", 0, 2 / 3),
        (["cat", "mat"], "dog", 0, 0),
        (["cat", "mat"], "", 0, 0),
        ([], "", 1, 1),  # no answer: the empty text is right
        ([], "cat", 0, 0),
        ([], "the", 1, 1),  # normalises to the empty text
        # "The" normalises to nothing and is dropped; "cat" is left, which "" is not.
        (["The", "cat"], "", 0, 0),
        (["The", "cat"], "cat", 1, 1),
        # Nothing is left, so the empty text is right.
        (["The", "The an, a!"], "", 1, 1),
        (["The"], "The", 1, 1),
        (["The"], "cat", 0, 0),
    ],
)
def test_the_best_of_the_right_answers(
    right: list[str], answer: str, exact: float, words: float
) -> None:
    answers = tuple(Answer(text, 0) for text in right)
    question = Question("q", "", CONTEXT, "Who?", answers, not answers)
    assert best_of("exact_match", question, answer) == exact
    assert best_of("f1", question, answer) == pytest.approx(words)


def test_an_answer_is_split_once_for_all_right_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    # Anybody may have written a long answer and a question with many right ones: a hundred equal
    # ones cost a hundred short texts, not a hundred times the long one.
    split: list[str] = []

    def counted(text: str) -> str:
        split.append(text)
        return normalized(text)

    monkeypatch.setattr(scores_module, "normalized", counted)
    (question,) = asked(*[CAT] * 100)
    long = "cat dog " * 100
    # 1 word of 1 right, of 200 in the answer: precision 1/200, recall 1, F1 = 2 / 201.
    assert best_of("f1", question, long) == pytest.approx(2 / 201)
    assert best_of("exact_match", question, long) == 0
    assert split.count(long) == 2


FOUR = questions_of(
    (CONTEXT, [qa("q1", "Who?", CAT_SAT), qa("q2", "Where?", MAT)]),
    (CONTEXT, [qa("q3", "Why?"), qa("q4", "When?")]),
)


def test_means_by_kind() -> None:
    # q1: "cat" against "cat sat": F1 2/3, not equal. q2 right. q3 right (none). q4 wrong.
    found = score(FOUR, {"q1": "cat", "q2": "the mat", "q3": "", "q4": "cat"})
    assert found["all"] == {
        "questions": 4,
        "exact_match": 50.0,
        "f1": pytest.approx((2 / 3 + 1 + 1 + 0) / 4 * 100),
    }
    words = pytest.approx((2 / 3 + 1) / 2 * 100)
    assert found["answerable"] == {"questions": 2, "exact_match": 50.0, "f1": words}
    assert found["unanswerable"] == {"questions": 2, "exact_match": 50.0, "f1": 50.0}


def test_a_kind_without_questions_has_no_mean() -> None:
    none = {"questions": 0, "exact_match": None, "f1": None}
    assert score(asked(CAT), {"q": "cat"})["unanswerable"] == none
    assert score(asked(), {"q": ""})["answerable"] == none


def found_of(*pairs: tuple[str, float]) -> list[FoundAnswer]:
    """Texts with the difference of there being no answer, exact in binary."""
    return [FoundAnswer(text, 0.0, difference) for text, difference in pairs]


def test_a_text_is_given_up_to_the_threshold() -> None:
    found = found_of(("cat", -1.0), ("mat", 0.5), ("sat", 0.25), ("on", 0.0))
    assert texts(FOUR, found, 0.25) == {"q1": "cat", "q2": "", "q3": "sat", "q4": "on"}
    assert texts(FOUR, found) == {"q1": "cat", "q2": "", "q3": "", "q4": "on"}


def test_a_set_of_v1_is_always_answered_with_a_text() -> None:
    question = qa("q", "Who?", CAT)
    del question["is_impossible"]
    questions = questions_of((CONTEXT, [question]))
    found = found_of(("cat", 5.0))  # no answer scores more than the text, which is right
    assert texts(questions, found) == {"q": "cat"}
    values = evaluate(questions, found)
    assert (values["exact_match"], values["no_answer_threshold"]) == (100.0, None)
    # A set of v2.0 is not, though all its questions have answers.
    assert texts(asked(CAT), found) == {"q": ""}


def test_the_best_threshold_for_each_measure() -> None:
    # By rising difference: q1 "cat" at -2 (exact 0, F1 2/3; no answer 0), q3 at -1 (right without a
    # text), q2 "mat" at 1 (right), q4 at 3 (right without). Sums of all four with the texts up to
    # each difference, none first: exact 2, 2, 1, 2, 1; F1 2, 2 2/3, 1 2/3, 2 2/3, 1 2/3.
    found = found_of(("cat", -2.0), ("mat", 1.0), ("the cat", -1.0), ("cat", 3.0))
    by_words = pytest.approx((2 + 2 / 3) / 4 * 100)
    assert best_threshold(FOUR, found, "f1") == (-2.0, by_words)  # the first of two equal ones
    threshold, mean = best_threshold(FOUR, found, "exact_match")
    assert mean == pytest.approx(50)
    assert threshold < -2.0  # no text at all is as good, and comes first


def test_equal_differences_are_not_torn_apart() -> None:
    # All four at 0: either no text (q3 and q4 right: 2) or all (q1 and q2 right: 2), never three.
    found = found_of(("cat sat", 0.0), ("mat", 0.0), ("cat", 0.0), ("cat", 0.0))
    assert best_threshold(FOUR, found, "exact_match")[1] == pytest.approx(50)
    # With q3 silent, all texts give 3 of 4.
    found = found_of(("cat sat", 0.0), ("mat", 0.0), ("", 0.0), ("cat", 0.0))
    assert best_threshold(FOUR, found, "exact_match") == (0.0, pytest.approx(75))


@pytest.mark.parametrize("measure", ["exact_match", "f1"])
def test_the_best_threshold_gives_its_mean(measure: Measure) -> None:
    found = found_of(("cat", -2.0), ("a mat", 1.0), ("cat", 0.5), ("sat", 3.0))
    threshold, mean = best_threshold(FOUR, found, measure)
    assert evaluate(FOUR, found, threshold)[measure] == pytest.approx(mean)
    tried = [evaluate(FOUR, found, at / 4)[measure] for at in range(-20, 20)]
    assert max(tried) == pytest.approx(mean)


def test_what_a_run_records() -> None:
    found = found_of(("cat sat", -1.0), ("mat", 1.0), ("cat", 2.0), ("cat", -0.5))
    # At 0: q1 right, q2 without a text wrong, q3 right, q4 wrong. With -1: q1, q3 and q4 right.
    assert evaluate(FOUR, found) == {
        "exact_match": 50.0,
        "f1": 50.0,
        "answerable": {"questions": 2, "exact_match": 50.0, "f1": 50.0},
        "unanswerable": {"questions": 2, "exact_match": 50.0, "f1": 50.0},
        "no_answer_threshold": 0.0,
        "best_exact_match": 75.0,
        "best_exact_match_threshold": -1.0,
        "best_f1": 75.0,
        "best_f1_threshold": -1.0,
    }
