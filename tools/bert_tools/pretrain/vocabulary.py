"""Builds a word-piece vocabulary from the parts of a cleaned corpus.

Words are counted in about SAMPLE_BYTES of the text at most, so that memory and time stay bounded.
The documents' digests determine which documents are counted. The most frequent characters are kept,
up to half of the vocabulary. A word with any other character is ignored here and becomes [UNK] in
training.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from bert_tools.pretrain.cleaning import documents_of
from mlperf_bert.errors import ConfigError
from mlperf_bert.prepare.documents import digest_of
from mlperf_bert.prepare.pool import run_with_progress
from mlperf_bert.prepare.train_vocabulary import count_words, vocabulary_of_words
from mlperf_bert.vocabulary.word_pieces import SPECIAL_TOKENS

SAMPLE_BYTES = 64 * 2**20
MIN_VOCAB_SIZE = 256
MAX_VOCAB_SIZE = 2**20


def corpus_vocabulary(parts: Sequence[Path], vocab_size: int, workers: int) -> list[str]:
    """Build a vocabulary of exactly `vocab_size` tokens, which depends only on the parts.

    Raises ConfigError if no vocabulary of this size can be built.
    """
    check_vocab_size(vocab_size)
    sizes = [path.stat().st_size for path in parts]
    count = partial(count_part, share=min(1.0, SAMPLE_BYTES / sum(sizes)))
    raw_counts: Counter[str] = Counter()
    for _, counts in run_with_progress(
        count, parts, workers, sizes=sizes, activity="counting words", quiet=False
    ):
        raw_counts.update(counts)
    counted = with_frequent_characters(count_words(raw_counts), vocab_size // 2)
    print(f"building a vocabulary of {vocab_size:,} tokens from {len(counted):,} words", flush=True)
    return vocabulary_of_words(counted, vocab_size)


def check_vocab_size(vocab_size: int) -> None:
    """Raise ConfigError if `vocab_size` is outside the supported range."""
    if not MIN_VOCAB_SIZE <= vocab_size <= MAX_VOCAB_SIZE:
        remedy = f"set a vocabulary size from {MIN_VOCAB_SIZE} to {MAX_VOCAB_SIZE:,} tokens"
        raise ConfigError("model.vocab_size", f"is {vocab_size}", remedy)


def count_part(path: Path, *, share: float) -> Counter[str]:
    """Count the words (separated by white space) in a fraction `share` of a part's documents."""
    counts: Counter[str] = Counter()
    for document in documents_of(path):
        if digest_of(document) >= (1 - share) * 2**64:  # low digests belong to held-out text
            counts.update(document.split())
    return counts


def with_frequent_characters(words: Mapping[str, int], max_tokens: int) -> dict[str, int]:
    """Return the counts of the words that consist only of the most frequent characters.

    `words` maps words to their counts. The kept characters and the special tokens together are at
    most `max_tokens` tokens.
    """
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for char in {word[0], *("##" + char for char in word[1:])}:
            counts[char] += count
    max_characters = max(0, max_tokens - len(SPECIAL_TOKENS))
    if len(counts) <= max_characters:
        return dict(words)
    ordered = sorted(counts, key=lambda char: (-counts[char], char))
    kept = set(ordered[:max_characters])
    return {
        word: count
        for word, count in words.items()
        if word[0] in kept and all("##" + char in kept for char in word[1:])
    }
