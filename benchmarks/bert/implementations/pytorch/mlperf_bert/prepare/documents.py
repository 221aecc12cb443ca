r"""Text files to documents of token ids: sentence splitting, cleaning, tokenisation.

Files are UTF-8; lines end at \n only. A sentence file has one sentence per line and an empty line
between documents. A paragraph file (`split_sentences`) has an empty line between documents too; the
lines of a document are joined with a space and split into sentences.

A sentence ends at `.`, `!` or `?` (one or more), with any closing quotes and brackets after it,
when white space follows and then an upper-case letter, a digit or an opening quote or bracket. A
full stop does not end a sentence after a known abbreviation (Mr., e.g., vs.) or after a single
letter (an initial such as `J. Smith`, or `U.S.`), unless that letter is `I`.

A user's own text is cleaned first, the same way for every language. A paragraph is normalised to
Unicode NFC; control characters, invisible formatting (except the joiners that some scripts need),
noncharacters and halves of surrogate pairs are dropped; every run of white space becomes one space.
It is split as above, and also after the full stops of other scripts, and after . ! ? before a
letter without case. A sentence of more than SENTENCE_CHARS is cut at white space, or at that length
if there is none. A line that opens with a mark of Markdown (heading, list item, row of a table,
fence) or a prompt starts a new piece of at least one sentence; code is treated like other text.

Two things are left out. A piece is, if fewer than LEAST_LETTERS of its characters other than spaces
are letters (rules and figures of tables). A document is, if it is not UTF-8 (more than one
character in a thousand unreadable) or has fewer than LEAST_CHARS letters and digits.
"""

import hashlib
import re
import unicodedata
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import compress, groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.errors import DataError
from mlperf_bert.vocabulary.any_vocabulary import Encoder

# Passes over held-out text, with new segments and masks: one gives too few masked tokens for a
# steady accuracy.
EVAL_DUPE_FACTOR = 2

_ABBREVIATION = re.compile(
    "mr|mrs|ms|dr|prof|st|sr|jr|gen|col|capt|lt|rev|hon|vol|fig|eq|sec|ch|pp|ed|eds|cf|vs"
    "|e\\.g|i\\.e|approx|dept|jan|feb|mar|apr|jun|jul|aug|sep|sept|oct|nov|dec",
    re.IGNORECASE,
)
# These may end a sentence too ("apples, pears, etc. The next ..."), so they join only with
# a digit, which can hardly start one ("no. 5", "et al. 2019").
_ABBREVIATION_OR_END = re.compile("etc|no|inc|ltd|co|corp|al", re.IGNORECASE)
_CANDIDATE = re.compile(r"""([.!?]+)(["'\u2019\u201d)\]]*)\s+(?=["'\u2018\u201c(\[]*[^\W_a-z])""")
_LAST_WORD = re.compile(r"[^\s(\[\"'\u201c\u2018]+$")

Reason = Literal["not UTF-8", "too short", "few letters"]

SENTENCE_CHARS = 500
LEAST_CHARS = 32
LEAST_LETTERS = 0.25  # share of the characters other than spaces
MOST_UNREADABLE = 0.001

LETTER, DIGIT, SPACE, OTHER = range(4)

_MARKED_LINE = re.compile(r"\n(?=\s*(?:[-*+•]\s|\d{1,3}[.)]\s|#{1,6}\s|\||```|~~~|>>>))")

# White-space control characters stay for `split`.
_UNWANTED = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e"
    "\u2060-\u206f\ufdd0-\ufdef\ufeff\ufff9-\uffff\ud800-\udfff\U000e0000-\U000e007f]"
)
_FULL_STOP = re.compile("[。！？｡।॥۔؟።՜՞։]+[\"'”’»」』）)\\]]*")  # noqa: RUF001
_STOP_BEFORE_A_SPACE = re.compile("[.!?…]+[\"'”’»)\\]]*\\s+")  # noqa: RUF001


