"""Reader of question sets and files of answers.

A set is in SQuAD's own JSON (v1.1 and v2.0; Rajpurkar et al., arXiv 1606.05250 and 1806.03822): an
object with `data`, a list of articles (`title`, `paragraphs`), of paragraphs (`context`, `qas`),
of questions (`id`, `question`, `answers` with `text` and `answer_start`, and since v2.0
`is_impossible`). Other keys are ignored, also `plausible_answers`, which are no answers. A file of
answers is the input of SQuAD's evaluation program: a JSON object, id of a question -> text, "" for
none.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from mlperf_bert.errors import DataError
from mlperf_bert.files import in_brief, parse_json_object, read_regular_file, write_file

REMEDY = "give a question set in the JSON format of SQuAD v1.1 or v2.0"
_REMEDY_ANSWERS = 'give a JSON object: id of every question -> its answer in text, "" for none'
_MAX_BYTES = 2**30  # SQuAD v2.0's training set has 42 MB
_KINDS: dict[type, str] = {
    **{dict: "an object", list: "a list", str: "a text"},
    **{int: "a whole number", bool: "true or false"},
}
Kind = TypeVar("Kind", dict[str, Any], list[Any], str, int, bool)


@dataclass(frozen=True, slots=True)
class Answer:
    """A text, and the index of its first character in the context."""

    text: str
    start: int


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its context; a question that cannot be answered from it has no answers."""

    id: str
    context: str
    question: str
    answers: tuple[Answer, ...]
    is_impossible: bool


@dataclass(frozen=True, slots=True)
class Questions:
    """The questions of a file in its order; `sha256` is the digest of the file's bytes.

    `version` is "1.1" if no question has `is_impossible`: in that format all have answers.
    """

    name: str
    sha256: str
    all: tuple[Question, ...]
    version: Literal["1.1", "2.0"]

    def __len__(self) -> int:
        return len(self.all)

    def __iter__(self) -> Iterator[Question]:
        return iter(self.all)

    def __getitem__(self, number: int) -> Question:
        return self.all[number]


def read_questions(path: Path) -> Questions:
    """Read a question set.

    Raises DataError, which names the question, if the file is missing, no JSON or not in the
    format: a key missing or of another type, an id twice, an answer not at its place in the
    context, an answerable question without answers, or the reverse.
    """
    return parse_questions(_contents(path, REMEDY), str(path))


def parse_questions(contents: bytes, name: str) -> Questions:
    """Parse a file's contents for `read_questions`; `name` opens every error message."""
    reader = _Reader(name)
    questions = tuple(reader.questions(_object_in(contents, name, REMEDY)))
    if not questions:
        raise DataError(name, "holds no question", REMEDY)
    return Questions(name, hashlib.sha256(contents).hexdigest(), questions, reader.version)


def read_predictions(path: Path, questions: Questions) -> dict[str, str]:
    """The text for each question.

    Raises DataError if the file is missing, no JSON object of texts, lacks one of the questions or
    has another.
    """
    values = _object_in(_contents(path, _REMEDY_ANSWERS), str(path), _REMEDY_ANSWERS)
    for identity, text in values.items():
        if not isinstance(text, str):
            problem = f"is {in_brief(text)}, not a text"
            where = f"{path}: question {in_brief(identity)}"
            raise DataError(where, problem, _REMEDY_ANSWERS)
    missing = [question.id for question in questions if question.id not in values]
    unknown = values.keys() - {question.id for question in questions}
    if missing:
        problem = f"lacks {len(missing):,} of {len(questions):,} questions"
        problem += f", such as {in_brief(missing[0])}"
        raise DataError(str(path), problem, _REMEDY_ANSWERS)
    if unknown:
        problem = f"has {len(unknown):,} questions that are not in {questions.name}"
        problem += f", such as {in_brief(min(unknown))}"
        raise DataError(str(path), problem, "give the question set that it was made for")
    return values


def write_predictions(path: Path, predictions: Mapping[str, str]) -> None:
    """Write or replace a file of answers in one step. Raises DataError if it cannot."""
    contents = json.dumps(dict(predictions), ensure_ascii=False, indent=1) + "\n"
    write_file(path, contents.encode("utf-8"))


