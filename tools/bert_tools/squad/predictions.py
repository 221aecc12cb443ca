"""The file of a question set's answers: a JSON object, id of a question -> text, "" for no answer.

It is what SQuAD's own evaluation program reads.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from bert_tools.squad.questions import Questions, read_object
from mlperf_bert.common.atomic import write_file
from mlperf_bert.common.errors import DataError
from mlperf_bert.common.untrusted import in_brief, read_regular_file

_REMEDY = 'give a JSON object: id of every question -> its answer in text, "" for none'
_MAX_BYTES = 64 * 2**20  # those for SQuAD v2.0's 11,873 questions of development have 0.6 MB


def read_predictions(path: Path, questions: Questions) -> dict[str, str]:
    """The text for each question, from a file that anybody may have written.

    Raises DataError where the file is missing, too large, no JSON object of texts, lacks one of the
    questions or has another.
    """
    try:
        contents = read_regular_file(path, _MAX_BYTES)
    except OSError as error:
        raise DataError(str(path), error.strerror or "cannot be read", _REMEDY) from None
    values = read_object(contents, str(path), _REMEDY)
    for identity, text in values.items():
        if not isinstance(text, str):
            problem = f"is {in_brief(text)}, not a text"
            raise DataError(f"{path}: question {in_brief(identity)}", problem, _REMEDY)
    missing = [question.id for question in questions if question.id not in values]
    unknown = values.keys() - {question.id for question in questions}
    if missing:
        problem = f"lacks {len(missing):,} of {len(questions):,} questions"
        raise DataError(str(path), f"{problem}, such as {in_brief(missing[0])}", _REMEDY)
    if unknown:
        problem = f"has {len(unknown):,} questions that are not in {questions.name}"
        remedy = "give the question set that it was made for"
        raise DataError(str(path), f"{problem}, such as {in_brief(min(unknown))}", remedy)
    return values


def write_predictions(path: Path, predictions: Mapping[str, str]) -> None:
    """Write or replace such a file in one step. Raises DataError when it cannot be written."""
    contents = json.dumps(dict(predictions), ensure_ascii=False, indent=1) + "\n"
    write_file(path, contents.encode("utf-8"))
