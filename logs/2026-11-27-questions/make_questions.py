"""Questions in SQuAD's format from the embedded corpus: which word comes after a given one?

    python make_questions.py DATA OUT      DATA: prepared by `mlperf_bert prepare --embedded`

A context is a few sentences of one document. A question names a word that the context has once;
its answer is the next word, and every other word is a distractor. An unanswerable question names a
word that the context lacks. Train and dev questions are of the corpus's train and held-out parts.
"""

import json
import random
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

SEED = 1
COUNTS = {"train": 12_000, "dev": 800}
WORDS = (25, 45)  # of a context
PER_CONTEXT = 4
UNANSWERABLE = 0.25
_WORD = re.compile(r"[A-Za-z]{3,}")


def contexts(path: Path) -> Iterator[str]:
    """Texts of WORDS words, from whole sentences of one document."""
    for document in path.read_text("utf-8").split("\n\n"):
        taken: list[str] = []
        for sentence in document.splitlines():
            taken.append(sentence.strip())
            count = len(" ".join(taken).split())
            if count > WORDS[1]:
                taken = []
            elif count >= WORDS[0]:
                yield " ".join(taken)
                taken = []


def questions(context: str, others: list[str], draw: random.Random) -> list[dict[str, Any]]:
    """PER_CONTEXT questions about a context at most."""
    words = list(_WORD.finditer(context))
    seen = [match[0].lower() for match in words]
    named = [
        (one, after)
        for one, after in pairwise(words)
        if seen.count(one[0].lower()) == 1 and context[one.end() : after.start()] == " "
    ]
    found = []
    for one, after in draw.sample(named, min(PER_CONTEXT, len(named))):
        word, answers = one[0], [{"text": after[0], "answer_start": after.start()}]
        if draw.random() < UNANSWERABLE:
            word = next(
                each for each in iter(lambda: draw.choice(others), None) if each not in seen
            )
            answers = []
        found.append(
            {
                "question": f"Which word comes after {word.lower()}?",
                "answers": answers,
                "is_impossible": not answers,
            }
        )
    return found


def make(data: Path, out: Path) -> None:
    """Write OUT/train.json and OUT/dev.json."""
    out.mkdir(parents=True, exist_ok=True)
    draw = random.Random(SEED)
    for name, pattern in (("train", "train-*.txt"), ("dev", "eval.txt")):
        texts = [each for path in sorted((data / "text").glob(pattern)) for each in contexts(path)]
        draw.shuffle(texts)
        others = [match[0].lower() for text in texts for match in _WORD.finditer(text)]
        paragraphs, count = [], 0
        for text in texts:
            asked = questions(text, others, draw)[: COUNTS[name] - count]
            for each in asked:
                count += 1
                each["id"] = f"{name}-{count:05}"
            paragraphs.append({"context": text, "qas": asked})
        print(f"{name}: {count} questions on {len(paragraphs)} contexts")
        answer = {"version": "v2.0", "data": [{"title": name, "paragraphs": paragraphs}]}
        (out / f"{name}.json").write_text(json.dumps(answer), "utf-8")


if __name__ == "__main__":
    make(*map(Path, sys.argv[1:]))
