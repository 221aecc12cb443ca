"""Vectorised checks of one shard's arrays: structure, ranges, masked counts, tallies.

Shape letters: n samples of one chunk, T their tokens, P their masked positions, V vocabulary.
The rules are those of examples.py; a sample's text is its tokens with the labels put back.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.config.sections import STORED_MASKING_RATE
from mlperf_bert.data.index import Baseline, Manifest, masked_count_table
from mlperf_bert.data.shards import ShardArrays
from mlperf_bert.errors import DataError

TOKENS_AT_A_TIME = 2**16  # fits the processor's cache: larger arrays were half as fast
MIN_LENGTH = 5  # [CLS] a [SEP] b [SEP]
MIN_LENGTH_SINGLE = 3  # [CLS] a [SEP]
MAX_UNKNOWN_SHARE = 0.5
# Of samples with random labels: that all of them are 0 has a probability of 2**-32.
MIN_SAMPLES_OF_LABELS = 32

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts over some samples; two tallies add up."""

    samples: int = 0
    tokens: int = 0
    masked: int = 0  # masked positions
    mask_inputs: int = 0  # of them, input is [MASK]
    kept: int = 0  # of them, input is the label
    unknown: int = 0  # [UNK] in the text
    random_next: int = 0  # samples with label 1

    def __add__(self, other: "Tally") -> "Tally":
        names = [field.name for field in fields(self)]
        return Tally(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, slots=True)
class ShardContents:
    """Findings from the arrays of one shard; `faults` is empty if all is right."""

    faults: tuple[str, ...]
    tally: Tally
    label_counts: NDArray[np.int64]  # [V], labels where the input is [MASK]


@dataclass(frozen=True, slots=True)
class _Chunk:
    first: int  # number of its first sample
    tokens: NDArray[Any]  # [T]
    starts: NDArray[np.int64]  # [n], rows of tokens
    lengths: NDArray[np.int64]  # [n]
    starts_of_b: NDArray[np.int64]  # [n]
    next_labels: NDArray[np.uint8]  # [n]
    positions: NDArray[np.int64]  # [P]
    labels: NDArray[Any]  # [P]
    counts: NDArray[np.int64]  # [n]
    sample_of_masked: NDArray[np.int64]  # [P], number within the chunk


