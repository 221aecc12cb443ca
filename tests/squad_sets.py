"""Small question sets in SQuAD's format, and vocabularies of whole words for them."""

import json
from collections.abc import Sequence
from typing import Any

from bert_tools.squad.questions import Questions, parse_questions
from mlperf_bert.vocabulary.word_pieces import Vocabulary, parse_vocabulary

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def vocabulary_of(*words: str) -> Vocabulary:
    """The special tokens, 0 to 4, and then the words, which are 5, 6 and so on."""
    return parse_vocabulary("\n".join([*SPECIAL, *words]).encode(), "vocab.txt")


def qa(identity: str, question: str, *answers: tuple[str, int], **more: Any) -> dict[str, Any]:
    """A question of v2.0 with its answers, text and first character; impossible without any."""
    return {
        "id": identity,
        "question": question,
        "answers": [{"text": text, "answer_start": start} for text, start in answers],
        "is_impossible": not answers,
        **more,
    }


def set_of(*paragraphs: tuple[str, Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """A set of one article; a paragraph is a context and its questions."""
    found = [{"context": context, "qas": list(qas)} for context, qas in paragraphs]
    return {"version": "v2.0", "data": [{"title": "Title", "paragraphs": found}]}


def questions_of(*paragraphs: tuple[str, Sequence[dict[str, Any]]]) -> Questions:
    """`set_of`, as it is read."""
    return parse_questions(json.dumps(set_of(*paragraphs)).encode(), "set.json")
