"""A user's text files to cleaned parts of one sentence per line, and to held-out text.

A job's input depends only on names and sizes of the files, never on the number of workers, so the
same files give the same parts. The digest of a document's text (of its first section, if it is cut)
decides if it is held out, so new documents move no others, and copies of a document stay on one
side. Evaluation keeps few held-out documents, and each text once.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlperf_bert.common.atomic import write_file
from mlperf_bert.common.records import (
    bare_name,
    check_version,
    parse,
    read_json,
    reading,
    write_json,
)
from mlperf_bert.prepare.documents import (
    REASONS,
    clean_document,
    digest_of,
)
from mlperf_bert.prepare.own_files import (
    DocumentRule,
    Piece,
    Section,
    TextFile,
    next_document,
    sections,
)

CLEANING_VERSION = 2  # version of the rules that turn text into parts
RECORD_VERSION = 1
REMEDY = "name a new directory or delete this one"
# Making examples of a part of 16 MiB (S 512, ten passes) takes less than 1 GB.
MOST_PART_BYTES = 16 * 2**20
LEAST_PART_BYTES = 2**18
WANTED_PARTS = 8  # parts of a small text, for as many workers
EXPANSION = 4  # of packed text, roughly

LARGEST_SHARE = 1 / 16
WANTED_HELD_OUT = 4  # of few documents, if no share is asked for

# An evaluation should cost little: this gives about half a million tokens in two passes, and a
# standard error of the accuracy of 0.002.
EVAL_BYTES = 2**20
HELD_OUT_BYTES = 4 * EVAL_BYTES  # the most that is held out, unless a share is asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The rules that decide the parts, besides the files: see own_files and documents."""

    documents: DocumentRule
    text_field: str
    held_out_share: float
    join_chars: int = 0

    def sections(self, piece: Piece) -> Iterator[Section]:
        """The sections of a piece under these rules."""
        return sections(piece, self.documents, self.text_field, self.join_chars)


@dataclass(frozen=True, slots=True)
class CleanJob:
    """A job: clean pieces of files into the parts with number `number`."""

    number: int
    pieces: tuple[Piece, ...]
    text_dir: Path
    rules: Rules
    fingerprint: str

    @property
    def record_path(self) -> Path:
        """The file that records the finished job."""
        return self.text_dir / f"job-{self.number:05d}.json"