class _Faults:
    """The first sample and the number of samples of each kind of fault."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, int]] = {}

    def add(self, kind: str, chunk: _Chunk, samples: NDArray[np.int64]) -> bool:
        """Note samples of the chunk by number; True if there are any."""
        if len(samples):
            first, count = self._found.get(kind, (chunk.first + int(samples[0]), 0))
            self._found[kind] = (first, count + len(samples))
        return len(samples) > 0

    def in_words(self) -> tuple[str, ...]:
        return tuple(
            f"{kind}: sample {first}" + (f" and {count - 1:,} more" if count > 1 else "")
            for kind, (first, count) in self._found.items()
        )


def check_arrays(arrays: ShardArrays, manifest: Manifest) -> ShardContents:
    """Check all samples of a shard whose offset tables already ascend within their limits.

    Memory beside the mapped file: a few megabytes.
    """
    checker = _Checker(manifest)
    for chunk in _chunks(arrays):
        checker.check(chunk)
    return ShardContents(
        faults=checker.faults.in_words(),
        tally=checker.tally,
        label_counts=checker.label_counts,
    )


def baseline_of(tally: Tally, label_counts: NDArray[np.int64]) -> Baseline:
    """The context-free baseline of samples with these counts; see prepare/build.py."""
    most_frequent = int(label_counts.max())
    return Baseline(
        context_free_accuracy=(tally.kept + most_frequent) / max(1, tally.masked),
        mask_only_accuracy=most_frequent / max(1, tally.mask_inputs),
        masked_tokens=tally.masked,
        mask_inputs=tally.mask_inputs,
    )


def check_labels(path: Path, tally: Tally, remedy: str) -> None:
    """Raise DataError if no sample of a shard of sentence pairs has next-sentence label 1.

    Half of the samples should have it or, with short documents, more.
    """
    if tally.samples >= MIN_SAMPLES_OF_LABELS and tally.random_next == 0:
        problem = f"is 0 in all {tally.samples:,} samples, half of them or more should be 1"
        raise DataError(f"{path}: next_sentence_label", problem, remedy)


def check_unknown(path: Path, tally: Tally, remedy: str) -> None:
    """Raise DataError if more than half of the text is [UNK]: another language or vocabulary."""
    if tally.unknown > MAX_UNKNOWN_SHARE * tally.tokens:
        problem = f"{100 * tally.unknown / tally.tokens:.1f} % of the tokens are [UNK]"
        raise DataError(str(path), problem, remedy)


def _chunks(arrays: ShardArrays) -> Iterator[_Chunk]:
    offsets, masked_offsets = arrays.offsets, arrays.masked_lm_offsets
    last = len(offsets) - 1
    first = 0
    while first < last:
        limit = offsets[first] + TOKENS_AT_A_TIME
        end = max(first + 1, int(np.searchsorted(offsets, limit, side="right")) - 1)
        rows = slice(offsets[first], offsets[end])
        masked = slice(masked_offsets[first], masked_offsets[end])
        counts = np.diff(masked_offsets[first : end + 1])
        yield _Chunk(
            first=first,
            tokens=arrays.input_ids[rows],
            starts=offsets[first:end] - offsets[first],
            lengths=np.diff(offsets[first : end + 1]),
            starts_of_b=arrays.segment_b_start[first:end].astype(np.int64),
            next_labels=arrays.next_sentence_label[first:end],
            positions=arrays.masked_lm_positions[masked].astype(np.int64),
            labels=arrays.masked_lm_ids[masked],
            counts=counts,
            sample_of_masked=np.repeat(np.arange(end - first), counts),
        )
        first = end


class _Checker:
    """Checks one chunk at a time, with tables that all chunks share."""

    def __init__(self, manifest: Manifest) -> None:
        self.faults = _Faults()
        self.tally = Tally()
        self.label_counts = np.zeros(manifest.vocab_size, dtype=np.int64)
        self._manifest = manifest
        longest = manifest.max_seq_length
        is_single = manifest.segments == "single"
        self._min_length = MIN_LENGTH_SINGLE if is_single else MIN_LENGTH
        self._special = 2 if is_single else 3  # special tokens of a sample
        self._masked_counts = masked_count_table(
            longest, manifest.max_predictions, STORED_MASKING_RATE
        ).astype(np.int64)

    def check(self, chunk: _Chunk) -> None:
        """Note faults and tallies."""
        # Only numbers within their ranges can be used as indices.
        if self._has_wrong_ranges(chunk) or self._has_wrong_positions(chunk):
            return
        rows = chunk.starts[chunk.sample_of_masked] + chunk.positions
        text = chunk.tokens.copy()
        text[rows] = chunk.labels
        if self._has_wrong_structure(chunk, text):
            return
        self._count(chunk, text, chunk.tokens[rows])

    def _has_wrong_ranges(self, chunk: _Chunk) -> bool:
        vocab_size = self._manifest.vocab_size
        faults = {
            f"has fewer than {self._min_length} tokens": chunk.lengths < self._min_length,
            **self._wrong_pairs(chunk),
            "has not min(max_predictions, max(1, round(0.15 x tokens))) masked positions": (
                chunk.counts != self._masked_counts[chunk.lengths]
            ),
        }
        found = [self.faults.add(kind, chunk, np.flatnonzero(bad)) for kind, bad in faults.items()]
        if chunk.tokens.max() >= vocab_size:
            kind = "input_ids is not within the vocabulary"
            found.append(self.faults.add(kind, chunk, _owners(chunk, chunk.tokens >= vocab_size)))
        if chunk.labels.max() >= vocab_size:
            kind = "masked_lm_ids is not within the vocabulary"
            bad = np.unique(chunk.sample_of_masked[chunk.labels >= vocab_size])
            found.append(self.faults.add(kind, chunk, bad))
        return any(found)

    def _wrong_pairs(self, chunk: _Chunk) -> dict[str, Flags]:
        if self._manifest.segments == "single":
            return {
                "segment_b_start is not its end": chunk.starts_of_b != chunk.lengths,
                "next_sentence_label is not 0": chunk.next_labels != 0,
            }
        return {
            "segment_b_start leaves a segment empty": (chunk.starts_of_b < 3)
            | (chunk.starts_of_b > chunk.lengths - 2),
            "next_sentence_label is not 0 or 1": chunk.next_labels > 1,
        }

    def _has_wrong_positions(self, chunk: _Chunk) -> bool:
        owner, positions = chunk.sample_of_masked, chunk.positions
        bad = (
            (positions < 1)  # [CLS]
            | (positions > chunk.lengths[owner] - 2)  # the last [SEP]
            | (positions == chunk.starts_of_b[owner] - 1)  # the other [SEP]
        )
        kind = "masked_lm_positions is on [CLS], on [SEP] or outside the sample"
        is_outside = self.faults.add(kind, chunk, np.unique(owner[bad]))
        falls = (positions[1:] <= positions[:-1]) & (owner[1:] == owner[:-1])
        kind = "masked_lm_positions does not ascend"
        return self.faults.add(kind, chunk, np.unique(owner[1:][falls])) or is_outside

    def _has_wrong_structure(self, chunk: _Chunk, text: NDArray[Any]) -> bool:
        ids = self._manifest
        ends = chunk.starts + chunk.lengths
        places = {
            "does not begin with [CLS]": (chunk.starts, ids.cls_id),
            "has no [SEP] before segment B": (chunk.starts + chunk.starts_of_b - 1, ids.sep_id),
            "does not end with [SEP]": (ends - 1, ids.sep_id),
        }
        found = [
            self.faults.add(kind, chunk, np.flatnonzero(text[rows] != token))
            for kind, (rows, token) in places.items()
        ]
        special = (ids.cls_id, ids.sep_id, ids.pad_id, ids.mask_id)
        total = sum(np.count_nonzero(text == token) for token in set(special))
        if any(found) or total != self._special * len(ends):
            per_sample = np.add.reduceat(np.isin(text, special).astype(np.int64), chunk.starts)
            kind = "has [CLS], [SEP], [PAD] or [MASK] inside its text"
            found.append(self.faults.add(kind, chunk, np.flatnonzero(per_sample > self._special)))
        return any(found)

    def _count(self, chunk: _Chunk, text: NDArray[Any], inputs: NDArray[Any]) -> None:
        is_mask = inputs == self._manifest.mask_id
        self.label_counts += np.bincount(chunk.labels[is_mask], minlength=len(self.label_counts))
        self.tally += Tally(
            samples=len(chunk.lengths),
            tokens=len(text),
            masked=len(inputs),
            mask_inputs=int(np.count_nonzero(is_mask)),
            kept=int(np.count_nonzero(inputs == chunk.labels)),
            unknown=int(np.count_nonzero(text == self._manifest.unk_id)),
            random_next=int(np.count_nonzero(chunk.next_labels)),
        )


def _owners(chunk: _Chunk, bad_tokens: Flags) -> NDArray[np.int64]:
    rows = np.flatnonzero(bad_tokens)
    return np.unique(np.searchsorted(chunk.starts, rows, side="right") - 1)
