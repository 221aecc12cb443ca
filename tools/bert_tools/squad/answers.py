"""From the scores of every token as an answer's start and end to each question's answer in text.

As Devlin et al. (arXiv 1810.04805), section 4.2 and 4.3: an answer's score is its start's plus its
end's; no answer's is that of [CLS] for both, the lowest of a question's windows. Which of the two
holds is for a threshold on their difference to say. A start is looked at only in the window that
shows most text on both sides of it, as in the authors' program. That program tries the 20 best
starts with the 20 best ends; here all pairs are tried, which never finds a lower score.

Shape letters: W windows, T tokens of the windows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bert_tools.squad.questions import Questions
from bert_tools.squad.windows import Windows

MAX_ANSWER_LENGTH = 30
# What is no number counts as the lowest score, and so that sums are numbers too, this is it.
_LOWEST = -1e30
_TOKENS_AT_ONCE = 2**20  # about 100 MB of intermediate arrays


@dataclass(frozen=True, slots=True)
class FoundAnswer:
    """The best text for a question and its score, and the score of there being no answer."""

    text: str
    score: float
    no_answer_score: float

    @property
    def difference(self) -> float:
        """How much more there being no answer scores than the best text."""
        return self.no_answer_score - self.score


def find_answers(
    questions: Questions,
    windows: Windows,
    start_scores: NDArray[np.floating[Any]],
    end_scores: NDArray[np.floating[Any]],
    *,
    max_answer_length: int = MAX_ANSWER_LENGTH,
) -> list[FoundAnswer]:
    """The best answer of every question, of at most `max_answer_length` tokens.

    Of equal scores, the first in the text is taken, and the shortest. A context without a token has
    the text "". What is no number among the scores counts as the lowest.

    Args:
        questions: what `windows` was made of.
        windows: all of them.
        start_scores, end_scores: of every token of the windows, floats [T].
        max_answer_length: in tokens, 1 or more.
    """
    found: list[FoundAnswer] = []
    offsets = windows.offsets
    for first, end in _groups(windows):
        tokens = slice(offsets[first], offsets[end])
        group = _Group(windows, first, end)
        starts, ends = (_numbers(each[tokens]) for each in (start_scores, end_scores))
        found += group.answers(questions, starts, ends, max_answer_length)
    return found


def has_most_context(
    first_piece: NDArray[np.int64], num_pieces: NDArray[np.int64], question_of: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Whether no other window of its question shows more text around a token; bool [text tokens].

    More: on the side where there is less of it; where that is equal, the longer window's, then the
    first window's. All int64 [W]: a window's text begins with token `first_piece` of its context
    and has `num_pieces`. The answer is for the tokens of all windows' texts, laid end to end.
    """
    window, position = _laid_out(num_pieces)
    smaller_side = np.minimum(position, num_pieces[window] - 1 - position)
    # In hundredths, with a window's length beside it: the program's own numbers, in integers.
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


class _Group:
    """Some consecutive windows, all of those of their questions; T is of these windows here."""

    def __init__(self, windows: Windows, first: int, end: int) -> None:
        lengths, text_starts = windows.lengths[first:end], windows.segment_b_start[first:end]
        first_piece, question_of = windows.first_piece[first:end], windows.question_of[first:end]
        self._offsets = np.concatenate([[0], np.cumsum(lengths)])
        window, position = _laid_out(lengths)
        is_text = (position >= text_starts[window]) & (position < lengths[window] - 1)
        piece = np.where(is_text, first_piece[window] + position - text_starts[window], 0)
        self._first_char = np.where(is_text, _taken(windows.piece_starts, piece), 0)
        self._end_char = np.where(is_text, _taken(windows.piece_ends, piece), 0)
        self._last_of_text = self._offsets[1:][window] - 2  # before the last [SEP]
        self._is_end = self._first_char < self._end_char
        self._is_start = self._is_end.copy()
        self._is_start[is_text] &= has_most_context(
            first_piece, lengths - 1 - text_starts, question_of
        )
        (of_question,) = np.nonzero(np.diff(question_of, prepend=-1))
        self._questions = question_of[of_question]
        self._first_windows = of_question

    def answers(
        self,
        questions: Questions,
        starts: NDArray[np.float64],
        ends: NDArray[np.float64],
        max_answer_length: int,
    ) -> Iterator[FoundAnswer]:
        """Of every question of the group in order; scores float64 [T]."""
        of_cls = starts[self._offsets[:-1]] + ends[self._offsets[:-1]]
        no_answer = np.minimum.reduceat(of_cls, self._first_windows)
        best, last = self._best_by_start(starts, ends, max_answer_length)
        bounds = [*self._offsets[self._first_windows].tolist(), len(starts)]
        for number, question in enumerate(self._questions):
            start = bounds[number] + int(np.argmax(best[bounds[number] : bounds[number + 1]]))
            score, text = float(best[start]), ""
            if score > -np.inf:
                begin, end = self._first_char[start], self._end_char[last[start]]
                text = questions[int(question)].context[begin:end]
            yield FoundAnswer(text, max(score, 2 * _LOWEST), float(no_answer[number]))

    def _best_by_start(
        self, starts: NDArray[np.float64], ends: NDArray[np.float64], max_answer_length: int
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """The best answer that starts at each token: its score, and its last token; both [T]."""
        starts = np.where(self._is_start, starts, -np.inf)
        ends = np.where(self._is_end, ends, -np.inf)
        size = len(starts)
        numbers = np.arange(size)
        best, last = np.full(size, -np.inf), numbers.copy()
        for more in range(min(max_answer_length, size)):
            score = starts[: size - more] + ends[more:]
            score[self._last_of_text[: size - more] < numbers[more:]] = -np.inf
            (better,) = np.nonzero(score > best[: size - more])
            best[better] = score[better]
            last[better] = better + more
        return best, last


def _groups(windows: Windows) -> Iterator[tuple[int, int]]:
    """First window, and the one after the last, of parts that no question is divided between."""
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


def _laid_out(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of sequences laid end to end: which sequence each element is of, and its position in it."""
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    begins = np.cumsum(lengths) - lengths
    return sequence, np.arange(len(sequence)) - begins[sequence]


def _taken(values: NDArray[np.int64], index: NDArray[np.int64]) -> NDArray[np.int64]:
    return values[index] if len(values) else np.zeros_like(index)


def _numbers(scores: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    wide = scores.astype(np.float64)
    return np.clip(np.where(np.isnan(wide), _LOWEST, wide), _LOWEST, -_LOWEST)