@dataclass(frozen=True, slots=True)
class Part:
    """A file of cleaned text below the text directory."""

    file: str
    documents: int
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Lowest:
    """A document that a share may hold out: its digest, sections, and bytes with line ends."""

    place: int
    documents: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Text left out for one reason: whole documents, and characters including those of pieces."""

    documents: int = 0
    num_chars: int = 0
    file: str = ""  # the first file with such text

    def __add__(self, other: "LeftOut") -> "LeftOut":
        documents, num_chars = self.documents + other.documents, self.num_chars + other.num_chars
        return LeftOut(documents, num_chars, self.file or other.file)


@dataclass(frozen=True, slots=True)
class Cleaned:
    """The result of one job or of all jobs; `num_chars` are kept.

    `lowest` has the held-out documents, and the next few documents of each job.
    """

    train: tuple[Part, ...]
    held_out: tuple[Part, ...]
    num_chars: int
    left_out: dict[str, LeftOut]  # by reason
    lowest: tuple[Lowest, ...] = ()


def text_bytes(files: Sequence[TextFile]) -> int:
    """Bytes of all text; an estimate if it is packed."""
    return sum(file.size_bytes * (1 if file.packing == "plain" else EXPANSION) for file in files)


def default_share(files: Sequence[TextFile]) -> float:
    """The default share, a power of two: as text is added it stays, or halves and keeps half."""
    share = LARGEST_SHARE
    while share * text_bytes(files) > HELD_OUT_BYTES:
        share /= 2
    return share


def fingerprint(files: Sequence[TextFile], digests: Sequence[str], rules: Rules) -> str:
    """A digest of all that decides the parts: file contents (`digests`, in order) and rules."""
    pairs = zip(files, digests, strict=True)
    return _fingerprint([(file.form, file.packing, digest) for file, digest in pairs], rules)


def plan_jobs(
    files: Sequence[TextFile], digests: Sequence[str], text_dir: Path, rules: Rules
) -> list[CleanJob]:
    """Plan the jobs: small files together, large plain files cut between documents."""
    wanted = min(MOST_PART_BYTES, max(LEAST_PART_BYTES, text_bytes(files) // WANTED_PARTS))
    digest_by_path = {file.path: digest for file, digest in zip(files, digests, strict=True)}
    grouped: list[list[Piece]] = []
    in_group = 0
    for file in files:
        for piece, num_bytes in _pieces(file, rules, wanted):
            if not grouped or in_group + num_bytes > wanted:
                grouped.append([])
                in_group = 0
            grouped[-1].append(piece)
            in_group += num_bytes
    jobs = []
    for number, pieces in enumerate(grouped):
        # From its own pieces only: a change of another file does not repeat this job.
        made_of = [
            (piece.form, piece.packing, piece.start, piece.stop, digest_by_path[piece.path])
            for piece in pieces
        ]
        digest = _fingerprint(made_of, rules)
        jobs.append(CleanJob(number, tuple(pieces), text_dir, rules, digest))
    return jobs


def clean(job: CleanJob) -> Cleaned:
    """Do a job, or read its earlier result for the same text.

    Raises DataError for what cannot be read.
    """
    before = _read(job) if os.path.lexists(job.record_path) else None
    if before is not None:
        return before
    if os.path.lexists(job.record_path):  # the parts are about to change
        job.record_path.unlink()
        for stale in job.text_dir.glob(f"*-{job.number:05d}-*"):
            stale.unlink()
    train = _PartWriter(job.text_dir, f"train-{job.number:05d}")
    held_out = _PartWriter(job.text_dir, f"held_out-{job.number:05d}")
    left_out: dict[str, LeftOut] = {}
    to, opens, num_chars = train, True, 0
    sizes: list[list[int]] = []  # of each document: its place, sections and bytes
    rules = job.rules
    found = ((piece.path.name, each) for piece in job.pieces for each in rules.sections(piece))
    for file, section in found:
        # Also if the opening section was left out; joined text is cut as it comes.
        opens = opens or section.opens or rules.join_chars > 0
        sentences, lost = clean_document(section.paragraphs)
        for reason, count in lost.items():
            lost_here = LeftOut(int(not sentences), count, file)
            left_out[reason] = left_out.get(reason, LeftOut()) + lost_here
        if not sentences:
            continue
        text = "".join(sentence + "\n" for sentence in sentences)
        num_chars += len(text)
        if opens:
            sizes.append([digest_of(text), 0, 0])
            to = held_out if sizes[-1][0] < rules.held_out_share * 2**64 else train
        sizes[-1][1] += 1
        sizes[-1][2] += len(text.encode()) + 1
        to.add(text)
        opens = False
    sizes.sort()
    others = (n for n, each in enumerate(sizes) if each[0] >= rules.held_out_share * 2**64)
    few = sizes[: next(others, len(sizes)) + WANTED_HELD_OUT]
    lowest = tuple(Lowest(*each) for each in few)
    made = Cleaned(train.finish(), held_out.finish(), num_chars, left_out, lowest)
    values = {"format_version": RECORD_VERSION, "fingerprint": job.fingerprint, **asdict(made)}
    write_file(job.record_path, write_json(values))
    return made


def documents_of(path: Path) -> Iterator[str]:
    """Yield the documents of a part, with the line ends of their sentences."""
    lines: list[str] = []
    with path.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            if line != "\n":
                lines.append(line)
            elif lines:
                yield "".join(lines)
                lines = []
    if lines:
        yield "".join(lines)


def _pieces(file: TextFile, rules: Rules, wanted: int) -> Iterator[tuple[Piece, int]]:
    if file.packing != "plain":
        yield Piece(file.path, file.form, file.packing, 0, None), file.size_bytes * EXPANSION
        return
    starts = [0]
    if rules.documents != "file" or file.form != "text":
        for position in range(wanted, file.size_bytes, wanted):
            if position > starts[-1]:
                start = next_document(file.path, file.form, rules.documents, position)
                if start is None:
                    break
                starts.append(start)
    for start, stop in zip(starts, [*starts[1:], None], strict=True):
        num_bytes = (file.size_bytes if stop is None else stop) - start
        yield Piece(file.path, file.form, "plain", start, stop), num_bytes


class _PartWriter:
    """Writes documents to files of about MOST_PART_BYTES."""

    def __init__(self, directory: Path, stem: str) -> None:
        self._path = directory / stem
        self._contents = bytearray()
        self._documents = 0
        self._parts: list[Part] = []

    def add(self, document: str) -> None:
        """Add a document's sentences."""
        if len(self._contents) >= MOST_PART_BYTES:
            self._flush()
        if self._contents:
            self._contents += b"\n"
        self._contents += document.encode()
        self._documents += 1

    def finish(self) -> tuple[Part, ...]:
        """Write the remaining text; return all parts."""
        if self._contents:
            self._flush()
        return tuple(self._parts)

    def _flush(self) -> None:
        path = self._path.with_name(f"{self._path.name}-{len(self._parts):03d}.txt")
        contents = bytes(self._contents)
        write_file(path, contents)
        digest = hashlib.sha256(contents).hexdigest()
        self._parts.append(Part(path.name, self._documents, len(contents), digest))
        self._contents, self._documents = bytearray(), 0


