"""The best answers, found slowly: every pair of tokens of every window is looked at.

Written from the definition, one rule after the other, to hold `squad/answers.py` against.
"""

import math


def most_context(spans, token):
    """Which of the pieces of a text, first token and number of tokens, shows most around a token.

    The smaller of the two sides counts, and a hundredth of the piece's length; the first of equals.
    """
    best, best_value = -1, -math.inf
    for number, (first, count) in enumerate(spans):
        if first <= token < first + count:
            left, right = token - first, first + count - 1 - token
            value = min(left, right) * 100 + count
            if value > best_value:
                best, best_value = number, value
    return best


def plain_answers(
    questions,
    windows,
    start_scores,
    end_scores,
    max_answer_length,
):
    """For each question the best text, its score, and the score of no answer."""
    found = []
    offsets = windows.offsets.tolist()
    for number, question in enumerate(questions):
        mine = [w for w in range(len(windows)) if windows.question_of[w] == number]
        spans = []
        for w in mine:
            count = int(windows.lengths[w] - windows.segment_b_start[w]) - 1
            spans.append((int(windows.first_piece[w]), count))
        best, text = -math.inf, ""
        for place, w in enumerate(mine):
            first, count = spans[place]
            begin = offsets[w] + int(windows.segment_b_start[w])
            for i in range(count):
                if most_context(spans, first + i) != place:
                    continue
                for j in range(i, min(count, i + max_answer_length)):
                    score = start_scores[begin + i] + end_scores[begin + j]
                    if score > best:
                        best = score
                        from_char = windows.piece_starts[first + i]
                        text = question.context[from_char : windows.piece_ends[first + j]]
        none = min(start_scores[offsets[w]] + end_scores[offsets[w]] for w in mine)
        found.append((text, best, none))
    return found
