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

# What is no number counts as the lowest score, and so that sums are numbers too, this is it.
_LOWEST = -1e30
_TOKENS_AT_ONCE = 2**20  # about 100 MB of intermediate arrays
_Ints = NDArray[np.int64]


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
    scores: NDArray[np.floating[Any]],
    max_answer_length: int = 30,
) -> list[FoundAnswer]:
    """The best answer of every question, of at most `max_answer_length` tokens.

    Of equal scores, the first in the text is taken, and the shortest. A context without a token has
    the text "". What is no number among the scores counts as the lowest.

    Args:
        questions: what `windows` was made of.
        windows: all of them.
        scores: of every token of the windows, as first and as last of the answer: floats [T, 2].
        max_answer_length: in tokens, 1 or more.
    """
    found: list[FoundAnswer] = []
    offsets = windows.offsets
    for first, end in _groups(windows):
        wide = scores[offsets[first] : offsets[end]].astype(np.float64)
        known = np.clip(np.where(np.isnan(wide), _LOWEST, wide), _LOWEST, -_LOWEST)
        found += _answers(questions, windows, slice(first, end), known, max_answer_length)
    return found


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


def _answers(
    questions: Questions,
    windows: Windows,
    group: slice,
    scores: NDArray[np.float64],
    max_answer_length: int,
) -> Iterator[FoundAnswer]:
    """Of every question of a group of windows in order; T is of these windows, scores [T, 2]."""
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
    """The best answer that starts at each token: its score, and its last token; both [T]."""
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


def _laid_out(lengths: _Ints) -> tuple[_Ints, _Ints]:
    """Of sequences laid end to end: which sequence each element is of, and its position in it."""
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    begins = np.cumsum(lengths) - lengths
    return sequence, np.arange(len(sequence)) - begins[sequence]


def _taken(values: _Ints, index: _Ints) -> _Ints:
    return values[index] if len(values) else np.zeros_like(index)
