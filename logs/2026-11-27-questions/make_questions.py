"""Questions in SQuAD's format from the embedded corpus: what stands between two pairs of words?

    python make_questions.py DATA OUT      DATA: prepared by `mlperf_bert prepare --embedded`

A context is a few sentences of one document. A question names two words before its answer and two
after; the answer is the one or two words between them, and all other words are distractors. A
question without an answer is about another context. Train and dev questions are made of the
corpus's train and held-out documents.
"""

import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEED = 1
COUNTS = {"train": 16_000, "dev": 800}
PARTS = {"train": "train-*.txt", "dev": "eval.txt"}
WORDS = (25, 45)  # of a context
PER_CONTEXT = 4
UNANSWERABLE = 0.25
_ENDS, _LONGEST = 2, 2  # words on each side of the answer, and of the answer
_WORD = re.compile(r"\S+")


def contexts(text: str) -> Iterator[str]:
    """Texts of WORDS words: whole sentences of one document."""
    for document in text.split("\n\n"):
        taken: list[str] = []
        for sentence in document.splitlines():
            taken.append(sentence.strip())
            count = len(" ".join(taken).split())
            if count >= WORDS[0]:
                if count <= WORDS[1]:
                    yield " ".join(taken)
                taken = []


@dataclass(frozen=True, slots=True)
class Place:
    """An answer in a context, and the pairs of words around it."""

    before: str
    answer: str
    after: str
    first: int  # character of the answer

    @property
    def question(self) -> str:
        """In words."""
        return f"What is between {self.before} and {self.after}?"

    def counts_in(self, context: str) -> tuple[int, int]:
        """How often a context has each pair."""
        text = context.lower()
        return text.count(self.before.lower()), text.count(self.after.lower())


def places(context: str, draw: random.Random) -> list[Place]:
    """PER_CONTEXT places at most, of plain words alone."""
    words = list(_WORD.finditer(context))
    found = []
    for first in range(_ENDS, len(words)):
        end = first + draw.randint(1, _LONGEST)
        around = words[first - _ENDS : end + _ENDS]
        if len(around) == end - first + 2 * _ENDS and all(each[0].isalpha() for each in around):
            place = Place(
                before=context[around[0].start() : around[_ENDS - 1].end()],
                answer=context[words[first].start() : words[end - 1].end()],
                after=context[around[-_ENDS].start() : around[-1].end()],
                first=words[first].start(),
            )
            if place.counts_in(context) == (1, 1):
                found.append(place)
    return draw.sample(found, min(PER_CONTEXT, len(found)))


def question_set(name: str, texts: list[str], draw: random.Random) -> dict[str, Any]:
    """COUNTS[name] questions on as many of the texts as they need."""
    of_all = [places(text, draw) for text in texts]
    everywhere = [place for found in of_all for place in found]
    paragraphs, count = [], 0
    for text, found in zip(texts, of_all, strict=True):
        asked = []
        for place in found[: COUNTS[name] - count]:
            question, answers = (
                place.question,
                [{"text": place.answer, "answer_start": place.first}],
            )
            if draw.random() < UNANSWERABLE:
                other = draw.choice(everywhere)
                while all(other.counts_in(text)):
                    other = draw.choice(everywhere)
                question, answers = other.question, []
            count += 1
            item = {"id": f"{name}-{count:05}", "question": question, "answers": answers}
            asked.append(item | {"is_impossible": not answers})
        if asked:
            paragraphs.append({"context": text, "qas": asked})
    print(f"{name}: {count:,} questions on {len(paragraphs):,} contexts")
    return {"version": "v2.0", "data": [{"title": name, "paragraphs": paragraphs}]}


def make(data: Path, out: Path) -> None:
    """Write OUT/train.json and OUT/dev.json."""
    out.mkdir(parents=True, exist_ok=True)
    draw = random.Random(SEED)
    for name, pattern in PARTS.items():
        paths = sorted((data / "text").glob(pattern))
        texts = [each for path in paths for each in contexts(path.read_text("utf-8"))]
        draw.shuffle(texts)
        made = question_set(name, texts, draw)
        (out / f"{name}.json").write_text(json.dumps(made), "utf-8")


if __name__ == "__main__":
    make(*map(Path, sys.argv[1:]))
