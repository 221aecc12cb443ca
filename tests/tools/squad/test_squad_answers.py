"""Answers out of scores, against a search of every pair; exact match and F1 by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_tools.squad.answers import FoundAnswer, best_of, find_answers, normalized, score, texts
from bert_tools.squad.questions import Answer, Question
from bert_tools.squad.windows import make_windows
from plain_spans import plain_answers
from squad_cases import qa, questions_of, vocabulary_of

WORDS = ("who", *(f"t{number}" for number in range(10)))
VOCABULARY = vocabulary_of(*WORDS)
TEXT = " ".join(WORDS[1:])
QUESTIONS = questions_of((TEXT, [qa("q", "who")]))
WHOLE = make_windows(QUESTIONS, VOCABULARY)  # [CLS] who [SEP] t0 ... t9 [SEP]: t0 is token 3


def scores_of(windows, **scores):
    """-5 everywhere, but for tokens by their number among all, as at7=1.0."""
    found = np.full(len(windows.input_ids), -5.0)
    for name, value in scores.items():
        found[int(name.removeprefix("at"))] = value
    return found


def both(starts, ends):
    """As `score_windows` gives them."""
    return np.stack([starts, ends], axis=1)


def one(starts, ends):
    (found,) = find_answers(QUESTIONS, WHOLE, both(starts, ends))
    return found


def test_the_best_start_and_end():
    starts, ends = scores_of(WHOLE, at0=1, at5=3), scores_of(WHOLE, at0=2, at7=4)
    assert one(starts, ends) == FoundAnswer("t2 t3 t4", 7.0, 3.0)
    # End t1 and start t4 are best, but in the wrong order: 9 - 5 both ways, and the first counts.
    found = one(scores_of(WHOLE, at7=9), scores_of(WHOLE, at4=9))
    assert found == FoundAnswer("t0 t1", 4.0, -10.0)
    # The question, [CLS], and both [SEP] score best, and are no answer.
    for place in (0, 1, 2, 13):
        scores = scores_of(WHOLE, at8=1, **{f"at{place}": 99})
        assert one(scores, scores).text == "t5"


def test_text_is_cut_out_of_the_context_as_it_stands():
    context = "Caf\u00e9s, (T1)   and\nCaf\u00e9s!"
    questions = questions_of((context, [qa("q", "who")]))
    vocabulary = vocabulary_of("who", "cafe", "##s", ",", "(", ")", "t1", "and", "!")
    windows = make_windows(questions, vocabulary)
    # [CLS] who [SEP] cafe s , ( t1 ) and cafe s ! [SEP]
    starts, ends = scores_of(windows, at7=1), scores_of(windows, at10=1)
    (found,) = find_answers(questions, windows, both(starts, ends))
    assert found.text == "T1)   and\nCaf\u00e9"


def test_a_text_without_tokens_has_no_answer():
    questions = questions_of(("\u00ad", [qa("q1", "who")]), (TEXT, [qa("q2", "who")]))
    windows = make_windows(questions, VOCABULARY)
    starts = np.ones(len(windows.input_ids))
    found = find_answers(questions, windows, both(starts, starts))
    assert [each.text for each in found] == ["", "t0"]
    assert found[0].score == -np.inf


@given(
    seed=st.integers(0, 2**32 - 1),
    texts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    max_length=st.integers(5, 24),
    stride=st.integers(1, 24),
    longest=st.integers(1, 12),
)
@settings(max_examples=60, deadline=None)
def test_equal_to_looking_at_every_pair(seed, texts, max_length, stride, longest):
    rng = np.random.default_rng(seed)
    contexts = [" ".join(f"t{word}" for word in rng.integers(10, size=size)) for size in texts]
    questions = questions_of(*((text, [qa(f"q{n}", "who")]) for n, text in enumerate(contexts)))
    windows = make_windows(questions, VOCABULARY, max_length=max_length, stride=stride)
    # Few values, so that there are ties, and exact sums.
    starts, ends = rng.integers(-4, 5, size=(2, len(windows.input_ids))).astype(np.float64)
    found = find_answers(questions, windows, both(starts, ends), longest)
    expected = plain_answers(questions, windows, starts.tolist(), ends.tolist(), longest)
    assert [(each.text, each.score, each.no_answer_score) for each in found] == expected


CONTEXT = "the cat sat on a mat. The an, a! Cat"


def test_normalized():
    for text, expected in (
        ("The Cat", "cat"),  # lower case, and no article
        ("a cat, an ant; THE end.", "cat ant end"),
        ("theory another banana", "theory another banana"),  # articles are whole words
        ("the-cat", "thecat"),  # punctuation goes first and joins: no article is left to remove
        ("U.S.A.", "usa"),
        ("a.", ""),  # without its full stop an article
        ("\u2014 caf\u00e9\u2019s", "\u2014 caf\u00e9\u2019s"),  # only ASCII's punctuation goes
        ("$5 (five)", "5 five"),
        ("the A an", ""),
    ):
        assert normalized(text) == expected


def test_the_best_of_the_right_answers():
    for right, answer, exact, words in (
        (["cat"], "cat", 1, 1),
        # Right has 2 words, the answer 4, of which 1 is right: precision 1/4, recall 1/2,
        # F1 = 2 (1/4 x 1/2) / (3/4) = 1/3.
        (["black cat"], "cat on some mat", 0, 1 / 3),
        # A word counts as often as in both: right has "two" twice, the answer three times, so 2 are
        # common: precision 2/3, recall 2/2, F1 = 2 (2/3) / (5/3) = 4/5.
        (["two two"], "two two two", 0, 0.8),
        (["cat black"], "black cat", 0, 1),  # F1 knows no order
        (["cat"], "", 0, 0),
        # Against "cat" F1 is 0; against "cat sat", with 1 word of 1 right of 2, 2 x 1/2 / 3/2.
        (["mat", "cat sat"], "sat", 0, 2 / 3),
        (["cat", "mat"], "dog", 0, 0),
        ([], "", 1, 1),  # no answer: the empty text is right
        ([], "cat", 0, 0),
        # "The" normalises to nothing and is dropped; "cat" is left, which "" is not.
        (["The", "cat"], "", 0, 0),
        # Nothing is left, so the empty text is right.
        (["The", "The an, a!"], "", 1, 1),
    ):
        answers = tuple(Answer(text, 0) for text in right)
        question = Question("q", CONTEXT, "Who?", answers)
        assert best_of(question, answer) == (exact, pytest.approx(words))


FOUR = questions_of(
    (CONTEXT, [qa("q1", "Who?", ("cat sat", 4)), qa("q2", "Where?", ("mat", 17))]),
    (CONTEXT, [qa("q3", "Why?"), qa("q4", "When?")]),
)


def test_means_by_kind():
    # q1: "cat" against "cat sat": F1 2/3, not equal. q2 right. q3 right (none). q4 wrong.
    found = score(FOUR, {"q1": "cat", "q2": "the mat", "q3": "", "q4": "cat"})
    for part, questions, f1 in (
        ("all", 4, (2 / 3 + 1 + 1 + 0) / 4),
        ("answerable", 2, (2 / 3 + 1) / 2),
        ("unanswerable", 2, 1 / 2),
    ):
        words = pytest.approx(100 * f1)
        assert found[part] == {"questions": questions, "exact_match": 50.0, "f1": words}
    none = {"questions": 0, "exact_match": None, "f1": None}
    for kind, answers in (("unanswerable", [("cat", 4)]), ("answerable", [])):
        questions = questions_of((CONTEXT, [qa("q", "Who?", *answers)]))
        assert score(questions, {"q": "cat"})[kind] == none


def test_a_text_is_given_unless_no_answer_scores_more():
    pairs = (("cat", -1.0), ("mat", 0.5), ("sat", 0.25), ("on", 0.0))
    found = [FoundAnswer(text, 0.0, no_answer) for text, no_answer in pairs]
    assert texts(FOUR, found) == {"q1": "cat", "q2": "", "q3": "", "q4": "on"}
