"""Reader of question sets and files of answers.

A set is in the JSON of SQuAD v2.0 (Rajpurkar et al., arXiv 1806.03822): an object with `data`, a
list of articles (`paragraphs`), of paragraphs (`context`, `qas`), of questions (`id`, `question`,
`answers` with `text` and `answer_start`, `is_impossible`, without which the answers decide). Other
keys are ignored, also `plausible_answers`, which are no answers. A file of answers is the input of
SQuAD's evaluation program: a JSON object, id of a question -> text, "" for none.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlperf_bert.errors import DataError
from mlperf_bert.files import in_brief, parse_json_object, read_json, read_regular_file, reading

_REMEDY = "give a question set in the JSON format of SQuAD v2.0"
_REMEDY_ANSWERS = 'give a JSON object: id of every question -> its answer in text, "" for none'
_MAX_BYTES = 2**30  # SQuAD v2.0's training set has 42 MB


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

    @property
    def is_impossible(self) -> bool:
        """True if the context does not answer it."""
        return not self.answers


@dataclass(frozen=True, slots=True)
class Questions:
    """The questions of a file in its order; `sha256` is the digest of the file's bytes."""

    name: str
    sha256: str
    all: tuple[Question, ...]

    def __len__(self) -> int:
        return len(self.all)

    def __iter__(self) -> Iterator[Question]:
        return iter(self.all)

    def __getitem__(self, number: int) -> Question:
        return self.all[number]


def read_questions(path: Path) -> Questions:
    """Read a question set.

    Raises DataError, which names the question, if the file is missing, no JSON or not in the
    format: an id twice, an answer not at its place in the context, an answerable question without
    answers, or the reverse.
    """
    try:
        contents = read_regular_file(path, _MAX_BYTES)
    except OSError as error:
        raise DataError(str(path), error.strerror or "cannot be read", _REMEDY) from None
    return parse_questions(contents, str(path))


def parse_questions(contents: bytes, name: str) -> Questions:
    """Parse a file's contents for `read_questions`; `name` opens every error message."""
    with reading(Path(name), _REMEDY):
        paragraphs = [
            paragraph
            for article in parse_json_object(contents.decode("utf-8"))["data"]
            for paragraph in article["paragraphs"]
        ]
        questions = tuple(
            _question(paragraph["context"], values, name)
            for paragraph in paragraphs
            for values in paragraph["qas"]
        )
    if not questions:
        raise DataError(name, "holds no question", _REMEDY)
    (identity, times), *_ = Counter(each.id for each in questions).most_common(1)
    if times > 1:
        where = f"{name}: question {in_brief(identity)}"
        raise DataError(where, f"is there {times} times", "give every question an id of its own")
    return Questions(name, hashlib.sha256(contents).hexdigest(), questions)


def _question(context: str, values: dict[str, Any], name: str) -> Question:
    identity = str(values["id"])  # some tools for annotation write numbers
    where = f"{name}: question {in_brief(identity)}"
    given = values.get("answers") or ()  # null or left out where there is none
    answers = tuple(Answer(each["text"], each["answer_start"]) for each in given)
    for text in (context, values["question"], *(each.text for each in answers)):
        if not isinstance(text, str):
            raise DataError(where, f"has {in_brief(text)} where a text belongs", _REMEDY)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise DataError(where, "has half a character", _REMEDY) from None
    for answer in answers:
        if not answer.text.strip():
            raise DataError(where, "has an empty answer", _REMEDY)
        if answer.start < 0 or not context.startswith(answer.text, answer.start):
            problem = f"{in_brief(answer.text)} does not stand in the context at character "
            remedy = "mend answer_start: it counts characters of the context from 0"
            raise DataError(where, problem + in_brief(answer.start), remedy)
    if values.get("is_impossible", not answers) == bool(answers):
        problem = f"has {len(answers)} answers"
        raise DataError(where, problem, "give it answers, or set is_impossible to true")
    return Question(identity, context, values["question"], answers)


def read_predictions(path: Path, questions: Questions) -> dict[str, str]:
    """The text for each question.

    Raises DataError if the file is missing, no JSON object of texts, or lacks one of the questions.
    """
    values = read_json(path, missing="is missing", remedy=_REMEDY_ANSWERS)
    missing = [each.id for each in questions if not isinstance(values.get(each.id), str)]
    if missing:
        problem = f"has no text for {len(missing):,} of {len(questions):,} questions"
        problem += f", such as {in_brief(missing[0])}"
        raise DataError(str(path), problem, _REMEDY_ANSWERS)
    return values