def _fingerprint(made_of: Sequence[tuple[object, ...]], rules: Rules) -> str:
    values = {"version": CLEANING_VERSION, "rules": asdict(rules), "text": made_of}
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _read(job: CleanJob) -> Cleaned | None:
    """The recorded result; None if it is for other text or rules."""
    values = read_json(job.record_path, missing="is missing", remedy=REMEDY)
    with reading(job.record_path, REMEDY):
        check_version(values, RECORD_VERSION)
        if values["fingerprint"] != job.fingerprint or "lowest" not in values:
            return None
        left_out = values["left_out"]
        return Cleaned(
            _parts(values["train"]),
            _parts(values["held_out"]),
            values["num_chars"],
            {name: parse(LeftOut, left_out[name]) for name in REASONS if name in left_out},
            tuple(parse(Lowest, each) for each in values["lowest"]),
        )


def _parts(entries: Sequence[Mapping[str, Any]]) -> tuple[Part, ...]:
    for entry in entries:
        bare_name(entry["file"])
    return tuple(parse(Part, entry) for entry in entries)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The documents to evaluate on, and the count of the others."""

    documents: list[str]
    not_needed: LeftOut


def choose_held_out(held_out: Iterable[Path]) -> HeldOut:
    """The documents of these parts with the lowest digests, each once, about EVAL_BYTES."""
    found: list[tuple[int, str]] = []
    total, num_bytes = LeftOut(), 0
    for path in held_out:
        for document in documents_of(path):
            total += LeftOut(1, len(document))
            num_bytes += len(document)
            found.append((digest_of(document), document))
            if num_bytes > 2 * EVAL_BYTES:
                found = _lowest(found)
                num_bytes = sum(len(text) for _, text in found)
    documents = [text for _, text in _lowest(found)]
    num_chars = sum(map(len, documents))
    not_needed = LeftOut(total.documents - len(documents), total.num_chars - num_chars)
    return HeldOut(documents, not_needed)


def _lowest(found: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """The lowest digests with EVAL_BYTES characters in all; at least one."""
    kept: list[tuple[int, str]] = []
    num_chars = 0
    for digest, document in sorted(set(found)):  # copies of a document have one digest
        if kept and num_chars + len(document) > EVAL_BYTES:
            break
        kept.append((digest, document))
        num_chars += len(document)
    return kept