def split_sentences(text: str) -> list[str]:
    """Non-empty sentences of `text`, stripped, with runs of white space made one space."""
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
    """A document's rank in the order of holding out, 0 .. 2**64 - 1."""
    digest = hashlib.blake2b(document.encode(), digest_size=8, key=b"held out").digest()
    return int.from_bytes(digest, "big")


def documents_of(path: Path) -> Iterator[str]:
    """Yield the documents of a sentence file, with the line ends of their sentences."""
    with path.open(encoding="utf-8", newline="\n") as file:
        for is_between, lines in groupby(file, key=lambda line: line == "\n"):
            if not is_between:
                yield "".join(lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """D documents of N sentences of T tokens, laid end to end; no document or sentence is empty.

    Memory: 2 bytes per token (4 if the vocabulary has more than 65,536 words), 8 per sentence and 8
    per document: 2.4 bytes per token at 20 tokens per sentence.
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
    """Documents with at least one word piece; the module's docstring gives the two text layouts."""
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
    if num_sentences > document_offsets[-1]:  # skip an empty document
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


def clean_document(paragraphs: list[str]) -> tuple[list[str], dict[Reason, int]]:
    """The sentences of a document, and the number of characters left out for each reason.

    A left-out document has no sentences and one reason.
    """
    num_chars = sum(map(len, paragraphs))
    unreadable = sum(paragraph.count("\ufffd") for paragraph in paragraphs)
    if unreadable > MOST_UNREADABLE * num_chars:
        return [], {"not UTF-8": num_chars}
    lines = (piece for paragraph in paragraphs for piece in _MARKED_LINE.split(paragraph))
    pieces = [cleaned for piece in lines if (cleaned := clean_paragraph(piece))]
    lengths = [len(piece) for piece in pieces]
    kinds = np.repeat(4 * np.arange(len(pieces)), lengths) + kinds_of("".join(pieces))
    counts = np.bincount(kinds, minlength=4 * len(pieces)).reshape(-1, 4)
    kept = counts[:, LETTER] >= LEAST_LETTERS * (lengths - counts[:, SPACE])
    alphanumeric = counts[:, LETTER] + counts[:, DIGIT]
    if alphanumeric.sum() < LEAST_CHARS:
        return [], {"too short": sum(lengths)}
    if alphanumeric[kept].sum() < LEAST_CHARS:
        return [], {"few letters": sum(lengths)}
    sentences = [each for piece in compress(pieces, kept) for each in any_sentences(piece)]
    return sentences, {} if kept.all() else {"few letters": sum(compress(lengths, ~kept))}


def clean_paragraph(text: str) -> str:
    """A paragraph on one line, without characters that carry no meaning."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    return " ".join(_UNWANTED.sub("", text).split())


def any_sentences(text: str) -> Iterator[str]:
    """The sentences of a cleaned paragraph, none longer than SENTENCE_CHARS."""
    for part in _parts(text):
        for sentence in split_sentences(part):
            yield from _cut(sentence)


def kinds_of(text: str) -> NDArray[np.uint8]:
    """LETTER, DIGIT, SPACE or OTHER of each character, uint8 [n]; the text holds no surrogates."""
    kinds: NDArray[np.uint8] = kind_table()[np.frombuffer(text.encode("utf-32-le"), dtype="<u4")]
    return kinds


@cache
def kind_table() -> NDArray[np.uint8]:
    """The kind of every code point, uint8 [0x110000], made once per process in about 0.2 s."""
    table: NDArray[Any] = np.full(0x110000, OTHER, dtype=np.uint8)
    of_first = {"L": LETTER, "M": LETTER, "N": DIGIT, "Z": SPACE}
    for code in range(0x32000):  # all assigned characters lie below, except tags and private use
        table[code] = of_first.get(unicodedata.category(chr(code))[0], OTHER)
    table.setflags(write=False)
    return table


def _parts(text: str) -> Iterator[str]:
    """Yield the text, cut where `split_sentences` finds no end of a sentence."""
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
