"""Untrusted input of `squad` and `tune`: questions, answers, records, spaces, a journal."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_mutations import mutate_json, mutate_lines, mutate_toml
from fuzz_text import LINES, tokenizer_json
from fuzz_world import Parser, files

from bert_tools.common.figures import png
from bert_tools.squad.answers import evaluate, find_answers, score
from bert_tools.squad.comparison import RESULT, Conditions, compare_runs, read_run
from bert_tools.squad.offsets import make_offset_encoder
from bert_tools.squad.plot import goodput_figure, timeline_figure
from bert_tools.squad.questions import parse_questions, read_predictions, read_questions
from bert_tools.squad.table import in_words
from bert_tools.squad.windows import make_windows
from bert_tools.tune.settings import with_values
from bert_tools.tune.space import draw, read_space, space_as_json, space_for
from bert_tools.tune.store import as_record, check_journal, open_journal
from mlperf_bert.config.files import load_config
from mlperf_bert.config.run_config import RunConfig
from mlperf_bert.vocabulary.tokenizer_file import load
from mlperf_bert.vocabulary.word_pieces import Vocabulary
from squad_cases import pipeline_timeline, qa, record, set_of, vocabulary_of, write_record
from support import CONFIGS, TOOLS

SET = "set.json"
PREDICTIONS = "predictions.json"
TOKENIZER = "tokenizer.json"
SPACE = "space.toml"
JOURNAL = "journal.log"
STEPPED = '\n[[parameter]]\nkey = "schedule.decay_steps"\nlow = 100\nhigh = 900\nstep = 100\n'
CONTEXT = "A node is a computer. Nodes, e.g. caf\u00e9s\u2019, form a cluster of \U0001f600."


@cache
def vocabulary() -> Vocabulary:
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
        "plain_noise_scale": 31.5,
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


class Ends:
    """Draws the lowest or the highest of everything."""

    def __init__(self, end: int) -> None:
        self.end = end

    def suggest_float(self, _name: str, low: float, high: float, *, log: bool) -> float:
        assert low < high and (low > 0 or not log)
        return (low, high)[self.end]

    def suggest_int(self, _name: str, low: int, high: int, *, step: int, log: bool) -> int:
        assert low < high and step >= 1 and (low > 0 or not log)
        return (low, high)[self.end]

    def suggest_categorical(self, _name: str, choices: tuple[Any, ...]) -> Any:
        return choices[-self.end]


@cache
def config() -> RunConfig:
    return load_config(CONFIGS / "cpu_tiny.toml")


def parse_space(directory: Path) -> object:
    space = space_for(read_space(directory / SPACE), config(), None)
    json.dumps(space_as_json(space))
    return [draw(space, Ends(end), config()) for end in (0, 1)]


def make_journal(directory: Path) -> None:
    """A study of three trials, as Optuna writes it."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = open_journal(directory / JOURNAL)
    study = optuna.create_study(storage=storage, study_name="trial")
    for number in range(3):
        trial = study.ask()
        rate = trial.suggest_float("optim.learning_rate", 1e-4, 1e-2, log=True)
        trial.suggest_categorical("clip.policy", ["none", "after_allreduce"])
        facts = {"owner": {"host": "here", "pid": 7}, "settings": {"clip.policy": "none"}}
        facts |= {"seed": 1, "ended": "reached", "samples": 64, "seconds": 0.5}
        facts |= {"accuracies": [0.25, 0.5], "evaluated_at": [32, 64]}
        for key, fact in facts.items():
            trial.set_user_attr(key, fact)
        trial.report(0.5, number + 1)
        study.tell(trial, rate)


def parse_journal(directory: Path) -> object:
    """As `tune`, on a copy: what is read may be mended."""
    check_journal(directory / JOURNAL)
    copy = directory / "copy.log"
    copy.write_bytes((directory / JOURNAL).read_bytes())
    storage = open_journal(copy)
    studies = storage.get_all_studies()
    records = [
        as_record(each.study_name, trial)
        for each in studies
        for trial in storage.get_all_trials(each._study_id)
    ]
    return [with_values(config(), each.settings) for each in records]


TOOLS_PARSERS: Mapping[str, Parser] = {
    "squad_questions": Parser(make=make_set, targets={SET: mutate_json}, parse=parse_set),
    "squad_offsets": Parser(
        make=make_tokenizer, targets={TOKENIZER: mutate_json}, parse=parse_offsets
    ),
    "squad_predictions": Parser(
        make=make_set, targets={PREDICTIONS: mutate_json}, parse=parse_answers
    ),
    "squad_record": Parser(make=make_record, targets={RESULT: mutate_json}, parse=parse_record),
    "tune_space": Parser(
        # Every form of a parameter.
        make=files({SPACE: (TOOLS / "tune/spaces/optimizers.toml").read_text() + STEPPED}),
        targets={SPACE: mutate_toml},
        parse=parse_space,
    ),
    "tune_journal": Parser(
        make=make_journal, targets={JOURNAL: mutate_lines("")}, parse=parse_journal, inputs=20_000
    ),
}
