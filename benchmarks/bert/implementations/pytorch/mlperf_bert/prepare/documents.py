r"""A text file to documents of token ids; how text is split into sentences, and cleaned.

UTF-8; lines end at \n only. A sentence file has one sentence a line and an empty line between
documents. A paragraph file (`split_sentences`) has an empty line between documents too; the other
lines of a document, however wrapped, are joined with a space and split.

A sentence ends at `.`, `!` or `?` (one or more), with any closing quotes and brackets after it,
when white space follows and then an upper-case letter, a digit or an opening quote or bracket. A
full stop does not end a sentence after a known abbreviation (Mr., e.g., vs.) or after a single
letter (an initial such as `J. Smith`, or `U.S.`), unless that letter is `I`.

A user's own text is cleaned before, the same for every language. A paragraph is brought to Unicode
NFC; control characters, invisible formatting (but the joiners that some scripts need),
noncharacters and halves of surrogate pairs are dropped; every run of white space becomes one space.
It is split as above, and also after the full stops of other scripts, and after . ! ? before a
letter that has no case. A sentence of more than SENTENCE_CHARS is cut at white space, or where
there is none at that length. Left out is a document that is not UTF-8 (more than one character in a
thousand unreadable), with fewer than LEAST_CHARS letters and digits, or of whose characters other
than spaces fewer than half are letters.
"""

import hashlib
import re
import unicodedata
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.common.errors import DataError
from mlperf_bert.vocabulary.any_vocabulary import Encoder

# Passes over held-out text, with other segments and masks: one gives too few masked tokens for a
# steady accuracy.
EVAL_DUPE_FACTOR = 2

_ABBREVIATION = re.compile(
    "mr|mrs|ms|dr|prof|st|sr|jr|gen|col|capt|lt|rev|hon|vol|fig|eq|sec|ch|pp|ed|eds|cf|vs"
    "|e\\.g|i\\.e|approx|dept|jan|feb|mar|apr|jun|jul|aug|sep|sept|oct|nov|dec",
    re.IGNORECASE,
)
# These end sentences as well ("apples, pears, etc. The next ..."), so they hold together only with
# what can hardly start one: a digit ("no. 5", "et al. 2019").
_ABBREVIATION_OR_END = re.compile("etc|no|inc|ltd|co|corp|al", re.IGNORECASE)
_CANDIDATE = re.compile(r"""([.!?]+)(["'\u2019\u201d)\]]*)\s+(?=["'\u2018\u201c(\[]*[^\W_a-z])""")
_LAST_WORD = re.compile(r"[^\s(\[\"'\u201c\u2018]+$")

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


def split_sentences(text: str) -> list[str]:
    """Sentences of `text`, stripped, white space within each made single; none is empty."""
    text = " ".join(text.split())
    sentences = []
    start = 0
    for match in _CANDIDATE.finditer(text):
        if _ends_here(text, start, match):
            sentences.append(text[start : match.end()].strip())
            start = match.end()
    sentences.append(text[start:].strip())
    return [sentence for sentence in sentences if sentence]


def _ends_here(text: str, start: int, match: re.Match[str]) -> bool:
    following = text[match.end() :].lstrip("\"'\u2018\u201c([")[:1]
    if not (following.isupper() or following.isdigit()):
        return False
    if match.group(1) != ".":
        return True
    found = _LAST_WORD.search(text[start : match.start()])
    word = found.group() if found else ""
    if _ABBREVIATION_OR_END.fullmatch(word):
        return not following.isdigit()
    if _ABBREVIATION.fullmatch(word):
        return False
    last_part = word.rpartition(".")[2]
    return not (len(last_part) == 1 and last_part.isalpha() and last_part != "I")


def digest_of(document: str) -> int:
    """A document's place in the order by which documents are held out, 0 .. 2**64 - 1."""
    digest = hashlib.blake2b(document.encode(), digest_size=8, key=b"held out").digest()
    return int.from_bytes(digest, "big")


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """D documents of N sentences of T tokens, laid end to end; no document or sentence is empty.

    Memory: 2 bytes a token (4 where the vocabulary has more than 65,536 words), 8 a sentence and
    8 a document: 2.4 bytes a token at 20 tokens a sentence.
    """

    tokens: NDArray[Any]  # uint16 or uint32 [T]
    sentence_offsets: NDArray[np.int64]  # [N + 1] into tokens
    document_offsets: NDArray[np.int64]  # [D + 1] into sentences

    def __len__(self) -> int:
        return len(self.document_offsets) - 1


@dataclass(frozen=True, slots=True)
class SourceText:
    """A text file's contents and the digest of its bytes."""

    text: str
    sha256: str


def read_text(path: Path) -> SourceText:
    """Read a whole text file. Raises DataError when it is missing, empty or not UTF-8."""
    try:
        contents = path.read_bytes()
        text = contents.decode("utf-8")
    except OSError as error:
        problem = error.strerror or "cannot be read"
        raise DataError(str(path), problem, "give a readable text file") from None
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 at byte {error.start}"
        raise DataError(str(path), problem, "convert it to UTF-8") from None
    if not text.strip():
        raise DataError(str(path), "is empty", "give a file with text")
    return SourceText(text, hashlib.sha256(contents).hexdigest())


def tokenize_documents(text: str, tokenizer: Encoder, *, split: bool) -> Documents:
    """Documents with at least one word piece; see the module for the two text layouts."""
    lines = _sentence_lines(text) if split else (line.strip() for line in text.split("\n"))
    tokens = bytearray()
    sentence_offsets = array("q", [0])  # into `tokens`, in bytes
    document_offsets = array("q", [0])
    for line in lines:
        is_first = len(sentence_offsets) - 1 == document_offsets[-1]
        tokens += tokenizer.encode(line if is_first or not line else tokenizer.joint + line)
        if len(tokens) > sentence_offsets[-1]:
            sentence_offsets.append(len(tokens))
        elif not line:
            _end_document(document_offsets, len(sentence_offsets) - 1)
    _end_document(document_offsets, len(sentence_offsets) - 1)
    return Documents(
        tokens=np.frombuffer(tokens, dtype=tokenizer.dtype),
        sentence_offsets=np.array(sentence_offsets) // tokenizer.dtype.itemsize,
        document_offsets=np.array(document_offsets),
    )


def _end_document(document_offsets: "array[int]", num_sentences: int) -> None:
    if num_sentences > document_offsets[-1]:  # else the document is empty: there is none
        document_offsets.append(num_sentences)


def _sentence_lines(text: str) -> Iterator[str]:
    paragraph: list[str] = []
    for line in [*text.split("\n"), ""]:
        stripped = line.strip()
        if stripped:
            paragraph.append(stripped)
        elif paragraph:
            yield from split_sentences(" ".join(paragraph))
            yield ""
            paragraph = []


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
