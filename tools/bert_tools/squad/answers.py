"""Answers in text from the tokens' scores as an answer's start and end, and their quality.

Follows Devlin et al. (arXiv 1810.04805), sections 4.2 and 4.3: an answer's score is its start's
plus its end's; the score of no answer is that of [CLS] for both, the lowest of a question's
windows. A threshold on their difference decides between the two. A start counts only in the window
that shows most text on both sides of it, as in the authors' program. That program tries the 20 best
starts with the 20 best ends; here all pairs are tried, which never finds a lower score.

Exact match and F1 are as SQuAD v2.0 defines them (arXiv 1606.05250, 1806.03822). Both compare
normalised texts: lower case, without ASCII punctuation, without the articles a, an and the, white
space collapsed. Exact match is 1 if they are equal; F1 is the harmonic mean of precision and
recall of their words, each counted as often as it occurs. If one of the two has no word, F1 is 1 if
both have none. The best of several right answers counts. Right answers that normalise to nothing do
not count; if none is left, the right answer is the empty text.

Shape letters: W windows, T tokens of the windows.
"""

import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from bert_tools.squad.questions import Question, Questions
from bert_tools.squad.windows import Windows

# NaN counts as the lowest score, which is this one so that sums stay finite.
_LOWEST = -1e30
MAX_ANSWER_LENGTH = 30  # tokens, as in the authors' program
_TOKENS_AT_ONCE = 2**20  # about 100 MB of intermediate arrays
_Ints = NDArray[np.int64]
Scores = NDArray[np.floating[Any]]  # [T, 2]: scores as an answer's first and last token
Measure = Literal["exact_match", "f1"]
MEASURES: tuple[Measure, ...] = get_args(Measure)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True)
class FoundAnswer:
    """The best text for a question, its score, and the score of no answer."""

    text: str
    score: float
    no_answer_score: float

    @property
    def difference(self) -> float:
        """Score of no answer less that of the best text."""
        return self.no_answer_score - self.score


def find_answers(
    questions: Questions,
    windows: Windows,
    scores: Scores,
    max_answer_length: int = MAX_ANSWER_LENGTH,
) -> list[FoundAnswer]:
    """The best answer of every question, of at most `max_answer_length` tokens.

    Among equal scores the first in the text wins, then the shortest. A context without a token has
    the text "". A NaN score counts as the lowest.
    """
    found: list[FoundAnswer] = []
    offsets = windows.offsets
    for first, end in _groups(windows):
        wide = scores[offsets[first] : offsets[end]].astype(np.float64)
        known = np.clip(np.where(np.isnan(wide), _LOWEST, wide), _LOWEST, -_LOWEST)
        found += _answers(questions, windows, slice(first, end), known, max_answer_length)
    return found


def _groups(windows: Windows) -> Iterator[tuple[int, int]]:
    """First window and the one after the last of groups that keep each question whole."""
    offsets = windows.offsets
    borders = [*np.nonzero(np.diff(windows.question_of))[0] + 1, len(windows)]
    first = previous = 0
    for border in borders:
        if first < previous and offsets[border] - offsets[first] > _TOKENS_AT_ONCE:
            yield first, previous
            first = previous
        previous = int(border)
    if first < len(windows):
        yield first, len(windows)


def _answers(
    questions: Questions,
    windows: Windows,
    group: slice,
    scores: NDArray[np.float64],
    max_answer_length: int,
) -> Iterator[FoundAnswer]:
    """Answers of a group of windows, in order of questions; scores [T, 2] of its T tokens."""
    lengths, text_starts = windows.lengths[group], windows.segment_b_start[group]
    first_piece, question_of = windows.first_piece[group], windows.question_of[group]
    ends_of_windows = np.cumsum(lengths)
    offsets = ends_of_windows - lengths
    window, position = _laid_out(lengths)
    is_text = (position >= text_starts[window]) & (position < lengths[window] - 1)
    piece = np.where(is_text, first_piece[window] + position - text_starts[window], 0)
    first_char = np.where(is_text, _taken(windows.piece_starts, piece), 0)
    end_char = np.where(is_text, _taken(windows.piece_ends, piece), 0)
    is_end = first_char < end_char
    is_start = is_end.copy()
    is_start[is_text] &= _has_most_context(first_piece, lengths - 1 - text_starts, question_of)
    starts = np.where(is_start, scores[:, 0], -np.inf)
    ends = np.where(is_end, scores[:, 1], -np.inf)
    last_of_text = ends_of_windows[window] - 2  # before the last [SEP]
    best, last = _best_by_start(starts, ends, last_of_text, max_answer_length)
    (first_windows,) = np.nonzero(np.diff(question_of, prepend=-1))
    no_answer = np.minimum.reduceat(scores[offsets].sum(axis=1), first_windows)
    bounds = [*offsets[first_windows].tolist(), len(scores)]
    for number, question in enumerate(question_of[first_windows]):
        start = bounds[number] + int(np.argmax(best[bounds[number] : bounds[number + 1]]))
        score, text = float(best[start]), ""
        if score > -np.inf:
            text = questions[int(question)].context[first_char[start] : end_char[last[start]]]
        yield FoundAnswer(text, max(score, 2 * _LOWEST), float(no_answer[number]))