def _contents(path: Path, remedy: str) -> bytes:
    try:
        return read_regular_file(path, _MAX_BYTES)
    except OSError as error:
        raise DataError(str(path), error.strerror or "cannot be read", remedy) from None


def _object_in(contents: bytes, name: str, remedy: str) -> dict[str, Any]:
    """Read a JSON object. Raises DataError."""
    try:
        return parse_json_object(contents.decode("utf-8"))
    except UnicodeDecodeError as error:  # one of the ValueErrors
        raise DataError(name, f"is not UTF-8 at byte {error.start}", remedy) from None
    except ValueError as error:
        raise DataError(name, f"is not valid JSON ({error})", remedy) from None


class _Reader:
    """Goes down the levels of a file and knows its place."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._ids: set[str] = set()
        self.version: Literal["1.1", "2.0"] = "1.1"

    def questions(self, values: dict[str, Any]) -> Iterator[Question]:
        for number, article in enumerate(_of(values, "data", list, self._name)):
            where = f"{self._name}: data[{number}]"
            paragraphs = _of(_checked(article, dict, where), "paragraphs", list, where)
            for paragraph_number, paragraph in enumerate(paragraphs):
                below = f"{where}.paragraphs[{paragraph_number}]"
                yield from self._of_paragraph(_checked(paragraph, dict, below), below)

    def _of_paragraph(self, paragraph: dict[str, Any], where: str) -> Iterator[Question]:
        context = _text(paragraph, "context", where)
        for number, question in enumerate(_of(paragraph, "qas", list, where)):
            yield self._question(question, context, f"{where}.qas[{number}]")

    def _question(self, found: object, context: str, where: str) -> Question:
        values = _checked(found, dict, where)
        if type(values.get("id")) is int:  # as some tools for annotation write it
            values["id"] = str(values["id"])
        identity = _text(values, "id", where)
        # From here on the id gives the place; a search finds it.
        where = f"{self._name}: question {in_brief(identity)}"
        if identity in self._ids:
            raise DataError(where, "is there twice", "give every question an id of its own")
        self._ids.add(identity)
        is_impossible = False
        if "is_impossible" in values:
            self.version = "2.0"
            is_impossible = _of(values, "is_impossible", bool, where)
        answers = tuple(
            _answer(answer, context, f"{where}: answers[{number}]")
            for number, answer in enumerate(_of(values, "answers", list, where))
        )
        if is_impossible and answers:
            remedy = "remove its answers, or set is_impossible to false"
            raise DataError(where, f"is impossible, but has {len(answers)} answers", remedy)
        if not is_impossible and not answers:
            remedy = "give it an answer, or set is_impossible to true"
            raise DataError(where, "has no answers", remedy)
        text = _text(values, "question", where, may_be_empty=True)
        return Question(identity, context, text, answers, is_impossible)


def _answer(found: object, context: str, where: str) -> Answer:
    values = _checked(found, dict, where)
    text, start = _text(values, "text", where), _of(values, "answer_start", int, where)
    if start < 0 or not context.startswith(text, start):
        remedy = "mend answer_start: it counts characters of the context from 0"
        problem = f"{in_brief(text)} does not stand in the context at character {in_brief(start)}"
        raise DataError(where, problem, remedy)
    return Answer(text, start)


def _checked(found: object, kind: type[Kind], where: str) -> Kind:
    if type(found) is not kind:  # true is an int to isinstance()
        raise DataError(where, f"is {in_brief(found)}, not {_KINDS[kind]}", REMEDY)
    return found


def _of(values: dict[str, Any], key: str, kind: type[Kind], where: str) -> Kind:
    if key not in values:
        raise DataError(f"{where}: {key}", "is missing", REMEDY)
    return _checked(values[key], kind, f"{where}: {key}")


def _text(values: dict[str, Any], key: str, where: str, *, may_be_empty: bool = False) -> str:
    """A text that can be encoded, with more than white space unless it may be empty."""
    found = _of(values, key, str, where)
    if not may_be_empty and not found.strip():
        raise DataError(f"{where}: {key}", "is empty", REMEDY)
    try:
        found.encode("utf-8")
    except UnicodeEncodeError as error:
        problem = f"holds half of a surrogate pair at character {error.start}"
        raise DataError(f"{where}: {key}", problem, REMEDY) from None
    return found
