"""What `squad` reads of anybody's: question sets, answers, where tokens stand, records of runs."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_mutations import mutate_json
from fuzz_parser import Parser
from fuzz_tokenizer import LINES, tokenizer_json

from bert_tools.common.figures import png
from bert_tools.squad.answers import evaluate, find_answers, score
from bert_tools.squad.comparison import RESULT, Conditions, compare_runs, read_run
from bert_tools.squad.offsets import make_offset_encoder
from bert_tools.squad.plot import goodput_figure, timeline_figure
from bert_tools.squad.questions import parse_questions, read_predictions, read_questions
from bert_tools.squad.table import in_words
from bert_tools.squad.windows import make_windows
from mlperf_bert.vocabulary.tokenizer_file import load
from mlperf_bert.vocabulary.word_pieces import Vocabulary
from squad_cases import pipeline_timeline, qa, record, set_of, vocabulary_of, write_record

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
    found = find_answers(questions, windows, np.stack([scores, scores], axis=1))
    pairs = zip(questions, found, strict=True)
    assert all(each.text in question.context for question, each in pairs)
    return evaluate(questions, found)


def parse_answers(directory: Path) -> object:
    """As a scoring of given answers does."""
    questions = parse_questions((directory / SET).read_bytes(), SET)
    return score(questions, read_predictions(directory / PREDICTIONS, questions))


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


def make_record(directory: Path) -> None:
    """A pipeline of two stages, as it leaves its record."""
    more: dict[str, Any] = {
        "schedule": "1f1b",
        "losses": [3.0, None],
        "noise_scale": 31.5,
        "core_wait_seconds": [0.5, None],
        "device_utilisation": [0.7, None],
        "bubble": {"measured": 0.25, "formula": 0.2},
        "timeline": pipeline_timeline(2, 1),
    }
    write_record(directory, record("pipeline:2", ranks=2, **more))


def parse_record(directory: Path) -> object:
    """As a comparison does, to its table and JSON; a few to the pictures, which take long."""
    run = read_run(directory)
    comparison = compare_runs([run], Conditions(initial_batch=8, peak_tflops=0.1))
    json.dumps(comparison.as_json())
    if run.seed > 1:
        figures = (goodput_figure(comparison), timeline_figure([run]))
        return [png(each) for each in figures if each is not None]
    return in_words(comparison)


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
