r"""Read text files as documents of token ids: split sentences, clean and tokenize them.

Files are UTF-8, and lines end only at \n. Each line is a sentence, and an empty line separates
documents. `split_sentences` makes such lines of paragraphs.

A sentence ends at one or more of `.`, `!` and `?`, together with the closing quotes and brackets
after them. White space must follow, and then an upper-case letter, a digit, or an opening quote or
bracket. A full stop does not end a sentence after a known abbreviation (Mr., e.g., vs.) or after a
single letter (an initial such as `J. Smith`, or `U.S.`), unless that letter is `I`.
"""

import hashlib
import re
from array import array
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.errors import DataError
from mlperf_bert.vocabulary.any_vocabulary import Encoder

# Number of passes over held-out text, each with new segments and masks. One pass has too few masked
# tokens for a stable accuracy.
EVAL_DUPE_FACTOR = 2

_ABBREVIATION = re.compile(
    "mr|mrs|ms|dr|prof|st|sr|jr|gen|col|capt|lt|rev|hon|vol|fig|eq|sec|ch|pp|ed|eds|cf|vs"
    "|e\\.g|i\\.e|approx|dept|jan|feb|mar|apr|jun|jul|aug|sep|sept|oct|nov|dec",
    re.IGNORECASE,
)
# These may end a sentence too ("apples, pears, etc. The next ..."). So the sentence only continues
# if a digit follows, because a digit rarely starts a sentence ("no. 5", "et al. 2019").
_ABBREVIATION_OR_END = re.compile("etc|no|inc|ltd|co|corp|al", re.IGNORECASE)
_CANDIDATE = re.compile(r"""([.!?]+)(["'\u2019\u201d)\]]*)\s+(?=["'\u2018\u201c(\[]*[^\W_a-z])""")
_MOST_SENTENCES = 1000  # to encode at once, because an encoding needs 220 bytes per character
_LONGEST_WORD = 100  # characters to look at around a full stop, more than in any abbreviation
_LAST_WORD = re.compile(r"[^\s(\[\"'\u201c\u2018]+$")


def split_sentences(text: str) -> list[str]:
    """Split `text` into non-empty sentences, and replace each run of white space by one space."""
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
    """Return True if the sentence that begins at `start` ends at `match` of `_CANDIDATE`."""
    rest = text[match.end() : match.end() + _LONGEST_WORD]
    following = rest.lstrip("\"'\u2018\u201c([")[:1]
    if not (following.isupper() or following.isdigit()):
        return False
    if match.group(1) != ".":
        return True
    found = _LAST_WORD.search(text, max(start, match.start() - _LONGEST_WORD), match.start())
    word = found.group() if found else ""
    if _ABBREVIATION_OR_END.fullmatch(word):
        return not following.isdigit()
    if _ABBREVIATION.fullmatch(word):
        return False
    last_part = word.rpartition(".")[2]
    return not (len(last_part) == 1 and last_part.isalpha() and last_part != "I")


def digest_of(document: str) -> int:
    """Return the hash (0 .. 2**64 - 1) that decides whether a document is held out."""
    digest = hashlib.blake2b(document.encode(), digest_size=8, key=b"held out").digest()
    return int.from_bytes(digest, "big")


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """Token ids of D documents with N sentences and T tokens in total, stored end to end.

    No document is empty. A token needs 2 bytes, or twice as many if the vocabulary has more than
    65,536 words. A sentence and a document need 8 bytes each. With 20 tokens per sentence, the
    total is about 2.4 bytes per token.
    """

    tokens: NDArray[Any]  # uint16 or uint32 [T]
    sentence_offsets: NDArray[np.int64]  # [N + 1] into tokens
    document_offsets: NDArray[np.int64]  # [D + 1] into sentences

    def __len__(self) -> int:
        return len(self.document_offsets) - 1


@dataclass(frozen=True, slots=True)
class SourceText:
    """The contents of a text file, and the SHA-256 digest of its bytes."""

    text: str
    sha256: str


def read_text(path: Path) -> SourceText:
    """Read a whole text file. Raises DataError if the file is missing, empty or not UTF-8."""
    try:
        contents = path.read_bytes()
        text = contents.decode("utf-8")
    except OSError as error:
        problem = error.strerror or "cannot be read"
        raise DataError(str(path), problem, "use a text file that you can read") from None
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text at byte {error.start}"
        raise DataError(str(path), problem, "convert the file to UTF-8") from None
    if not text.strip():
        raise DataError(str(path), "is empty", "use a file that contains text")
    return SourceText(text, hashlib.sha256(contents).hexdigest())


def tokenize_documents(text: str, tokenizer: Encoder) -> Documents:
    """Split a text with one sentence per line into documents, and tokenize them.

    Documents without any token are dropped.
    """
    lines = (line.strip() for line in text.split("\n"))
    tokens = bytearray()
    sentence_offsets = array("q", [0])  # into `tokens`, in bytes
    document_offsets = array("q", [0])
    for is_text, group in groupby(lines, key=bool):
        while is_text and (sentences := list(islice(group, _MOST_SENTENCES))):
            for ids in tokenizer.encode(sentences):
                tokens += ids
                if ids:
                    sentence_offsets.append(len(tokens))
        if len(sentence_offsets) - 1 > document_offsets[-1]:  # Otherwise the document is empty.
            document_offsets.append(len(sentence_offsets) - 1)
    return Documents(
        tokens=np.frombuffer(tokens, dtype=tokenizer.dtype),
        sentence_offsets=np.array(sentence_offsets) // tokenizer.dtype.itemsize,
        document_offsets=np.array(document_offsets),
    )
