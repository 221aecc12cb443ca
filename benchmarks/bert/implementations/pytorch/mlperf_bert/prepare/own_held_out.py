"""The held-out text of a user's corpus: few documents, none that training text repeats."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.common.atomic import write_file
from mlperf_bert.common.file_progress import progress_of
from mlperf_bert.prepare.near_duplicates import (
    MOST_SHARE,
    held_out_windows,
    mark_seen,
    shares,
)
from mlperf_bert.prepare.own_parts import digest_of, documents_of
from mlperf_bert.prepare.pool import finished

# An evaluation should cost little: this gives about half a million tokens in two passes, and of
# the accuracy a standard error of 0.002.
EVAL_BYTES = 2**20
CANDIDATE_BYTES = 4 * EVAL_BYTES
HASHES = "held_out_windows.u64"


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """The documents to evaluate on, and what became of the others."""

    documents: list[str]
    near_duplicates: int
    not_needed: int


@dataclass(frozen=True, slots=True)
class SeenJob:
    """A part of the training text to compare with the held-out windows beside it."""

    path: Path

    @property
    def seen_path(self) -> Path:
        """Where the result is."""
        return self.path.with_suffix(".seen")


def choose_held_out(
    held_out: Sequence[Path], train: Sequence[Path], workers: int, *, died: str, quiet: bool
) -> HeldOut:
    """The documents to evaluate on, in the order of their digests; resumable.

    Args:
        held_out: parts with documents that are held out.
        train: parts with all the others.
        workers: processes.
        died: the problem to report when a worker dies.
        quiet: show no progress.
    """
    candidates, total = candidates_of(held_out)
    windows = held_out_windows(candidates)
    if train:
        hashes = windows.hashes.astype("<u8")
        write_file(train[0].with_name(HASHES), hashes.tobytes())
    seen = np.zeros(len(windows.hashes), dtype=bool)
    sizes = {path: path.stat().st_size for path in train}
    words = ("compared", "parts with held-out text")
    jobs = [SeenJob(path) for path in train]
    with progress_of(len(jobs), sum(sizes.values()), quiet=quiet, words=words) as advance:
        for job, found in finished(find_seen, jobs, workers, died=died):
            seen |= found
            advance(job.path.name, sizes[job.path])
    repeated = np.array(shares(windows, seen)) > MOST_SHARE
    kept = [text for text, is_copy in zip(candidates, repeated, strict=True) if not is_copy]
    documents = _first_bytes(kept, EVAL_BYTES)
    near_duplicates = int(repeated.sum())
    return HeldOut(
        documents=documents,
        near_duplicates=near_duplicates,
        not_needed=total - near_duplicates - len(documents),
    )


def candidates_of(held_out: Iterable[Path]) -> tuple[list[str], int]:
    """The documents of the lowest digests, about CANDIDATE_BYTES, and how many there are in all."""
    found: list[tuple[int, str]] = []
    total = num_bytes = 0
    for path in held_out:
        for document in documents_of(path):
            total += 1
            num_bytes += len(document)
            found.append((digest_of(document), document))
            if num_bytes > 2 * CANDIDATE_BYTES:
                found = _lowest(found)
                num_bytes = sum(len(text) for _, text in found)
    return [text for _, text in _lowest(found)], total


def find_seen(job: SeenJob) -> NDArray[np.bool_]:
    """Which held-out windows a part has, bool; kept beside it, behind a digest of both."""
    hashes = np.fromfile(job.path.with_name(HASHES), dtype="<u8")
    made_of = hashlib.sha256(hashes.tobytes() + job.path.read_bytes()).digest()
    num_bytes = len(made_of) + (len(hashes) + 7) // 8
    if job.seen_path.exists() and job.seen_path.stat().st_size == num_bytes:
        before = job.seen_path.read_bytes()
        if before.startswith(made_of):
            packed = np.frombuffer(before[len(made_of) :], dtype=np.uint8)
            return np.unpackbits(packed, count=len(hashes)).astype(bool)
    seen = np.zeros(len(hashes), dtype=bool)
    for document in documents_of(job.path):
        mark_seen(document, hashes, seen)
    write_file(job.seen_path, made_of + np.packbits(seen).tobytes())
    return seen


def _lowest(found: list[tuple[int, str]]) -> list[tuple[int, str]]:
    found = sorted(set(found))  # a document that is there twice has one digest
    return found[: len(_first_bytes([text for _, text in found], CANDIDATE_BYTES))]


def _first_bytes(documents: list[str], most: int) -> list[str]:
    """The first documents, until they have `most` characters together; one at least."""
    kept: list[str] = []
    num_chars = 0
    for document in documents:
        if kept and num_chars + len(document) > most:
            break
        kept.append(document)
        num_chars += len(document)
    return kept
