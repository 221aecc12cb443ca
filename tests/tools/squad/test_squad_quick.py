"""The quick set, of our own writing, which comes with the package."""

import importlib.resources
from pathlib import Path

import numpy as np
import pytest
from tokenizers import BertWordPieceTokenizer

from bert_tools.squad.answers import find_answers
from bert_tools.squad.questions import Questions, read_questions
from bert_tools.squad.scores import evaluate
from bert_tools.squad.windows import make_windows
from mlperf_bert.vocabulary.word_pieces import basic_words
from squad_sets import vocabulary_of

QUICK = Path(str(importlib.resources.files("bert_tools"))) / "squad" / "quick"


@pytest.fixture(scope="module")
def sets() -> dict[str, Questions]:
    return {name: read_questions(QUICK / f"{name}.json") for name in ("train", "dev")}


def test_it_is_large_enough_and_of_every_kind(sets: dict[str, Questions]) -> None:
    every = [*sets["train"], *sets["dev"]]
    assert len(every) >= 60
    assert 3 * sum(question.is_impossible for question in every) == len(every)
    assert any(len(question.answers) > 1 for question in sets["train"])
    assert any(len(question.answers) > 1 for question in sets["dev"])


def test_nothing_of_dev_is_in_train(sets: dict[str, Questions]) -> None:
    for part in ("id", "context", "question"):
        train, dev = ({getattr(each, part) for each in sets[name]} for name in ("train", "dev"))
        assert not train & dev


def test_every_answer_is_held_by_a_window_and_can_be_given(sets: dict[str, Questions]) -> None:
    for questions in sets.values():
        words = {word: None for text in texts_of(questions) for word in basic_words(text)}
        windows = make_windows(questions, vocabulary_of(*words), max_length=64, stride=16)
        assert len(windows) > len(questions) and not windows.remarks
        starts, ends = np.zeros((2, len(windows.input_ids)))
        starts[windows.offsets[:-1] + windows.starts] = 1
        ends[windows.offsets[:-1] + windows.ends] = 1
        # A window without the answer says so; what another window found must outweigh it.
        starts[windows.offsets[:-1]] *= 0.5
        ends[windows.offsets[:-1]] *= 0.5
        values = evaluate(
            questions, find_answers(questions, windows, np.stack([starts, ends], axis=1))
        )
        assert (values["exact_match"], values["f1"]) == (100.0, 100.0)


def test_windows_are_those_of_the_tokenizers_library(sets: dict[str, Questions]) -> None:
    # Its stride is the overlap: the room for the text less ours. The set has no character on which
    # the library cuts words otherwise.
    words = {word: None for text in texts_of(sets["dev"]) for word in basic_words(text)}
    vocabulary = vocabulary_of(*words)
    library = BertWordPieceTokenizer(vocabulary.ids)
    max_length, stride = 48, 16
    windows = make_windows(sets["dev"], vocabulary, max_length=max_length, stride=stride)
    expected = []
    for question in sets["dev"]:
        num_words = len(basic_words(question.question))
        library.enable_truncation(
            max_length, stride=max_length - 3 - num_words - stride, strategy="only_second"
        )
        first = library.encode(question.question, question.context)
        expected += [each.ids for each in (first, *first.overflowing)]
    assert [
        part.tolist() for part in np.split(windows.input_ids, windows.offsets[1:-1])
    ] == expected


def texts_of(questions: Questions) -> list[str]:
    """Every context and question."""
    return [text for each in questions for text in (each.context, each.question)]
