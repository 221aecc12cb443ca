"""The held-out text of a user's corpus: few documents, none that training text repeats.

A document's letters and digits, lower-case and without all else, are looked at in windows of
WINDOW characters, each as a 64-bit hash: about eight words of a language with spaces, and the same
measure for those without. The share of a held-out document that training text repeats is that of
its distinct windows that occur anywhere in it, in however many documents.

Memory: 8 bytes a character of the held-out text, and a bit of them for each part of the training
text that is compared at the same time.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.common.atomic import write_file
from mlperf_bert.prepare.clean_text import DIGIT, LETTER, codes_of, kind_table
from mlperf_bert.prepare.documents import digest_of
from mlperf_bert.prepare.own_parts import documents_of
from mlperf_bert.prepare.pool import finished_files

Hashes = NDArray[np.uint64]

WINDOW = 32
MOST_SHARE = 0.5  # of a held-out document that stays

_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64

# An evaluation should cost little: this gives about half a million tokens in two passes, and of
# the accuracy a standard error of 0.002.
EVAL_BYTES = 2**20
CANDIDATE_BYTES = 4 * EVAL_BYTES
HASHES = "held_out_windows.u64"


@dataclass(frozen=True, slots=True)
class HeldOutWindows:
    """All windows of the held-out documents.

    `hashes` are distinct and sorted; `of_document[i]` are the places of document i's in it.
    """

    hashes: Hashes
    of_document: list[NDArray[np.int64]]


def windows_of(text: str) -> Hashes:
    """The hash of each window of a text, uint64 [n], n = 0 where it is shorter."""
    codes = codes_of(text.casefold())
    kinds = kind_table()[codes]
    kept = codes[(kinds == LETTER) | (kinds == DIGIT)].astype(np.uint64)
    num_windows = len(kept) - WINDOW + 1
    if num_windows <= 0:
        return np.empty(0, dtype=np.uint64)
    # A polynomial of the window's characters, from the differences of running sums; all modulo
    # 2**64, as numpy's unsigned integers wrap around.
    powers, inverses = _powers(_BASE, len(kept)), _powers(pow(_BASE, -1, 2**64), num_windows)
    sums = np.zeros(len(kept) + 1, dtype=np.uint64)
    np.cumsum(kept * powers, out=sums[1:])
    return _mixed((sums[WINDOW:] - sums[:num_windows]) * inverses)


def held_out_windows(documents: list[str]) -> HeldOutWindows:
    """The windows of documents whose training text is not known yet."""
    found = [np.unique(windows_of(text)) for text in documents]
    hashes = np.unique(np.concatenate([np.empty(0, dtype=np.uint64), *found]))
    return HeldOutWindows(hashes, [np.searchsorted(hashes, each) for each in found])


def mark_seen(text: str, hashes: Hashes, seen: NDArray[np.bool_]) -> None:
    """Set `seen`, bool [len(hashes)], for those of the sorted `hashes` that the text has."""
    found = windows_of(text)
    if len(found) and len(hashes):
        places = np.minimum(np.searchsorted(hashes, found), len(hashes) - 1)
        seen[places[hashes[places] == found]] = True


def shares(windows: HeldOutWindows, seen: NDArray[np.bool_]) -> list[float]:
    """Of each document, the share of its windows that was seen; 0 where it has none."""
    return [float(seen[places].mean()) if len(places) else 0.0 for places in windows.of_document]


def _powers(base: int, count: int) -> Hashes:
    factors = np.full(count, base, dtype=np.uint64)
    factors[0] = 1
    powers: Hashes = np.cumprod(factors)
    return powers


def _mixed(hashes: Hashes) -> Hashes:
    """Every bit of each depends on all (the finaliser of splitmix64, Steele et al. 2014)."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = hashes ^ (hashes >> np.uint64(31))
    return mixed


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The documents to evaluate on, and what became of the others."""

    documents: list[str]
    near_duplicates: int
    not_needed: int


def choose_held_out(
    held_out: Sequence[Path], train: Sequence[Path], workers: int, *, quiet: bool
) -> HeldOut:
    """The documents of the parts `held_out` to evaluate on, by their digests; resumable.

    `train` are the parts with all other documents.
    """
    candidates, total = candidates_of(held_out)
    windows = held_out_windows(candidates)
    if train:
        hashes = windows.hashes.astype("<u8")
        write_file(train[0].with_name(HASHES), hashes.tobytes())
    seen = np.zeros(len(windows.hashes), dtype=bool)
    words = ("compared", "parts with held-out text")
    for _, found in finished_files(find_seen, train, workers, words, quiet=quiet):
        seen |= found
    repeated = np.array(shares(windows, seen)) > MOST_SHARE
    kept = [text for text, is_copy in zip(candidates, repeated, strict=True) if not is_copy]
    documents = _first_bytes(kept, EVAL_BYTES)
    near_duplicates = int(repeated.sum())
    not_needed = total - near_duplicates - len(documents)
    return HeldOut(documents, near_duplicates, not_needed)


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


def find_seen(path: Path) -> NDArray[np.bool_]:
    """Which held-out windows a part has, bool; kept beside it, behind a digest of both."""
    seen_path = path.with_suffix(".seen")
    hashes = np.fromfile(path.with_name(HASHES), dtype="<u8")
    made_of = hashlib.sha256(hashes.tobytes() + path.read_bytes()).digest()
    num_bytes = len(made_of) + (len(hashes) + 7) // 8
    if seen_path.exists() and seen_path.stat().st_size == num_bytes:
        before = seen_path.read_bytes()
        if before.startswith(made_of):
            packed = np.frombuffer(before[len(made_of) :], dtype=np.uint8)
            return np.unpackbits(packed, count=len(hashes)).astype(bool)
    seen = np.zeros(len(hashes), dtype=bool)
    for document in documents_of(path):
        mark_seen(document, hashes, seen)
    write_file(seen_path, made_of + np.packbits(seen).tobytes())
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
