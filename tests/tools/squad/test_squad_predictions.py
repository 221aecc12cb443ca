"""The file of answers: written, read again, and refused where it is not of the question set."""

import json
from pathlib import Path

import pytest

from bert_tools.squad.predictions import read_predictions, write_predictions
from mlperf_bert.common.errors import DataError
from squad_sets import qa, questions_of

QUESTIONS = questions_of(("a caf\u00e9", [qa("q1", "What?", ("caf\u00e9", 2)), qa("q2", "Who?")]))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "predictions.json"
    write_predictions(path, {"q1": "caf\u00e9", "q2": ""})
    assert read_predictions(path, QUESTIONS) == {"q1": "caf\u00e9", "q2": ""}
    assert json.loads(path.read_text(encoding="utf-8")) == {"q1": "caf\u00e9", "q2": ""}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (b'{"q1": "a"}', "lacks 1 of 2 questions, such as 'q2'"),
        (b'{"q1": "a", "q2": "", "q\\n3": ""}', "1 questions that are not in set.json, such as"),
        (b'{"q1": "a", "q2": null}', "question 'q2': is None, not a text"),
        (b'{"q1": "a", "q2": ["b"]}', "question 'q2': is a list, not a text"),
        (b'{"q1": "a", "q1": "b", "q2": ""}', "has a key twice"),
        (b'["a"]', "is not a JSON object"),
        (b"", "is not valid JSON"),
        (b'{"q1": "\xff"}', "is not UTF-8 at byte 8"),
    ],
)
def test_what_is_not_of_the_set_is_refused(tmp_path: Path, contents: bytes, said: str) -> None:
    path = tmp_path / "predictions.json"
    path.write_bytes(contents)
    with pytest.raises(DataError) as caught:
        read_predictions(path, QUESTIONS)
    assert said in str(caught.value) and str(caught.value).isprintable()


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_predictions(tmp_path / "predictions.json", QUESTIONS)