def _best_by_start(
    starts: NDArray[np.float64], ends: NDArray[np.float64], last_of_text: _Ints, longest: int
) -> tuple[NDArray[np.float64], _Ints]:
    """Score and last token of the best answer that starts at each token; both [T]."""
    size = len(starts)
    numbers = np.arange(size)
    best, last = np.full(size, -np.inf), numbers.copy()
    for more in range(min(longest, size)):
        score = starts[: size - more] + ends[more:]
        score[last_of_text[: size - more] < numbers[more:]] = -np.inf
        (better,) = np.nonzero(score > best[: size - more])
        best[better] = score[better]
        last[better] = better + more
    return best, last


def _has_most_context(
    first_piece: _Ints, num_pieces: _Ints, question_of: _Ints
) -> NDArray[np.bool_]:
    """True if no other window of its question shows more text around a token; bool [text tokens].

    The side with less text counts; ties go to the longer window, then to the first. A window's text
    begins with token `first_piece` of its context and has `num_pieces`, all int64 [W]. The result
    covers the tokens of all windows' texts, laid end to end.
    """
    window, position = _laid_out(num_pieces)
    smaller_side = np.minimum(position, num_pieces[window] - 1 - position)
    # The authors' numbers as integers, in hundredths, with a window's length beside them.
    context = 100 * smaller_side + num_pieces[window]
    piece = first_piece[window] + position
    order = np.lexsort((-context, piece, question_of[window]))  # stable: the first window first
    is_first = np.ones(len(order), dtype=bool)
    same_piece = piece[order[1:]] == piece[order[:-1]]
    same_question = question_of[window[order[1:]]] == question_of[window[order[:-1]]]
    is_first[1:] = ~(same_piece & same_question)
    result = np.zeros(len(order), dtype=bool)
    result[order] = is_first
    return result


def _laid_out(lengths: _Ints) -> tuple[_Ints, _Ints]:
    """The sequence and the position in it of each element of sequences laid end to end."""
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    begins = np.cumsum(lengths) - lengths
    return sequence, np.arange(len(sequence)) - begins[sequence]


def _taken(values: _Ints, index: _Ints) -> _Ints:
    return values[index] if len(values) else np.zeros_like(index)


def normalized(text: str) -> str:
    """The text normalised for comparison."""
    bare = text.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def best_of(measure: Measure, question: Question, answer: str) -> float:
    """The measure of an answer, 0 to 1, against the nearest right answer.

    Time grows with the total length of the texts, since anybody may have written them.
    """
    right = {normalized(each.text) for each in question.answers} - {""} or {""}
    bare = normalized(answer)
    if measure == "exact_match":
        return float(bare in right)
    words = bare.split()
    counts = Counter(words)
    return max(_f1(text.split(), counts, len(words)) for text in right)


def score(questions: Questions, predictions: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Score the texts of all questions, id -> text; "" means no answer.

    For `all`, `answerable` and `unanswerable` questions: their number `questions`, and the means
    `exact_match` and `f1` in percent; None if there is none.
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
    """The answer to each question, id -> text; "" if no answer wins by more than the threshold.

    A set of v1.1 has an answer to every question, so the text is always given, as BERT's program
    does.
    """
    always = questions.version == "1.1"
    return {
        question.id: answer.text if always or answer.difference <= threshold else ""
        for question, answer in zip(questions, found, strict=True)
    }


def best_threshold(
    questions: Questions, found: Sequence[FoundAnswer], measure: Measure
) -> tuple[float, float]:
    """The threshold with the highest mean over all questions, and that mean in percent.

    A text is given if no answer scores at most the threshold more than it. Among equally good
    thresholds it is the lowest difference that occurs.

    If giving no text at all is best, it lies below all differences. It is chosen with the right
    answers at hand, so its score is a bound for these questions, not a result.
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
    """Keys of a run's record: scores in percent at the threshold, and at the best ones.

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
    """F1 of a right answer's words and the counts of words among an answer's `num_words`."""
    if not right or not num_words:
        return float(len(right) == num_words)
    num_common = (Counter(right) & counts).total()  # looks at the words of `right` alone
    # The harmonic mean of num_common / num_words and num_common / len(right).
    return 2 * num_common / (num_words + len(right))


def _percent(values: NDArray[np.float64]) -> float | None:
    return float(values.mean()) * 100 if len(values) else None


def mean_loss(scores: Scores, windows: Windows) -> float:
    """Mean over windows of (cross-entropy of the start + of the end) / 2, in nats.

    Not finite if a score is not.
    """
    first = windows.offsets[:-1]
    total = 0.0
    for values, answers in zip(scores.T, (windows.starts, windows.ends), strict=True):
        precise = values.astype(np.float64)
        with np.errstate(invalid="ignore"):
            logs = np.logaddexp.reduceat(precise, first)
            total += float((logs - precise[first + answers]).sum())
    return total / (2 * len(windows))


def answer(
    questions: Questions,
    windows: Windows,
    scores: Scores,
    threshold: float = 0.0,
) -> tuple[dict[str, str], dict[str, Any]]:
    """Each question's answer in text by its id, and a record's keys on all answers."""
    found = find_answers(questions, windows, scores)
    values = {"validation_loss": mean_loss(scores, windows)}
    return texts(questions, found, threshold), values | evaluate(questions, found, threshold)
