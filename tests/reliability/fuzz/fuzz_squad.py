<<<<<<< HEAD
"""What `squad` reads of anybody's: a question set, cut into windows, answers, records of runs."""
=======
"""What `squad` reads of anybody's: question sets, files of answers, and where tokens stand."""
>>>>>>> squad_questions

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
from fuzz_mutations import mutate_json
from fuzz_parser import Parser
from fuzz_tokenizer import LINES, tokenizer_json

from mlperf_bert.prepare.tokenizer_file import load
from mlperf_bert.prepare.vocabulary import Vocabulary
from mlperf_bert.squad.answers import find_answers
<<<<<<< HEAD
from mlperf_bert.squad.comparison import Conditions, compare_runs
from mlperf_bert.squad.plot import goodput_picture, timeline_picture
=======
from mlperf_bert.squad.offsets import make_offset_encoder
>>>>>>> squad_questions
from mlperf_bert.squad.predictions import read_predictions
from mlperf_bert.squad.questions import parse_questions, read_questions
from mlperf_bert.squad.record import RESULT, read_run
from mlperf_bert.squad.scores import evaluate, score
from mlperf_bert.squad.table import in_words
from mlperf_bert.squad.windows import make_windows
from squad_sets import qa, set_of, vocabulary_of

SET = "set.json"
PREDICTIONS = "predictions.json"
TOKENIZER = "tokenizer.json"
CONTEXT = "A node is a computer. Nodes, e.g. caf\u00e9s\u2019, form a cluster of \U0001f600."


@cache
def vocabulary() -> Vocabulary:
    """Some words and letters of the set."""
    return vocabulary_of("a", "node", "##s", "is", "computer", "what", ".", "?", *"bcdefg")


def make_set(directory: Path) -> None:
    """Questions with one answer, two, and none."""
    asked = (
        qa("q1", "What is a node?", ("a computer", 10), ("computer", 12)),
        qa("q2", "Who came first?", plausible_answers=[{"text": "Nodes", "answer_start": 22}]),
        qa("q3", "What do caf\u00e9s form?", ("a cluster of \U0001f600", CONTEXT.index("a clu"))),
    )
    contents = json.dumps(set_of((CONTEXT, asked[:2]), (CONTEXT + " More.", asked[2:])))
    (directory / SET).write_text(contents, encoding="utf-8")
    answers = {"q1": "a computer", "q2": "", "q3": "caf\u00e9"}
    (directory / PREDICTIONS).write_text(json.dumps(answers), encoding="utf-8")


def parse_set(directory: Path) -> object:
    """As an evaluation does, to its scores; what is accepted is consistent."""
    questions = read_questions(directory / SET)
    if len(questions) > 1000:  # one of the largest files, of which reading is enough
        return questions
    windows = make_windows(questions, vocabulary(), max_length=16, stride=5, max_question_length=8)
    assert windows.lengths.max() <= 16 and windows.lengths.sum() == len(windows.input_ids)
    assert np.all(windows.starts <= windows.ends) and np.all(windows.ends < windows.lengths)
    scores = np.arange(len(windows.input_ids)) % 7
    found = find_answers(questions, windows, scores, scores)
    pairs = zip(questions, found, strict=True)
    assert all(each.text in question.context for question, each in pairs)
    return evaluate(questions, found)


def parse_answers(directory: Path) -> object:
    """As a scoring of given answers does."""
    questions = parse_questions((directory / SET).read_bytes(), SET)
    return score(questions, read_predictions(directory / PREDICTIONS, questions))


<<<<<<< HEAD
def make_record(directory: Path) -> None:
    """A pipeline of two stages, as it leaves its record."""
    span = {"rank": 1, "stage": 1, "kind": "F", "microbatch": 0, "begin_s": 0.0, "end_s": 0.5}
    contents = {
        "schema_version": 1,
        "engine": "pipeline:2",
        "schedule": "1f1b",
        "ranks": 2,
        "stages": 2,
        "seed": 1,
        "precision": "fp32",
        "device": "cpu",
        "processor": "a processor",
        "cores": 2,
        "model": {"layers": 2, "hidden": 32, "heads": 2, "vocabulary": 99, "parameters": 12345},
        "init": "random",
        "data": {"train_sha256": "aa", "train_questions": 80, "train_windows": 80},
        "settings": {"global_batch": 16, "microbatches": 4, "dropout": 0.1},
        "updates": 2,
        "samples": 32,
        "losses": [3.0, None],
        "seconds": {"start": 1.0, "train": 4.0, "evaluate": 1.0, "end_to_end": 6.0},
        "samples_per_s": {"train": 8.0, "end_to_end": 5.3},
        "validation_loss": 2.5,
        "exact_match": 30.0,
        "f1": 40.0,
        "noise_scale": 31.5,
        "peak_memory_bytes": [2**28, 2**28],
        "cpu_seconds": [3.0, 3.0],
        "device_utilisation": [0.7, None],
        "device_utilisation_means": "process CPU time over wall time",
        "model_flops_per_s": 8e9,
        "bubble": {"measured": 0.25, "formula": 0.2},
        "timeline": [span, {**span, "kind": "B", "begin_s": 0.5, "end_s": 1.5}],
    }
    (directory / RESULT).write_text(json.dumps(contents), encoding="utf-8")


def parse_record(directory: Path) -> object:
    """As a comparison does, to its table and JSON; a few to the pictures, which take long."""
    run = read_run(directory)
    comparison = compare_runs([run], Conditions(initial_batch=8, peak_tflops=0.1))
    json.dumps(comparison.as_json())
    if run.seed > 1:
        return goodput_picture(comparison), timeline_picture([run])
    return in_words(comparison)
=======
def make_tokenizer(directory: Path) -> None:
    """A tokenizer that changes the length of a text before it splits it."""
    (directory / TOKENIZER).write_text(tokenizer_json("unigram"), encoding="utf-8")


def parse_offsets(directory: Path) -> object:
    """As windows do: the characters of every token are of the text."""
    encoder = make_offset_encoder(load(directory / TOKENIZER))
    for text in (*LINES, CONTEXT):
        tokens = encoder.encode(text)
        assert len(tokens.ids) == len(tokens.starts) == len(tokens.ends)
        assert np.all((tokens.starts >= 0) & (tokens.starts <= tokens.ends))
        assert np.all(tokens.ends <= len(text))
    return None
>>>>>>> squad_questions


SQUAD_PARSERS: Mapping[str, Parser] = {
    "squad_questions": Parser(make=make_set, targets={SET: mutate_json}, parse=parse_set),
    "squad_offsets": Parser(
        make=make_tokenizer, targets={TOKENIZER: mutate_json}, parse=parse_offsets
    ),
    "squad_predictions": Parser(
        make=make_set, targets={PREDICTIONS: mutate_json}, parse=parse_answers
    ),
    "squad_record": Parser(make=make_record, targets={RESULT: mutate_json}, parse=parse_record),
}
