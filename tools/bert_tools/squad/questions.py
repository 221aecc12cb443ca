"""Reader of question sets and files of answers, which anybody may have written.

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

from mlperf_bert.common.atomic import write_file
from mlperf_bert.common.errors import DataError
from mlperf_bert.common.untrusted import in_brief, parse_json_object, read_regular_file

REMEDY = "give a question set in the JSON format of SQuAD v1.1 or v2.0"
_REMEDY_ANSWERS = 'give a JSON object: id of every question -> its answer in text, "" for none'
# SQuAD v2.0's training set has 42 MB and 1.6 million of these characters. A hostile file takes at
# most about 3 GB of memory: nine bytes per byte (one rare character makes a whole text wide), and
# 260 bytes per value (a key of its own and a number, in one object).
_MAX_BYTES = 128 * 2**20
_MAX_VALUES = 2**23
_OPENING = (b"{", b"[", b",")
# SQuAD's longest context has some 4,000 characters; splitting takes about 200 bytes for each.
_MAX_CHARACTERS = 2**20
_MAX_BYTES_ANSWERS = 64 * 2**20  # those for SQuAD v2.0's 11,873 development questions have 0.6 MB
_KINDS: dict[type, str] = {dict: "an object", list: "a list", str: "a text"}
Kind = TypeVar("Kind", dict[str, Any], list[Any], str)


@dataclass(frozen=True, slots=True)
class Answer:
    """A text, and the index of its first character in the context."""

    text: str
    start: int


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its context; a question that cannot be answered from it has no answers."""

    id: str
    title: str
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

    Raises DataError, which names the question, if the file is missing, too large, not UTF-8, no
    JSON or not in the format: a key missing, of another type or too long, an id twice, an answer
    not at its place in the context, an answerable question without answers, or the reverse.
    """
    return parse_questions(_contents(path, _MAX_BYTES, REMEDY), str(path))


def parse_questions(contents: bytes, name: str) -> Questions:
    """Parse a file's contents for `read_questions`; `name` opens every error message."""
    reader = _Reader(name)
    questions = tuple(reader.questions(_object_in(contents, name, REMEDY)))
    if not questions:
        raise DataError(name, "holds no question", REMEDY)
    return Questions(name, hashlib.sha256(contents).hexdigest(), questions, reader.version)


def read_predictions(path: Path, questions: Questions) -> dict[str, str]:
    """The text for each question.

    Raises DataError if the file is missing, too large, no JSON object of texts, lacks one of the
    questions or has another.
    """
    contents = _contents(path, _MAX_BYTES_ANSWERS, _REMEDY_ANSWERS)
    values = _object_in(contents, str(path), _REMEDY_ANSWERS)
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


def _contents(path: Path, most_bytes: int, remedy: str) -> bytes:
    try:
        return read_regular_file(path, most_bytes)
    except OSError as error:
        raise DataError(str(path), error.strerror or "cannot be read", remedy) from None


def _object_in(contents: bytes, name: str, remedy: str) -> dict[str, Any]:
    """Read a JSON object from a file of bounded size, in bounded memory. Raises DataError."""
    num_values = sum(map(contents.count, _OPENING))
    if num_values > _MAX_VALUES:
        problem = (
            f"holds {num_values:,} values (characters {{ [ and ,), the most is {_MAX_VALUES:,}"
        )
        raise DataError(name, problem, remedy)
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
            title = _text(_checked(article, dict, where), "title", where)
            paragraphs = _of(article, "paragraphs", list, where)
            if not paragraphs:
                raise DataError(where, "has no paragraphs", REMEDY)
            for paragraph_number, paragraph in enumerate(paragraphs):
                below = f"{where}.paragraphs[{paragraph_number}]"
                yield from self._of_paragraph(_checked(paragraph, dict, below), title, below)

    def _of_paragraph(
        self, paragraph: dict[str, Any], title: str, where: str
    ) -> Iterator[Question]:
        context = _text(paragraph, "context", where)
        if not context.strip():
            raise DataError(f"{where}: context", "is empty", REMEDY)
        for number, question in enumerate(_of(paragraph, "qas", list, where)):
            yield self._question(question, title, context, f"{where}.qas[{number}]")

    def _question(self, found: object, title: str, context: str, where: str) -> Question:
        values = _checked(found, dict, where)
        identity = _text(values, "id", where)
        # From here on the id gives the place; a search finds it.
        where = f"{self._name}: question {in_brief(identity)}"
        if not identity:
            raise DataError(where, "has an empty id", REMEDY)
        if identity in self._ids:
            raise DataError(where, "is there twice", "give every question an id of its own")
        self._ids.add(identity)
        if "is_impossible" in values:
            self.version = "2.0"
        is_impossible = values.get("is_impossible", False)
        if not isinstance(is_impossible, bool):
            problem = f"is {in_brief(is_impossible)}, not true or false"
            raise DataError(f"{where}: is_impossible", problem, REMEDY)
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
        text = _text(values, "question", where)
        return Question(identity, title, context, text, answers, is_impossible)


def _answer(found: object, context: str, where: str) -> Answer:
    values = _checked(found, dict, where)
    text = _text(values, "text", where)
    start = values.get("answer_start")
    if type(start) is not int:  # true is an int to Python
        problem = f"is {in_brief(start)}, not a whole number" if start is not None else "is missing"
        raise DataError(f"{where}: answer_start", problem, REMEDY)
    if not text.strip():
        raise DataError(f"{where}: text", "is empty", REMEDY)
    if start < 0 or not context.startswith(text, start):
        remedy = "mend answer_start: it counts characters of the context from 0"
        problem = f"{in_brief(text)} does not stand in the context at character {in_brief(start)}"
        raise DataError(where, problem, remedy)
    return Answer(text, start)


def _checked(found: object, kind: type[Kind], where: str) -> Kind:
    if not isinstance(found, kind):
        raise DataError(where, f"is {in_brief(found)}, not {_KINDS[kind]}", REMEDY)
    return found


def _of(values: dict[str, Any], key: str, kind: type[Kind], where: str) -> Kind:
    if key not in values:
        raise DataError(f"{where}: {key}", "is missing", REMEDY)
    return _checked(values[key], kind, f"{where}: {key}")


def _text(values: dict[str, Any], key: str, where: str) -> str:
    found = _of(values, key, str, where)
    if len(found) > _MAX_CHARACTERS:
        problem = f"has {len(found):,} characters, the most is {_MAX_CHARACTERS:,}"
        raise DataError(f"{where}: {key}", problem, "divide it")
    try:
        found.encode("utf-8")
    except UnicodeEncodeError as error:
        problem = f"holds half of a surrogate pair at character {error.start}"
        raise DataError(f"{where}: {key}", problem, REMEDY) from None
    return found
