"""Question sets and files of answers: what is read, and each way of being wrong, in one line."""

import codecs
import hashlib
import json

import pytest

from bert_tools.squad.questions import (
    Answer,
    Question,
    parse_questions,
    read_questions,
)
from mlperf_bert.errors import DataError
from squad_cases import qa, set_of

CONTEXT = "A node is a computer. Nodes form a cluster."


def two_questions():
    return set_of(
        (CONTEXT, [qa("q1", "What is a node?", ("a computer", 10)), qa("q2", "Who came first?")])
    )


def as_json(values):
    return json.dumps(values).encode()


def refusal(contents):
    with pytest.raises(DataError) as caught:
        parse_questions(contents, "set.json")
    message = str(caught.value)
    assert message.startswith("set.json") and message.isprintable() and len(message) < 600
    return message


def test_version_2_is_read(tmp_path):
    values = two_questions()
    second = values["data"][0]["paragraphs"][0]["qas"][1]
    second["plausible_answers"] = [{"text": "Nodes", "answer_start": 22}]
    path = tmp_path / "set.json"
    path.write_bytes(as_json(values))
    found = read_questions(path)
    assert list(found) == [
        Question("q1", CONTEXT, "What is a node?", (Answer("a computer", 10),)),
        Question("q2", CONTEXT, "Who came first?", ()),
    ]
    assert len(found) == 2 and found[1].id == "q2"
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    del values["data"][0]["title"]
    first_qa(values)["id"] = 51870
    for question in values["data"][0]["paragraphs"][0]["qas"]:  # the answers decide
        del question["is_impossible"]
    again = parse_questions(as_json(values), "set.json")
    assert [each.id for each in again] == ["51870", "q2"]
    assert parse_questions(codecs.BOM_UTF8 + as_json(values), "set.json").all == again.all
    assert [each.is_impossible for each in again] == [each.is_impossible for each in found]


def first_qa(values):
    return values["data"][0]["paragraphs"][0]["qas"][0]


def changed(**changes):
    """Other values for keys of the first question."""
    return lambda values: first_qa(values).update(changes)


def without(key):
    return lambda values: first_qa(values).pop(key)


def answer(text, start):
    return changed(answers=[{"text": text, "answer_start": start}])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda values: b"", "Expecting value"),
        (lambda values: b"[]", "is not a JSON object"),
        (lambda values: b'{"data": "\xed\xa0\x80"}', "can't decode byte"),  # half a surrogate pair
        (answer("a computer", 11), "question 'q1': has the answer 'a computer', which is not at"),
        (answer("a computer", 10**30), "at character an integer of 100 bits"),
        # Where Python, counting from the end, would find it.
        (answer("computer.", 12 - len(CONTEXT)), "at character -31"),
        (answer(" ", 1), "question 'q1': has an empty answer"),
        (changed(answers=[]), "question 'q1': has no answers"),
        (changed(id="\n\x1b[2J" + "x" * 10_000, answers=[]), "has no answers"),
        (changed(is_impossible=True), "question 'q1': has 1 answers, but is_impossible is true"),
        (changed(id="q2"), "question 'q2': occurs 2 times"),
        (changed(question=None), "question 'q1': contains None instead of a text"),
        (changed(question="a\ud800"), "question 'q1': contains an unpaired"),
        (without("id"), "has no key 'id'"),
        (without("question"), "has no key 'question'"),
        (lambda values: values.pop("data"), "has no key 'data'"),
        (lambda values: values.update(data=[]), "contains no question"),
        (lambda values: values.update(data=[7]), "set.json: "),
    ],
)
def test_what_is_not_of_the_format_is_refused(change, said):
    values = two_questions()
    other = change(values)
    assert said in refusal(other if isinstance(other, bytes) else as_json(values))


def test_a_file_that_is_too_large_or_missing_is_refused(tmp_path):
    path = tmp_path / "set.json"
    with pytest.raises(DataError, match="No such file"):
        read_questions(path)
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(DataError, match="is larger than 1,073,741,824 bytes"):
        read_questions(path)
