"""Writes cleaned text to files, the parts, and chooses those that the model is trained on."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from bert_tools.pretrain.cleaning import documents_of
from mlperf_bert.files import write_file
from mlperf_bert.prepare.documents import digest_of

MIN_DOCUMENTS = 2  # sections of each set, because the reference pairs one with another
# Making examples from a part of 16 MiB (512 tokens, ten passes) needs less than 1 GB of memory.
MAX_PART_BYTES = 16 * 2**20


class Part(NamedTuple):
    """A file of cleaned text. `documents` counts the documents that begin in it."""

    file: str
    documents: int
    sections: int
    num_bytes: int
    sha256: str


class PartWriter:
    """A writer of sections to files of about MAX_PART_BYTES bytes, with the name prefix `stem`."""

    def __init__(self, stem: Path) -> None:
        self._stem = stem
        self._parts: list[Part] = []
        self._sections: list[bytes] = []
        self._documents = self._num_bytes = 0

    def add(self, section: str, *, opens: bool) -> None:
        """Add a section, which is given as lines of one sentence each."""
        if self._num_bytes > MAX_PART_BYTES:
            self.finish()
        self._sections.append(section.encode())
        self._documents += opens
        self._num_bytes += len(self._sections[-1]) + 1

    def finish(self) -> list[Part]:
        """Write the remaining sections and return all parts that were written."""
        if self._sections:
            path = self._stem.with_name(f"{self._stem.name}-{len(self._parts):03d}.txt")
            contents = b"\n".join(self._sections)
            write_file(path, contents)
            counts = self._documents, len(self._sections), len(contents)
            self._parts.append(Part(path.name, *counts, hashlib.sha256(contents).hexdigest()))
            self._sections, self._documents, self._num_bytes = [], 0, 0
        return self._parts


def num_documents(parts: Iterable[Part]) -> int:
    """Return the number of documents that begin in the given parts."""
    return sum(part.documents for part in parts)


def without_copies(parts: Sequence[Part], parts_dir: Path) -> list[Part]:
    """Write the parts with repeated sections again, without the repetitions.

    Returns the parts to train on, which are the same for the same parts.
    """
    seen: set[int] = set()
    trained_on = []
    for part in parts:
        new: list[str] = []
        for section in documents_of(parts_dir / part.file):
            if (digest := digest_of(section)) not in seen:
                seen.add(digest)
                new.append(section)
        if len(new) < part.sections:
            contents = "\n".join(new).encode()
            name, sha256 = f"once-{part.file}", hashlib.sha256(contents).hexdigest()
            write_file(parts_dir / name, contents)
            part = Part(name, part.documents, len(new), len(contents), sha256)
        if new:
            trained_on.append(part)
    return trained_on


def training_texts(parts: Sequence[Part], parts_dir: Path) -> list[Path]:
    """Return the files of the training text.

    Parts with too few sections are joined into one more file.
    """
    large = [part for part in parts if part.sections >= MIN_DOCUMENTS]
    small = [part for part in parts if part.sections < MIN_DOCUMENTS]
    if small and len(small) < MIN_DOCUMENTS and large:
        small.append(large.pop())
    paths = [parts_dir / part.file for part in large]
    if small:
        path = parts_dir / "train-others.txt"
        write_file(path, b"\n".join((parts_dir / part.file).read_bytes() for part in small))
        paths.append(path)
    return paths
