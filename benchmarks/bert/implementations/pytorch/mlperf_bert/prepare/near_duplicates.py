"""Held-out documents that training text repeats: what share of a document occurs there too.

A document's letters and digits, lower-case and without all else, are looked at in windows of
WINDOW characters, each as a 64-bit hash: about eight words of a language with spaces, and the same
measure for those without. The share of a held-out document is that of its distinct windows that
occur anywhere in the training text, in however many documents.

Memory: 8 bytes a character of the held-out text, and a bit of them for each part of the training
text that is compared at the same time.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.prepare.clean_text import DIGIT, LETTER, codes_of, kind_table

Hashes = NDArray[np.uint64]

WINDOW = 32
MOST_SHARE = 0.5  # of a held-out document that stays

_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64


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
