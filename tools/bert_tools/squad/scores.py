"""Exact match and F1 of answers, as SQuAD v2.0 defines them (arXiv 1606.05250, 1806.03822).

Both compare normalised texts: lower case, without ASCII punctuation, without the articles a, an and
the, white space collapsed. Exact match is whether they are equal; F1 is the harmonic mean of
precision and recall of their words, each counted as often as it occurs, and where one of the two
has no word, whether both have none. Of several right answers the best counts; those that normalise
to nothing do not count, and where none is left the right answer is none: the empty text.
"""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from bert_tools.squad.answers import FoundAnswer
from bert_tools.squad.questions import Question, Questions

Measure = Literal["exact_match", "f1"]
MEASURES: tuple[Measure, ...] = get_args(Measure)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """What of a text is compared."""
    bare = text.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def best_of(measure: Measure, question: Question, answer: str) -> float:
    """The measure of an answer, 0 to 1, against the right answer that it is nearest to.

    In time that grows with the length of all texts together, since anybody may have written them.
    """
    right = {normalized(each.text) for each in question.answers} - {""} or {""}
    bare = normalized(answer)
    if measure == "exact_match":
        return float(bare in right)
    words = bare.split()
    counts = Counter(words)
    return max(_f1(text.split(), counts, len(words)) for text in right)


def score(questions: Questions, predictions: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Score the texts of all questions, id -> text; "" says that there is no answer.

    Of `all` questions, of those that are `answerable` and `unanswerable`: how many `questions`, and
    the means `exact_match` and `f1` in percent; None where there is none.
    """
    values = {
        measure: np.array([best_of(measure, each, predictions[each.id]) for each in questions])
        for measure in MEASURES
    }
    is_impossible = np.array([each.is_impossible for each in questions])
    parts = {
        "all": np.ones(len(questions), dtype=bool),
        "answerable": ~is_impossible,
        "unanswerable": is_impossible,
    }
    return {
        name: {
            "questions": int(part.sum()),
            **{key: _percent(each[part]) for key, each in values.items()},
        }
        for name, part in parts.items()
    }


def texts(
    questions: Questions, found: Sequence[FoundAnswer], threshold: float = 0.0
) -> dict[str, str]:
    """What each question is answered with, id -> text; "" where no answer wins by more than it.

    A set of v1.1 has an answer to every question: as BERT's program does, the text is always given.
    """
    always = questions.version == "1.1"
    return {
        question.id: answer.text if always or answer.difference <= threshold else ""
        for question, answer in zip(questions, found, strict=True)
    }


def best_threshold(
    questions: Questions, found: Sequence[FoundAnswer], measure: Measure
) -> tuple[float, float]:
    """The threshold with the highest mean, and that in percent, over all questions.

    A text is given where there being no answer scores at most the threshold more than it does. Of
    equally good ones it is the lowest difference that occurs.

    Where no text at all is best, it lies below all differences. It is chosen with the right answers
    at hand, so what it gives is a bound for these questions, not a result.
    """
    differences = np.array([answer.difference for answer in found])
    none = np.array([best_of(measure, question, "") for question in questions])
    given = np.array(
        [
            best_of(measure, question, answer.text)
            for question, answer in zip(questions, found, strict=True)
        ]
    )
    order = np.argsort(differences, kind="stable")
    rising = differences[order]
    sums = none.sum() + np.cumsum((given - none)[order])
    # Equal differences fall to the same side, so only the last of them is a choice.
    is_choice = np.append(rising[1:] > rising[:-1], True)
    thresholds = np.append(np.nextafter(rising[0], -np.inf), rising[is_choice])
    choices = np.append(none.sum(), sums[is_choice])
    best = int(np.argmax(choices))
    return float(thresholds[best]), float(choices[best]) / len(found) * 100


def evaluate(
    questions: Questions, found: Sequence[FoundAnswer], threshold: float = 0.0
) -> dict[str, Any]:
    """The keys of a run's record: scores in percent at the threshold, and at the best ones.

    `no_answer_threshold` is None for a set of v1.1, which takes none.
    """
    scores = score(questions, texts(questions, found, threshold))
    best: dict[str, float] = {}
    for measure in MEASURES:
        at, mean = best_threshold(questions, found, measure)
        best |= {f"best_{measure}": mean, f"best_{measure}_threshold": at}
    return {
        "exact_match": scores["all"]["exact_match"],
        "f1": scores["all"]["f1"],
        "answerable": scores["answerable"],
        "unanswerable": scores["unanswerable"],
        "no_answer_threshold": None if questions.version == "1.1" else threshold,
        **best,
    }


def _f1(right: Sequence[str], counts: Counter[str], num_words: int) -> float:
    """Of a right answer's words and how often each word occurs among an answer's `num_words`."""
    if not right or not num_words:
        return float(len(right) == num_words)
    num_common = (Counter(right) & counts).total()  # looks at the words of `right` alone
    # The harmonic mean of num_common / num_words and num_common / len(right).
    return 2 * num_common / (num_words + len(right))


def _percent(values: NDArray[np.float64]) -> float | None:
    return float(values.mean()) * 100 if len(values) else None
