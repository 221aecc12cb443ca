r"""Cleans the text of a corpus, in the same way for every language.

Each paragraph is normalised to Unicode NFC. Control characters, invisible formatting (except the
joiners that some scripts need), noncharacters and unpaired surrogates are removed. Consecutive
white space becomes one space. The paragraph is then split into sentences as in
mlperf_bert/prepare/documents.py. It is also split after the full stops of other scripts, and after
. ! ? before a letter without case. A sentence of more than SENTENCE_CHARS characters is cut at
white space, or at exactly this length if it contains no white space. A line that starts with
Markdown markup (heading, list item, table row, fence) or with a prompt starts a new piece of at
least one sentence. Code is treated like other text.

A piece is left out if the fraction of letters among its characters other than spaces is below
MIN_LETTERS. Examples are the ruled lines and the figures of tables. A document is left out if it is
not UTF-8 (more than one character in a thousand cannot be decoded) or if it has fewer than
MIN_CHARS letters and digits.
"""

import re
import unicodedata
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Literal

from mlperf_bert.prepare.documents import split_sentences

Reason = Literal["not UTF-8", "too short", "few letters"]

SENTENCE_CHARS = 500
MIN_CHARS = 32
MIN_LETTERS = 0.25  # fraction of the characters other than spaces
MAX_UNREADABLE = 0.001  # fraction of the characters

_MARKED_LINE = re.compile(r"\n(?=\s*(?:[-*+•]\s|\d{1,3}[.)]\s|#{1,6}\s|\||```|~~~|>>>))")

# White-space control characters are not removed here, because `split` uses them.
_UNWANTED = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e"
    "\u2060-\u206f\ufdd0-\ufdef\ufeff\ufff9-\uffff\ud800-\udfff\U000e0000-\U000e007f]"
)
_FULL_STOP = re.compile("[。！？｡।॥۔؟።՜՞։]+[\"'”’»」』）)\\]]*")  # noqa: RUF001
_STOP_BEFORE_A_SPACE = re.compile("[.!?…]+[\"'”’»)\\]]*\\s+")  # noqa: RUF001


def documents_of(path: Path) -> Iterator[str]:
    """Yield the documents of a file of cleaned text.

    A document is one string, in which each sentence ends with a line feed.
    """
    with path.open(encoding="utf-8", newline="\n") as file:
        for is_between, lines in groupby(file, key=lambda line: line == "\n"):
            if not is_between:
                yield "".join(lines)


def clean_document(paragraphs: list[str]) -> tuple[list[str], dict[Reason, int]]:
    """Clean a document and split it into sentences.

    Returns the sentences, and the number of characters that were left out for each reason. If the
    whole document is left out, the result has no sentences and a single reason.
    """
    num_chars = sum(map(len, paragraphs))
    unreadable = sum(paragraph.count("\ufffd") for paragraph in paragraphs)
    if unreadable > MAX_UNREADABLE * num_chars:
        return [], {"not UTF-8": num_chars}
    lines = (piece for paragraph in paragraphs for piece in _MARKED_LINE.split(paragraph))
    pieces = [cleaned for piece in lines if (cleaned := clean_paragraph(piece))]
    num_chars = sum(map(len, pieces))
    if _letters_and_digits(pieces) < MIN_CHARS:
        return [], {"too short": num_chars}
    kept = [piece for piece in pieces if _has_letters(piece)]
    if _letters_and_digits(kept) < MIN_CHARS:
        return [], {"few letters": num_chars}
    sentences = [sentence for piece in kept for sentence in any_sentences(piece)]
    left_out = num_chars - sum(map(len, kept))
    return sentences, {"few letters": left_out} if left_out else {}


def _letters_and_digits(pieces: list[str]) -> int:
    return sum(char.isalnum() or _is_mark(char) for piece in pieces for char in piece)


def _has_letters(piece: str) -> bool:
    letters = sum(char.isalpha() or _is_mark(char) for char in piece)
    return letters >= MIN_LETTERS * (len(piece) - piece.count(" "))


def _is_mark(char: str) -> bool:
    """Return whether a character is a combining mark, such as a vowel sign of Hindi or Thai."""
    return unicodedata.category(char).startswith("M")


def clean_paragraph(text: str) -> str:
    """Return a paragraph as one line, without characters that carry no meaning."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    return " ".join(_UNWANTED.sub("", text).split())


def any_sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a cleaned paragraph, each with at most SENTENCE_CHARS characters."""
    for part in _parts(text):
        for sentence in split_sentences(part):
            yield from _cut(sentence)


def _parts(text: str) -> Iterator[str]:
    """Split a text at the sentence ends that `split_sentences` does not recognize."""
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
