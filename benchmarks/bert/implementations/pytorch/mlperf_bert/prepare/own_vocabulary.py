"""A vocabulary of a user's own text: words counted part by part, rare characters left out.

Words are counted in at most SAMPLE_BYTES of the text, taken evenly by the documents' digests, so
that memory and time stay bounded. Characters are kept, the most frequent first, until they are half
of the vocabulary; a word with any other does not take part, and becomes [UNK] later.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlperf_bert.common.errors import ConfigError
from mlperf_bert.common.file_progress import progress_of
from mlperf_bert.prepare.own_parts import digest_of, documents_of
from mlperf_bert.prepare.pool import finished
from mlperf_bert.prepare.train_vocabulary import count_words, vocabulary_of_words
from mlperf_bert.vocabulary.word_pieces import SPECIAL_TOKENS

SAMPLE_BYTES = 64 * 2**20
LEAST_VOCAB_SIZE = 256
MOST_VOCAB_SIZE = 2**20


@dataclass(frozen=True, slots=True)
class CountJob:
    """A part, and which share of its documents is counted."""

    path: Path
    share: float


def own_vocabulary(
    parts: Sequence[Path], vocab_size: int, workers: int, *, died: str, quiet: bool
) -> list[str]:
    """Exactly `vocab_size` tokens, the same for the same parts. Raises ConfigError for the size."""
    check_vocab_size(vocab_size)
    sizes = {path: path.stat().st_size for path in parts}
    share = min(1.0, SAMPLE_BYTES / sum(sizes.values()))
    raw_counts: Counter[str] = Counter()
    jobs = [CountJob(path, share) for path in parts]
    words_of_progress = ("words counted", "parts")
    with progress_of(
        len(jobs), sum(sizes.values()), quiet=quiet, words=words_of_progress
    ) as advance:
        for job, counts in finished(count_part, jobs, workers, died=died):
            raw_counts.update(counts)
            advance(job.path.name, sizes[job.path])
    words = with_frequent_characters(count_words(raw_counts), vocab_size // 2)
    if not quiet:
        print(f"making a vocabulary of {vocab_size:,} tokens of {len(words):,} words", flush=True)
    return vocabulary_of_words(words, vocab_size)


def check_vocab_size(vocab_size: int) -> None:
    """Raise ConfigError where no vocabulary of so many tokens can be made."""
    if not LEAST_VOCAB_SIZE <= vocab_size <= MOST_VOCAB_SIZE:
        remedy = f"set it within {LEAST_VOCAB_SIZE} .. {MOST_VOCAB_SIZE:,}"
        raise ConfigError("--vocab-size", f"is {vocab_size}", remedy)


def count_part(job: CountJob) -> Counter[str]:
    """What white space separates in a part, counted."""
    counts: Counter[str] = Counter()
    for document in documents_of(job.path):
        if digest_of(document) >= (1 - job.share) * 2**64:  # those held out have low ones
            counts.update(document.split())
    return counts


def with_frequent_characters(words: Mapping[str, int], most: int) -> dict[str, int]:
    """The words of those characters that give, at a word's start and inside, `most` tokens."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for char in {word[0], *("##" + char for char in word[1:])}:
            counts[char] += count
    room = max(0, most - len(SPECIAL_TOKENS))
    if len(counts) <= room:
        return dict(words)
    ordered = sorted(counts, key=lambda char: (-counts[char], char))
    kept = set(ordered[:room])
    return {
        word: count
        for word, count in words.items()
        if word[0] in kept and all("##" + char in kept for char in word[1:])
    }
