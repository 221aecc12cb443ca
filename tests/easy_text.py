"""A small language without surprises, which a tiny model learns in seconds.

Its words stand in small cycles, and a sentence walks along one of them from anywhere: each word
foretells both its neighbours, and only a sentence masked as a whole cannot be known.
"""

import random

from support import prepare_small

NUM_CYCLES = 8
CYCLE_LENGTH = 4
SPECIAL_WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = tuple(f"w{number}" for number in range(NUM_CYCLES * CYCLE_LENGTH))
VOCAB_SIZE = len(SPECIAL_WORDS) + len(WORDS)
MAX_SEQ_LENGTH = 24
MAX_PREDICTIONS = 4
EASY = (  # beside TINY_CONFIG, a run that learns it in seconds
    *(f"model.vocab_size={VOCAB_SIZE}", "model.hidden_size=64", "model.num_heads=4"),
    *("model.intermediate_size=128", f"model.max_position_embeddings={MAX_SEQ_LENGTH}"),
    *("model.initializer_range=0.1", f"data.max_seq_length={MAX_SEQ_LENGTH}", "run.seed=1"),
    *("parallel.local_batch_size=32", "optim.learning_rate=4e-3", "schedule.warmup_steps=50"),
)


def make_easy_data(directory):
    """A data directory with train/ and eval/, from different random sentences."""
    vocabulary = directory / "words.txt"
    vocabulary.write_text("\n".join((*SPECIAL_WORDS, *WORDS)) + "\n", encoding="utf-8")
    for name, num_documents, seed in (("train", 500, 1), ("eval", 50, 2)):
        text = directory / f"{name}.txt"
        text.write_text(_text(num_documents, random.Random(seed)), encoding="utf-8")
        prepare_small(
            [text],
            vocabulary,
            directory / name,
            max_seq_length=MAX_SEQ_LENGTH,
            max_predictions=MAX_PREDICTIONS,
            dupe_factor=2,
            with_baseline=True,
        )
    return directory


def _text(num_documents, rng):
    """One sentence a line, an empty line between documents."""
    documents = [[_sentence(rng) for _ in range(rng.randint(4, 8))] for _ in range(num_documents)]
    return "\n\n".join("\n".join(sentences) for sentences in documents) + "\n"


def _sentence(rng):
    first = rng.randrange(NUM_CYCLES) * CYCLE_LENGTH
    start = rng.randrange(CYCLE_LENGTH)
    walk = range(start, start + rng.randint(6, 12))
    return " ".join(WORDS[first + place % CYCLE_LENGTH] for place in walk)
