"""Train a word-piece vocabulary reproducibly.

The training merges pairs of neighboring pieces in words. The most frequent pair comes first, and
equally frequent pairs are merged in alphabetical order. The trainer of the `tokenizers` library
(0.23) is not used, because it orders equally frequent pairs by hash. With that trainer, the same
text gave another vocabulary in every process, and therefore other examples and accuracies.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise

from mlperf_bert.errors import ConfigError
from mlperf_bert.vocabulary.word_pieces import MAX_WORD_CHARS, SPECIAL_TOKENS, basic_words

Pair = tuple[str, str]

MIN_PAIR_COUNT = 2


def train_vocabulary(lines: Iterable[str], vocab_size: int) -> list[str]:
    """Train a vocabulary of exactly `vocab_size` tokens from lines of text.

    Returns the tokens and raises ConfigError as `vocabulary_of_words` does.
    """
    return vocabulary_of_words(
        count_words(Counter(raw for line in lines for raw in line.split())), vocab_size
    )


def vocabulary_of_words(counts: Mapping[str, int], vocab_size: int) -> list[str]:
    """Train a vocabulary of exactly `vocab_size` tokens from the counts of words.

    Returns the tokens in file order: special tokens, characters, merged pieces. `counts` comes from
    `count_words`. If the text has too few pieces, `[unused0]`, `[unused1]` and so on fill the
    vocabulary. Raises ConfigError if there are more special tokens and characters than
    `vocab_size`.
    """
    words = [[word[0], *("##" + char for char in word[1:])] for word in counts]
    alphabet = sorted({piece for pieces in words for piece in pieces})
    tokens = dict.fromkeys([*SPECIAL_TOKENS, *alphabet])
    if len(tokens) > vocab_size:
        problem = f"is {vocab_size}, but there are {len(tokens)} special tokens and characters"
        raise ConfigError("model.vocab_size", problem, f"set a size of at least {len(tokens)}")
    for piece in _merged_pieces(words, list(counts.values())):
        if len(tokens) == vocab_size:
            break
        tokens[piece] = None
    unused = (f"[unused{number}]" for number in range(vocab_size - len(tokens)))
    return [*tokens, *unused]


def count_words(raw_counts: Mapping[str, int]) -> dict[str, int]:
    """Count the words in strings of text, and return the counts in alphabetical order.

    The order of the text's lines therefore does not matter. `raw_counts` maps each string between
    white space to its count.
    """
    counts: Counter[str] = Counter()
    for raw, count in raw_counts.items():
        for word in basic_words(raw):
            if len(word) <= MAX_WORD_CHARS:
                counts[word] += count
    return dict(sorted(counts.items()))


def _merged_pieces(words: list[list[str]], counts: list[int]) -> Iterable[str]:
    """Merge pairs of pieces in `words` in place, and yield each merged piece.

    The most frequent pair is merged first.
    """
    totals: defaultdict[Pair, int] = defaultdict(int)
    places: defaultdict[Pair, set[int]] = defaultdict(set)  # numbers of the words that have a pair
    for number, pieces in enumerate(words):
        for pair in pairwise(pieces):
            totals[pair] += counts[number]
            places[pair].add(number)
    heap = [(-count, pair) for pair, count in totals.items()]
    heapq.heapify(heap)
    while heap and -heap[0][0] >= MIN_PAIR_COUNT:
        negative, best = heapq.heappop(heap)
        if totals[best] != -negative:  # The count has fallen since this entry was added.
            heapq.heappush(heap, (-totals[best], best))
            continue
        merged = best[0] + best[1].removeprefix("##")
        yield merged
        changes: defaultdict[Pair, int] = defaultdict(int)
        for number in places.pop(best):
            for pair in pairwise(words[number]):
                changes[pair] -= counts[number]
            words[number] = _merge(words[number], best, merged)
            for pair in pairwise(words[number]):
                changes[pair] += counts[number]
                places[pair].add(number)
        for pair, change in changes.items():
            totals[pair] += change
            if change > 0:
                heapq.heappush(heap, (-totals[pair], pair))


def _merge(pieces: list[str], pair: Pair, merged: str) -> list[str]:
    """Return the pieces of a word, with each occurrence of `pair` replaced by `merged`."""
    result = []
    i = 0
    while i < len(pieces):
        if i + 1 < len(pieces) and (pieces[i], pieces[i + 1]) == pair:
            result.append(merged)
            i += 2
        else:
            result.append(pieces[i])
            i += 1
    return result
