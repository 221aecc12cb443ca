"""A vocabulary made of the questions that a model of random weights is trained on. No torch."""

from collections.abc import Iterator
from pathlib import Path

from bert_tools.squad.options import QUICK_PIECES
from bert_tools.squad.questions import Questions, read_questions
from mlperf_bert.common.atomic import write_file
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.prepare.train_vocabulary import train_vocabulary

_MOST_CHARACTERS = 20 * 2**20  # of text; SQuAD v2.0's has 15 MB of contexts, once each


def write_vocabulary(train: Path, path: Path) -> None:
    """Write a vocab.txt of QUICK_PIECES word pieces.

    Raises:
        DataError: the questions cannot be read, or the file not be written.
        ConfigError: they are too much text, or of too many different characters.
    """
    lines = list(_texts(read_questions(train)))
    if sum(map(len, lines)) > _MOST_CHARACTERS:
        problem = f"is missing, and {train} is too much text to make one of"
        raise ConfigError("--vocab", problem, "give a vocabulary, or --init-checkpoint")
    tokens = train_vocabulary(lines, QUICK_PIECES)
    write_file(path, ("\n".join(tokens) + "\n").encode("utf-8"))


def _texts(questions: Questions) -> Iterator[str]:
    """Every context once, and every question."""
    yield from dict.fromkeys(question.context for question in questions)
    yield from (question.question for question in questions)
