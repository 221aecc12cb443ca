"""Question sets, windows, a small model and records of runs that tests of fine-tuning share."""

import json

import numpy as np

from bert_tools.squad.questions import parse_questions
from bert_tools.squad.settings import SquadSettings, parse_engine
from bert_tools.squad.windows import Windows
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.vocabulary.word_pieces import SPECIAL_TOKENS, parse_vocabulary

VOCABULARY = 64
LONGEST = 24
SMALL = ModelSection(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_layers=4,
    num_heads=2,
    intermediate_size=64,
    max_position_embeddings=LONGEST,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
NONE = np.zeros(0, dtype=np.int64)


def windows_of(input_ids, lengths, segment_b_start, starts, ends):
    """Windows of no text."""
    none = dict.fromkeys(("question_of", "first_piece", "piece_starts", "piece_ends"), NONE)
    return Windows(
        input_ids=input_ids,
        lengths=lengths,
        segment_b_start=segment_b_start,
        starts=starts,
        ends=ends,
        remarks=(),
        **none,
    )


def made_up_windows(count):
    """Random words; the answer, where there is one, begins at a word of its own: learnable."""
    random = np.random.default_rng(5)
    lengths = random.integers(8, LONGEST + 1, count)
    segment_b_start = random.integers(2, 6, count)
    starts = np.where(
        random.random(count) < 2 / 3, random.integers(segment_b_start, lengths - 1), 0
    )
    ends = np.where(starts > 0, np.minimum(starts + random.integers(0, 3, count), lengths - 1), 0)
    input_ids = random.integers(3, VOCABULARY, lengths.sum())
    first = np.cumsum(lengths) - lengths
    answered = starts > 0
    input_ids[(first + starts)[answered]] = 1
    input_ids[(first + ends)[answered]] = 2
    return windows_of(input_ids, lengths, segment_b_start, starts, ends)


def small_settings(engine, **changes):
    """A short run."""
    same = {"global_batch": 8, "microbatches": 4, "learning_rate": 1e-3, "updates": 50}
    same |= {"max_length": LONGEST}
    return SquadSettings(engine=parse_engine(engine), **{**same, **changes})


def vocabulary_of(*words):
    """The special tokens, 0 to 4, and then the words, which are 5, 6 and so on."""
    return parse_vocabulary("\n".join([*SPECIAL_TOKENS, *words]).encode(), "vocab.txt")


def qa(identity, question, *answers, **more):
    """A question of v2.0 with its answers, text and first character; impossible without any."""
    return {
        "id": identity,
        "question": question,
        "answers": [{"text": text, "answer_start": start} for text, start in answers],
        "is_impossible": not answers,
        **more,
    }


def set_of(*paragraphs):
    """A set of one article; a paragraph is a context and its questions."""
    found = [{"context": context, "qas": list(qas)} for context, qas in paragraphs]
    return {"version": "v2.0", "data": [{"title": "Title", "paragraphs": found}]}


def questions_of(*paragraphs):
    """`set_of`, as it is read."""
    return parse_questions(json.dumps(set_of(*paragraphs)).encode(), "set.json")


def record(engine="single", *, seed=1, ranks=1, **changes):
    """A record of 10 updates of 16 windows in 20 s on a CPU of two cores."""
    numbers = {"global_batch": 16, "microbatches": 4, "learning_rate": 1e-3, "stride": 128}
    found = {
        "schema_version": 3,
        "engine": engine,
        "ranks": ranks,
        "seed": seed,
        "device": "cpu",
        "processor": "a processor",
        "cores": 2,
        "settings": {"precision": "fp32", **numbers},
        "model": {"layers": 2, "hidden": 32, "heads": 2, "vocabulary": 99, "parameters": 12345},
        "init": "random",
        "data": {
            "train_sha256": "aa",
            "dev_sha256": "bb",
            "train_questions": 80,
            "dev_questions": 40,
            "train_windows": 80,
            "dev_windows": 40,
        },
        "updates": 10,
        "samples": 160,
        "losses": [3.0 - 0.1 * number for number in range(10)],
        "seconds": {"train": 20.0, "end_to_end": 24.0},
        "samples_per_s": 8.0,
        "validation_loss": 2.5,
        "questions": 40,
        "exact_match": 30.0,
        "f1": 40.0,
        "noise_scale": None,
        "memory_mib": 200.0,
        "bubble_measured": None,
        "timeline": [],
    }
    return found | changes


def write_record(directory, found):
    """As a run leaves it; the run's directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "squad_result.json").write_text(json.dumps(found), encoding="utf-8")
    return directory
