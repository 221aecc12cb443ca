r"""A text file to documents of token ids.

UTF-8; lines end at \n only. A sentence file has one sentence a line and an empty line between
documents. A paragraph file (`split_sentences`) has an empty line between documents too; the other
lines of a document, however wrapped, are joined with a space and split by `sentences`.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlperf_bert.errors import DataError
from mlperf_bert.prepare.examples import Document
from mlperf_bert.prepare.sentences import split_sentences
from mlperf_bert.prepare.wordpiece import Tokenizer

LINES_AT_A_TIME = 8192


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


def tokenize_documents(text: str, tokenizer: Tokenizer, *, split: bool) -> list[Document]:
    """Documents with at least one word piece; see the module for the two text layouts."""
    lines = _sentence_lines(text) if split else (line.strip() for line in text.split("\n"))
    documents: list[Document] = [[]]
    for batch in _batches(lines):
        for line, ids in zip(batch, tokenizer.encode_lines(batch), strict=True):
            if not line:
                documents.append([])
            elif ids:
                documents[-1].append(ids)
    return [document for document in documents if document]


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


def _batches(lines: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for line in lines:
        batch.append(line)
        if len(batch) == LINES_AT_A_TIME:
            yield batch
            batch = []
    if batch:
        yield batch
