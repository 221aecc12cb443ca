"""Read question sets, and files of answers to their questions.

A question set is a JSON file in the format of SQuAD v2.0 (Rajpurkar et al., arXiv 1806.03822). Its
object has the key `data`, a list of articles. Articles have `paragraphs`, paragraphs have `context`
and `qas`, and questions have `id`, `question`, `answers` (with `text` and `answer_start`) and
`is_impossible`. If `is_impossible` is missing, a question without answers counts as impossible.
Other keys are ignored, including `plausible_answers`, which lists wrong answers.

A file of answers is the input of SQuAD's evaluation program. It is a JSON object that maps the id
of a question to its answer, which is "" for no answer.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlperf_bert.errors import DataError
from mlperf_bert.files import in_brief, parse_json_object, read_regular_file, reading

_REMEDY = "pass a question set in the JSON format of SQuAD v2.0"
_MAX_BYTES = 2**30  # the training set of SQuAD v2.0 has 42 MB


@dataclass(frozen=True, slots=True)
class Answer:
    """The text of an answer, and the index of its first character in the context."""

    text: str
    start: int


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a context. `answers` is empty if the context does not answer it."""

    id: str
    context: str
    question: str
    answers: tuple[Answer, ...]

    @property
    def is_impossible(self) -> bool:
        """Return whether the context does not answer the question."""
        return not self.answers


@dataclass(frozen=True, slots=True)
class Questions:
    """The questions of a file in their order, and the SHA-256 digest of its bytes."""

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

    Raises DataError, which names the question, if the file is missing, is not JSON, or is not in
    the format. A file is not in the format if an id occurs twice, if an answer is not at its
    position in the context, if an answerable question has no answers, or if an impossible one has
    answers.
    """
    try:
        contents = read_regular_file(path, _MAX_BYTES)
    except OSError as error:
        raise DataError(str(path), error.strerror or "cannot be read", _REMEDY) from None
    return parse_questions(contents, str(path))


def parse_questions(contents: bytes, name: str) -> Questions:
    """Parse the contents of a question set. Error messages use the file name `name`."""
    with reading(Path(name), _REMEDY):
        paragraphs = [
            paragraph
            for article in parse_json_object(contents.decode("utf-8-sig"))["data"]
            for paragraph in article["paragraphs"]
        ]
        questions = tuple(
            _question(paragraph["context"], values, name)
            for paragraph in paragraphs
            for values in paragraph["qas"]
        )
    if not questions:
        raise DataError(name, "contains no question", _REMEDY)
    (identity, times), *_ = Counter(each.id for each in questions).most_common(1)
    if times > 1:
        where = f"{name}: question {in_brief(identity)}"
        raise DataError(where, f"occurs {times} times", "give every question a different id")
    return Questions(name, hashlib.sha256(contents).hexdigest(), questions)


def _question(context: str, values: dict[str, Any], name: str) -> Question:
    """Check the JSON object of one question, and return the question. Raises DataError."""
    identity = str(values["id"])  # because some annotation tools write numbers
    where = f"{name}: question {in_brief(identity)}"
    given = values.get("answers") or ()  # may be null or missing
    answers = tuple(Answer(each["text"], each["answer_start"]) for each in given)
    for text in (context, values["question"], *(each.text for each in answers)):
        if not isinstance(text, str):
            raise DataError(where, f"contains {in_brief(text)} instead of a text", _REMEDY)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise DataError(where, "contains an unpaired Unicode surrogate", _REMEDY) from None
    for answer in answers:
        if not answer.text.strip():
            remedy = "remove the answer, or write its text"
            raise DataError(where, "has an empty answer", remedy)
        if answer.start < 0 or not context.startswith(answer.text, answer.start):
            problem = (
                f"has the answer {in_brief(answer.text)}, which is not at character "
                f"{in_brief(answer.start)} of the context"
            )
            remedy = "correct answer_start, which counts characters of the context from 0"
            raise DataError(where, problem, remedy)
    if values.get("is_impossible", not answers) == bool(answers):
        if answers:
            problem = f"has {len(answers)} answers, but is_impossible is true"
            raise DataError(where, problem, "remove the answers, or set is_impossible to false")
        problem = "has no answers, but is_impossible is false"
        raise DataError(where, problem, "add an answer, or set is_impossible to true")
    return Question(identity, context, values["question"], answers)
