"""Find answers in a text from the scores of its tokens, and measure how good they are.

The method follows Devlin et al. (arXiv 1810.04805), sections 4.2 and 4.3. The score of an answer is
the sum of the scores of its first token as a start and of its last token as an end. The score of
"no answer" is the sum of both scores of [CLS]. If a question has several windows, the lowest of
these sums counts. The question gets an answer unless "no answer" has a higher score. As in the
authors' program, a start counts only in the window that shows the most text on both sides of it.
That program combines only the 20 best starts with the 20 best ends. This module tries all pairs, so
its best score is never lower.

Exact match and F1 are defined by SQuAD v2.0 (arXiv 1606.05250, 1806.03822). Both compare normalized
texts. Normalization converts a text to lower case, removes ASCII punctuation and the articles a, an
and the, and leaves single spaces between words. Exact match is 1 if the texts are equal. F1 is the
harmonic mean of precision and recall of their words, and each word counts as often as it occurs. If
either text has no words, F1 is 1 if both texts have none, and 0 otherwise. If there are several
right answers, the best result counts. Right answers that are empty after normalization are ignored.
If none remains, only the empty answer is right.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bert_tools.squad.questions import Question, Questions
from bert_tools.squad.windows import Windows

MAX_ANSWER_LENGTH = 30  # tokens, as in the authors' program
Scores = NDArray[np.floating[Any]]  # [T, 2]: scores as an answer's first and last token
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True)
class FoundAnswer:
    """The best answer to a question, its score, and the score of "no answer"."""

    text: str
    score: float
    no_answer_score: float


def find_answers(
    questions: Questions,
    windows: Windows,
    scores: Scores,
    max_answer_length: int = MAX_ANSWER_LENGTH,
) -> list[FoundAnswer]:
    """Find the best answer to every question, with at most `max_answer_length` tokens.

    If several answers have the same score, the one in the first window wins, then the first one in
    the text, then the shortest. If a context has no tokens, the answer is "" and its score is minus
    infinity. `scores` [T, 2] has the start score and the end score of each of the windows' T
    tokens. All scores must be finite.
    """
    borders = np.searchsorted(windows.question_of, np.arange(len(questions) + 1))
    offsets = windows.offsets
    return [
        _best_answer(question, windows, offsets, range(first, end), scores, max_answer_length)
        for question, first, end in zip(questions, borders[:-1], borders[1:], strict=True)
    ]


def _best_answer(
    question: Question,
    windows: Windows,
    offsets: NDArray[np.int64],
    of_question: Sequence[int],
    scores: Scores,
    longest: int,
) -> FoundAnswer:
    """Find the best answer to a question in its windows, whose numbers are `of_question`."""
    first_pieces = windows.first_piece[of_question]
    counts = windows.lengths[of_question] - windows.segment_b_start[of_question] - 1
    shows_most = _window_with_most_context(first_pieces - first_pieces[0], counts)
    text, best, no_answer = "", -math.inf, math.inf
    for number, window in enumerate(of_question):
        no_answer = min(no_answer, float(scores[offsets[window]].sum(dtype=np.float64)))
        count, first = int(counts[number]), int(first_pieces[number])
        if count == 0:
            continue
        first_chars = windows.piece_starts[first : first + count]
        end_chars = windows.piece_ends[first : first + count]
        begin = int(offsets[window] + windows.segment_b_start[window])
        wide = scores[begin : begin + count].astype(np.float64)
        within = slice(first - int(first_pieces[0]), first - int(first_pieces[0]) + count)
        has_characters = first_chars < end_chars
        is_start = has_characters & (shows_most[within] == number)
        starts = np.where(is_start, wide[:, 0], -np.inf)
        ends = np.where(has_characters, wide[:, 1], -np.inf)
        padded = np.pad(ends, (0, longest - 1), constant_values=-np.inf)
        pairs = starts[:, None] + np.lib.stride_tricks.sliding_window_view(padded, longest)
        start, more = divmod(int(pairs.argmax()), longest)
        if pairs[start, more] > best:
            best = float(pairs[start, more])
            text = question.context[first_chars[start] : end_chars[start + more]].strip()
    return FoundAnswer(text, best, no_answer)


def _window_with_most_context(
    first: NDArray[np.int64], counts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return which window shows the most context around each token, int64 [tokens].

    A window is rated by the number of tokens that it shows before or after the token, whichever is
    smaller. If two windows have the same rating, the longer window wins. If both have the same
    length, the first wins. Each window shows `counts` tokens of the context, beginning with token
    `first`. Both arrays are int64 [windows].
    """
    context = np.full((len(first), int((first + counts).max())), -1, dtype=np.int64)
    for row, begin, count in zip(context, first, counts, strict=True):
        left = np.arange(count)
        # The authors use min(left, right) + 0.01 * length. These integers are 100 times that.
        row[begin : begin + count] = 100 * np.minimum(left, left[::-1]) + count
    best: NDArray[np.int64] = context.argmax(axis=0)
    return best


def texts(questions: Questions, found: Sequence[FoundAnswer]) -> dict[str, str]:
    """Return the text of each found answer, by question id.

    The text is "" if "no answer" has a higher score.
    """
    return {
        question.id: each.text if each.score >= each.no_answer_score else ""
        for question, each in zip(questions, found, strict=True)
    }


def mean_loss(scores: Scores, windows: Windows) -> float:
    """Return the mean loss of the windows, in nats.

    The loss of a window is the mean of two cross-entropies, one for the answer's first token and
    one for its last token. The result is not finite if a score is not finite.
    """
    first = windows.offsets[:-1]
    total = 0.0
    for values, answers in zip(scores.T, (windows.starts, windows.ends), strict=True):
        precise = values.astype(np.float64)
        with np.errstate(invalid="ignore"):
            logs = np.logaddexp.reduceat(precise, first)
            total += float((logs - precise[first + answers]).sum())
    return total / (2 * len(windows))


def normalized(text: str) -> str:
    """Normalize a text for comparison, as the docstring of this module describes."""
    bare = text.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def best_of(question: Question, answer: str) -> tuple[float, float]:
    """Return the exact match and the F1 of an answer to a question, both from 0 to 1.

    If the question has several right answers, each measure is the highest over them.
    """
    right = {normalized(each.text) for each in question.answers} - {""} or {""}
    bare = normalized(answer)
    return float(bare in right), max(_f1(text.split(), bare.split()) for text in right)


def _f1(right: Sequence[str], words: Sequence[str]) -> float:
    """Return the F1 of an answer's words, compared with the words of the right answer."""
    if not right or not words:
        return float(len(right) == len(words))
    num_common = (Counter(right) & Counter(words)).total()
    # The harmonic mean of num_common / len(words) and num_common / len(right).
    return 2 * num_common / (len(words) + len(right))


def score(questions: Questions, predictions: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return exact match and F1 of the answers to all questions.

    `predictions` maps the id of each question to its answer, which is "" for no answer. The result
    has an entry each for `all`, `answerable` and `unanswerable` questions. An entry has the number
    of questions (`questions`), and the means `exact_match` and `f1` in percent. The means are None
    if the entry has no questions.
    """
    values = np.array([best_of(each, predictions[each.id]) for each in questions])
    is_impossible = np.array([each.is_impossible for each in questions])
    parts = {"answerable": values[~is_impossible], "unanswerable": values[is_impossible]}
    return {
        name: {
            "questions": len(part),
            "exact_match": float(part[:, 0].mean()) * 100 if len(part) else None,
            "f1": float(part[:, 1].mean()) * 100 if len(part) else None,
        }
        for name, part in ({"all": values} | parts).items()
    }
