"""Cleaning of a user's text, the same for every language: a document to sentences, or a reason.

A paragraph is brought to Unicode NFC; control characters, invisible formatting (but the joiners
that some scripts need), noncharacters and halves of surrogate pairs are dropped; every run of white
space becomes one space. It is split by `sentences`, and also after the full stops of other scripts,
and after . ! ? before a letter that has no case. A sentence of more than SENTENCE_CHARS is cut at
white space, or where there is none at that length.

Left out: a document that is not UTF-8 (more than one character in a thousand unreadable), with
fewer than LEAST_CHARS letters and digits, or of whose characters other than spaces fewer than half
are letters.
"""

import re
import unicodedata
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.prepare.documents import split_sentences

Reason = Literal["not UTF-8", "too short", "few letters"]
REASONS: tuple[Reason, ...] = ("not UTF-8", "too short", "few letters")

SENTENCE_CHARS = 500
LEAST_CHARS = 32
LEAST_LETTERS = 0.5  # of what is no space
MOST_UNREADABLE = 0.001

LETTER, DIGIT, SPACE, OTHER = range(4)

# White space among the control characters is left for `split` to see.
_UNWANTED = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e"
    "\u2060-\u206f\ufdd0-\ufdef\ufeff\ufff9-\uffff\ud800-\udfff\U000e0000-\U000e007f]"
)
_FULL_STOP = re.compile("[。！？｡।॥۔؟።՜՞։]+[\"'”’»」』）)\\]]*")  # noqa: RUF001
_STOP_BEFORE_A_SPACE = re.compile("[.!?…]+[\"'”’»)\\]]*\\s+")  # noqa: RUF001


def clean_document(paragraphs: list[str]) -> list[str] | Reason:
    """The sentences of a document, or why it is left out."""
    num_chars = sum(map(len, paragraphs))
    unreadable = sum(paragraph.count("\ufffd") for paragraph in paragraphs)
    if unreadable > MOST_UNREADABLE * num_chars:
        return "not UTF-8"
    cleaned = [clean_paragraph(paragraph) for paragraph in paragraphs]
    counts = np.bincount(kinds_of("".join(cleaned)), minlength=4)
    if counts[LETTER] + counts[DIGIT] < LEAST_CHARS:
        return "too short"
    if counts[LETTER] < LEAST_LETTERS * (counts.sum() - counts[SPACE]):
        return "few letters"
    return [sentence for paragraph in cleaned for sentence in any_sentences(paragraph)]


def clean_paragraph(text: str) -> str:
    """A paragraph without what has no meaning, on one line."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    return " ".join(_UNWANTED.sub("", text).split())


def any_sentences(text: str) -> Iterator[str]:
    """The sentences of a cleaned paragraph, none longer than SENTENCE_CHARS."""
    for part in _parts(text):
        for sentence in split_sentences(part):
            yield from _cut(sentence)


def codes_of(text: str) -> NDArray[np.uint32]:
    """The text's code points, uint32 [n]; it holds no surrogates."""
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


def kinds_of(text: str) -> NDArray[np.uint8]:
    """LETTER, DIGIT, SPACE or OTHER of each character, uint8 [n]."""
    kinds: NDArray[np.uint8] = kind_table()[codes_of(text)]
    return kinds


@cache
def kind_table() -> NDArray[np.uint8]:
    """Of every code point, uint8 [0x110000]: made once a process, in about 0.2 s."""
    table: NDArray[Any] = np.full(0x110000, OTHER, dtype=np.uint8)
    of_first = {"L": LETTER, "M": LETTER, "N": DIGIT, "Z": SPACE}
    for code in range(0x32000):  # all that is assigned lies below, but for tags and private use
        table[code] = of_first.get(unicodedata.category(chr(code))[0], OTHER)
    table.setflags(write=False)
    return table


def _parts(text: str) -> Iterator[str]:
    """The text, cut where `split_sentences` knows no sentence to end."""
    if text.isascii():
        yield text
        return
    ends = [match.end() for match in _FULL_STOP.finditer(text)]
    for match in _STOP_BEFORE_A_SPACE.finditer(text):
        if match.end() < len(text) and unicodedata.category(text[match.end()]) == "Lo":
            ends.append(match.end())
    start = 0
    for end in [*sorted(ends), len(text)]:
        yield text[start:end]
        start = end


def _cut(sentence: str) -> Iterator[str]:
    while len(sentence) > SENTENCE_CHARS:
        space = sentence.rfind(" ", 1, SENTENCE_CHARS + 1)
        end = space if space > 0 else SENTENCE_CHARS
        yield sentence[:end]
        sentence = sentence[end:].lstrip()
    if sentence:
        yield sentence
