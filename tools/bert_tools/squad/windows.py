"""Cut the context of every question into windows that fit the model.

A window consists of [CLS] question [SEP] piece of the context [SEP]. The method follows Devlin et
al. (arXiv 1810.04805), sections 4.2 and 4.3, and the settings of the authors' SQuAD program.
`stride` is the number of tokens between the starts of two windows, like the authors' `doc_stride`.
Some libraries use the word for the number of tokens that two windows share. An answer belongs to
every window that contains all of it. In other windows the question has no answer, so [CLS] is both
the start and the end. If a question has several answers, training uses the first.

The `tokenizers` library splits text into word pieces, as it does in `transformers` with a saved
model's tokenizer.json, except for names of special tokens in the text. A test compares its tokens
with those that `prepare` makes. Only a few rare characters give different tokens, such as a capital
sigma at the end of a Greek word.

Shape letters: W windows, T tokens of all windows, P tokens of all different contexts.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bert_tools.huggingface.tokenizer import word_piece_tokenizer
from bert_tools.squad.questions import Question, Questions
from mlperf_bert.errors import ConfigError, one_line
from mlperf_bert.extras import require_packages
from mlperf_bert.files import in_brief
from mlperf_bert.vocabulary.word_pieces import Vocabulary

_COLUMNS = ("lengths", "segment_b_start", "starts", "ends", "question_of", "first_piece")
_NUM_SPECIAL = 3  # [CLS], [SEP] and [SEP]
MAX_QUESTION_LENGTH = 64  # tokens, as in the authors' program


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """All windows of a question set, grouped by question.

    Args:
        input_ids: token ids of all windows, concatenated, int64 [T].
        lengths: number of tokens of each window, int64 [W].
        segment_b_start: index of the context's first token within each window, int64 [W].
        starts, ends: the answer's first and last token within its window, int64 [W]. Both are 0,
            which is [CLS], if the window does not contain the answer.
        question_of: index of each window's question, int64 [W], ascending.
        first_piece: index into `piece_starts` and `piece_ends` of the first token of each window's
            piece of the context, int64 [W].
        piece_starts, piece_ends: each token's characters in its context, from start to end
            (exclusive), int64 [P].
        remarks: lines that tell the user about answers that no window contains.
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
        """Return where each window starts in `input_ids`, int64 [W + 1].

        The last element is the end of the last window.
        """
        return np.concatenate([[0], np.cumsum(self.lengths)])


@dataclass(frozen=True, slots=True)
class Tokens:
    """The token ids of a text, and the position of each token in the text, all int64 [n].

    A token consists of the characters from `starts` to `ends` (exclusive), which may begin with
    white space. An accent that was removed from its letter belongs to no token.
    """

    ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


def make_offset_encoder(vocabulary: Vocabulary) -> Callable[[str], Tokens]:
    """Return a function that splits a text into tokens with their positions.

    The function adds no special tokens. Raises ConfigError if the `tokenizers` package is not
    installed.
    """
    require_packages("squad", "squad", "tokenizers")
    import tokenizers

    library = tokenizers.Tokenizer.from_str(json.dumps(word_piece_tokenizer(vocabulary)))
    library.encode_special_tokens = True  # "[SEP]" in a text is text

    def encode(text: str) -> Tokens:
        found = library.encode(text, add_special_tokens=False)
        bounds = np.array(found.offsets, dtype=np.int64).reshape(-1, 2)
        return Tokens(np.array(found.ids, dtype=np.int64), bounds[:, 0], bounds[:, 1])

    return encode


def make_windows(
    questions: Questions, vocabulary: Vocabulary, *, max_length: int = 384, stride: int = 128
) -> Windows:
    """Cut the contexts of all questions into windows of at most `max_length` tokens.

    A question is truncated to MAX_QUESTION_LENGTH tokens. A context without tokens gives one
    window, which contains only the question.

    Raises ConfigError if a question leaves no space for its context, or if the `tokenizers` package
    is not installed.
    """
    encode = make_offset_encoder(vocabulary)
    cls, sep = np.array([vocabulary.cls_id]), np.array([vocabulary.sep_id])
    known: dict[str, tuple[Tokens, int]] = {}  # each context's tokens, and the first one's index
    num_pieces = num_lost = 0
    input_ids: list[NDArray[np.int64]] = []
    rows: list[tuple[int, ...]] = []  # the values of _COLUMNS for each window
    for number, question in enumerate(questions):
        if question.context not in known:
            known[question.context] = encode(question.context), num_pieces
            num_pieces += len(known[question.context][0].ids)
        context, first_piece = known[question.context]
        words = encode(question.question).ids[:MAX_QUESTION_LENGTH]
        text_start = len(words) + _NUM_SPECIAL - 1
        capacity = max_length - len(words) - _NUM_SPECIAL
        if capacity < 1:
            problem = (
                f"is {max_length}, but question {in_brief(question.id)} needs at least "
                f"{len(words) + _NUM_SPECIAL + 1} tokens"
            )
            raise ConfigError("--max-length", problem, "raise --max-length")
        answer = _answer_tokens(context, question)
        is_held = False
        for first, end in _cuts(len(context.ids), capacity, stride):
            start = last = 0  # [CLS], for no answer
            if answer and first <= answer[0] and answer[1] < end:
                start, last = (text_start + token - first for token in answer)
                is_held = True
            input_ids += [cls, words, sep, context.ids[first:end], sep]
            length = len(words) + _NUM_SPECIAL + end - first
            rows.append((length, text_start, start, last, number, first_piece + first))
        num_lost += bool(question.answers) and not is_held
    remark = (
        f"warning: {one_line(questions.name)}: no window contains the whole answer to "
        f"{num_lost:,} question{'s' * (num_lost != 1)}, so these count as having no answer; raise "
        f"--max-length ({max_length}) or lower --stride ({stride})"
    )
    columns = np.array(rows, dtype=np.int64).T
    return Windows(
        input_ids=np.concatenate(input_ids),
        **dict(zip(_COLUMNS, columns, strict=True)),
        piece_starts=np.concatenate([each.starts for each, _ in known.values()]),
        piece_ends=np.concatenate([each.ends for each, _ in known.values()]),
        remarks=(remark,) if num_lost else (),
    )


def _cuts(num_tokens: int, capacity: int, stride: int) -> Iterator[tuple[int, int]]:
    """Yield the pieces into which to cut a text of `num_tokens` tokens, at least one piece.

    A piece is given by its first token and its end (exclusive). It has at most `capacity` tokens.
    """
    first = 0
    while first + capacity < num_tokens:
        yield first, first + capacity
        first += min(capacity, stride)  # so that no token is skipped
    yield first, num_tokens


def _answer_tokens(context: Tokens, question: Question) -> tuple[int, int] | None:
    """Return the first and the last token of the context that overlap the question's first answer.

    Returns None if the question has no answer, or if no token overlaps it.
    """
    if not question.answers:
        return None
    answer = question.answers[0]
    touched = (context.starts < answer.start + len(answer.text)) & (context.ends > answer.start)
    (found,) = np.nonzero(touched & (context.starts < context.ends))
    return (int(found[0]), int(found[-1])) if len(found) else None
