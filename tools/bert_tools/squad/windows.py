"""Cuts every question's text into windows that a model can read, [CLS] question [SEP] piece [SEP].

Follows Devlin et al. (arXiv 1810.04805), sections 4.2 and 4.3, and the settings of its authors'
SQuAD program: `stride` is the number of tokens from one window's begin to the next (their
`doc_stride`; other libraries call the overlap stride, which is the room for the text less ours). An
answer belongs to a window that holds all of it; in other windows the question has no answer, marked
by [CLS] as start and end. Training sees the first of several answers.

Shape letters: W windows, T tokens of all windows, P tokens of all different contexts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bert_tools.squad.offsets import Tokens, make_offset_encoder
from bert_tools.squad.questions import Question, Questions
from mlperf_bert.errors import ConfigError, one_line
from mlperf_bert.files import in_brief
from mlperf_bert.vocabulary.any_vocabulary import AnyVocabulary

_COLUMNS = ("lengths", "segment_b_start", "starts", "ends", "question_of", "first_piece")
_NUM_SPECIAL = 3  # [CLS], [SEP] and [SEP]
_NO_ANSWER = 0  # the position of [CLS]
MAX_QUESTION_LENGTH = 64  # tokens, as in the authors' program


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """All windows of a question set, grouped by question.

    Args:
        input_ids: token ids of all windows laid end to end, int64 [T].
        lengths: tokens of each window, int64 [W].
        segment_b_start: where the second segment, the text, begins in each window, int64 [W].
        starts, ends: the answer's first and last token within its window, int64 [W]; 0, which is
            [CLS], if the window does not hold it.
        question_of: number of each window's question, int64 [W], rising.
        first_piece: in `piece_starts` and `piece_ends`, where each window's text begins, int64 [W].
        piece_starts, piece_ends: each token's characters in its context, from start to before end,
            int64 [P].
        remarks: lines for the user on what was left out.
    """

    input_ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    segment_b_start: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    question_of: NDArray[np.int64]
    first_piece: NDArray[np.int64]
    piece_starts: NDArray[np.int64]
    piece_ends: NDArray[np.int64]
    remarks: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Begin of each window in `input_ids`, then the end of the last; int64 [W + 1]."""
        return np.concatenate([[0], np.cumsum(self.lengths)])


def make_windows(
    questions: Questions,
    vocabulary: AnyVocabulary,
    *,
    max_length: int = 384,
    stride: int = 128,
    max_question_length: int = MAX_QUESTION_LENGTH,
) -> Windows:
    """Windows of at most `max_length` tokens, for all questions in order.

    A question longer than `max_question_length` tokens is cut at its end. A text without a token
    gives one window without text.

    Raises ConfigError if the stride is not positive, a question leaves no room, or the package
    `tokenizers` is missing; DataError from `FileEncoder.encode`.
    """
    if stride < 1:
        raise ConfigError("--stride", f"is {stride}, not a number of tokens", "give 1 or more")
    maker = _Maker(vocabulary, max_length, stride)
    for number, question in enumerate(questions):
        maker.add(number, question, max_question_length)
    name, num_answers = one_line(questions.name), sum(not each.is_impossible for each in questions)
    remarks = []
    if maker.num_questions_cut:
        remarks.append(
            f"{name}: {maker.num_questions_cut:,} of {len(questions):,} questions are cut:"
            f" longer than {max_question_length} tokens"
        )
    if maker.num_answers_lost:
        remarks.append(
            f"{name}: {maker.num_answers_lost:,} of {num_answers:,} answers stand in no window of"
            f" {max_length} tokens and a stride of {stride}: their windows count as without an"
            " answer"
        )
    columns = np.array(maker.windows, dtype=np.int64).reshape(-1, len(_COLUMNS)).T
    return Windows(
        input_ids=_joined(maker.input_ids),
        **dict(zip(_COLUMNS, columns, strict=True)),
        piece_starts=_joined([each.starts for each in maker.contexts]),
        piece_ends=_joined([each.ends for each in maker.contexts]),
        remarks=tuple(remarks),
    )


def _cuts(num_tokens: int, room: int, stride: int) -> Iterator[tuple[int, int]]:
    """First token and the one after the last of each piece of a text; at least one piece."""
    first = 0
    while first + room < num_tokens:
        yield first, first + room
        first += min(room, stride)  # so that no token is passed over
    yield first, num_tokens


def _answer_tokens(context: Tokens, question: Question) -> tuple[int, int] | None:
    """First and last token of a context with a character of the question's first answer.

    None if there is no answer or it has no token.
    """
    if not question.answers:
        return None
    answer = question.answers[0]
    touched = (context.starts < answer.start + len(answer.text)) & (context.ends > answer.start)
    (found,) = np.nonzero(touched & (context.starts < context.ends))
    return (int(found[0]), int(found[-1])) if len(found) else None


class _Maker:
    """Makes windows question by question; each context is split into tokens once."""

    def __init__(self, vocabulary: AnyVocabulary, max_length: int, stride: int) -> None:
        self._encode = make_offset_encoder(vocabulary)
        self._cls = np.array([vocabulary.cls_id])
        self._sep = np.array([vocabulary.sep_id])
        self._max_length = max_length
        self._stride = stride
        self._known: dict[str, tuple[Tokens, int]] = {}
        self._num_pieces = 0
        self.contexts: list[Tokens] = []
        self.input_ids: list[NDArray[np.int64]] = []
        self.windows: list[tuple[int, int, int, int, int, int]] = []  # _COLUMNS of each
        self.num_questions_cut = 0
        self.num_answers_lost = 0

    def add(self, number: int, question: Question, max_question_length: int) -> None:
        """Add the windows of one question."""
        context, first_piece = self._tokens_of(question.context)
        words = self._encode(question.question).ids
        self.num_questions_cut += len(words) > max_question_length
        words = words[:max_question_length]
        text_start = len(words) + _NUM_SPECIAL - 1
        room = self._max_length - len(words) - _NUM_SPECIAL
        if room < 1:
            needed = len(words) + _NUM_SPECIAL + 1
            problem = (
                f"is {self._max_length}, question {in_brief(question.id)} needs {needed} at least"
            )
            raise ConfigError("--max-length", problem, "raise it")
        answer = _answer_tokens(context, question)
        is_held = False
        for first, end in _cuts(len(context.ids), room, self._stride):
            start = last = _NO_ANSWER
            if answer and first <= answer[0] and answer[1] < end:
                start, last = (text_start + token - first for token in answer)
                is_held = True
            self.input_ids += [self._cls, words, self._sep, context.ids[first:end], self._sep]
            length = len(words) + _NUM_SPECIAL + end - first
            self.windows.append((length, text_start, start, last, number, first_piece + first))
        self.num_answers_lost += bool(question.answers) and not is_held

    def _tokens_of(self, context: str) -> tuple[Tokens, int]:
        """A context's tokens, and the index of the first among those of all contexts."""
        found = self._known.get(context)
        if found is None:
            found = self._known[context] = self._encode(context), self._num_pieces
            self.contexts.append(found[0])
            self._num_pieces += len(found[0].ids)
        return found


def _joined(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])
