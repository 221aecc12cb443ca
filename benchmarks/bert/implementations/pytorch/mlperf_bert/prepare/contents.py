"""Check and count the samples of a shard, with vectorized code.

The checks cover the structure, the ranges of values and the number of masked tokens. examples.py
generates samples by the same rules. The text of a sample is its tokens, in which the labels replace
the masked inputs.

In shapes, n is the number of samples of a chunk, and N is the total number of samples. T, P and V
are the numbers of tokens, of masked positions, and of words in the vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.config.sections import STORED_MASKING_RATE
from mlperf_bert.data.index import (
    Baseline,
    Manifest,
    ShardEntry,
    masked_count_table,
    special_ids,
)
from mlperf_bert.data.shards import Shard, ShardArrays
from mlperf_bert.errors import DataError

TOKENS_AT_A_TIME = 2**16  # fits the processor's cache; larger arrays were half as fast
MIN_LENGTH = 5  # [CLS] a [SEP] b [SEP]
MIN_LENGTH_SINGLE = 3  # [CLS] a [SEP]
MAX_UNKNOWN_SHARE = 0.5
# With this many samples, random labels are all 0 with a probability of 2**-32.
MIN_SAMPLES_OF_LABELS = 32

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts over some samples. Adding two tallies gives the counts over all their samples."""

    samples: int = 0
    tokens: int = 0
    masked: int = 0  # masked positions
    mask_inputs: int = 0  # masked positions whose input is [MASK]
    kept: int = 0  # masked positions whose input is the label
    unknown: int = 0  # [UNK] tokens of the text
    random_next: int = 0  # samples with next-sentence label 1

    def __add__(self, other: "Tally") -> "Tally":
        names = [field.name for field in fields(self)]
        return Tally(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Consecutive samples of a shard. Offsets count from the start of the chunk."""

    first: int  # number of the chunk's first sample
    tokens: NDArray[Any]  # [T]
    starts: NDArray[np.int64]  # [n], rows of tokens
    lengths: NDArray[np.int64]  # [n]
    starts_of_b: NDArray[np.int64]  # [n]
    next_labels: NDArray[np.uint8]  # [n]
    positions: NDArray[np.int64]  # [P]
    labels: NDArray[Any]  # [P]
    counts: NDArray[np.int64]  # [n]
    sample_of_masked: NDArray[np.int64]  # [P], numbered from the chunk's first sample

    @property
    def masked_rows(self) -> NDArray[np.int64]:
        """The indices of the masked tokens in `tokens`, int64 [P]."""
        return self.starts[self.sample_of_masked] + self.positions

    def text(self) -> NDArray[Any]:
        """Return the tokens [T] with the labels in place of the masked inputs."""
        text = self.tokens.copy()
        text[self.masked_rows] = self.labels
        return text

    def has_masked(self, is_wrong: Flags) -> Flags:
        """Return which samples have a masked position that `is_wrong` [P] marks, bool [n]."""
        owners = self.sample_of_masked[is_wrong]
        return np.bincount(owners, minlength=len(self.lengths)) > 0


def read_counts(
    set_dir: Path, entries: Sequence[ShardEntry]
) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Return the number of tokens and the number of masked positions per sample, uint16 [N].

    Raises DataError if a number is out of range.
    """
    shards = [Shard(set_dir / "shards" / entry.file) for entry in entries]
    lengths = [shard.lengths().astype(np.uint16) for shard in shards]
    masked_counts = [shard.masked_counts().astype(np.uint16) for shard in shards]
    return np.concatenate(lengths), np.concatenate(masked_counts)


def check_arrays(
    path: Path, arrays: ShardArrays, manifest: Manifest, remedy: str
) -> tuple[Tally, NDArray[np.int64]]:
    """Check all samples of a shard, and count their tokens.

    The caller must have checked the offset arrays. Returns the counts over all samples, and how
    often each token is the label of a [MASK] input, int64 [V]. The function needs a few megabytes
    of memory in addition to the mapped file. Raises DataError with `path` and `remedy` for the
    first invalid sample.
    """
    tally = Tally()
    label_counts = np.zeros(manifest.vocab_size, dtype=np.int64)
    table = masked_count_table(
        manifest.max_seq_length, manifest.max_predictions, STORED_MASKING_RATE
    ).astype(np.int64)
    for chunk in _chunks(arrays):
        for problem, is_wrong in _faults(chunk, manifest, table):
            if is_wrong.any():
                sample = chunk.first + int(np.argmax(is_wrong))
                raise DataError(str(path), f"{problem}: sample {sample}", remedy)
        inputs = chunk.tokens[chunk.masked_rows]
        is_mask = inputs == manifest.mask_id
        label_counts += np.bincount(chunk.labels[is_mask], minlength=manifest.vocab_size)
        tally += Tally(
            samples=len(chunk.lengths),
            tokens=len(chunk.tokens),
            masked=len(inputs),
            mask_inputs=int(np.count_nonzero(is_mask)),
            kept=int(np.count_nonzero(inputs == chunk.labels)),
            unknown=int(np.count_nonzero(chunk.text() == manifest.unk_id)),
            random_next=int(np.count_nonzero(chunk.next_labels)),
        )
    return tally, label_counts


def baseline_of(tally: Tally, label_counts: NDArray[np.int64]) -> Baseline:
    """Compute the context-free baseline (prepare/build.py) from the counts over all samples."""
    most_frequent = int(label_counts.max())
    return Baseline(
        context_free_accuracy=(tally.kept + most_frequent) / max(1, tally.masked),
        mask_only_accuracy=most_frequent / max(1, tally.mask_inputs),
        masked_tokens=tally.masked,
        mask_inputs=tally.mask_inputs,
    )


def check_labels(path: Path, tally: Tally, remedy: str) -> None:
    """Raise DataError if no sample of a shard of sentence pairs has next-sentence label 1.

    At least half of the samples should have this label, and more if documents are short. Shards
    with fewer than 32 samples are not checked.
    """
    if tally.samples >= MIN_SAMPLES_OF_LABELS and tally.random_next == 0:
        problem = f"is 0 in all {tally.samples:,} samples, but should be 1 in at least half of them"
        raise DataError(f"{path}: next_sentence_label", problem, remedy)


def check_unknown(path: Path, tally: Tally, remedy: str) -> None:
    """Raise DataError if more than half of the tokens are [UNK].

    This happens if the vocabulary is for another language.
    """
    if tally.unknown > MAX_UNKNOWN_SHARE * tally.tokens:
        problem = f"{100 * tally.unknown / tally.tokens:.1f}% of the tokens are [UNK]"
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


def _faults(
    chunk: _Chunk, manifest: Manifest, table: NDArray[np.int64]
) -> Iterator[tuple[str, Flags]]:
    """Yield each kind of fault with the samples of the chunk that have it, bool [n].

    The caller must stop at the first fault, because later checks use the checked values as indices.
    `table` has the required number of masked positions for each length.
    """
    lengths, starts_of_b, positions = chunk.lengths, chunk.starts_of_b, chunk.positions
    owner = chunk.sample_of_masked
    is_single = manifest.segments == "single"
    least = MIN_LENGTH_SINGLE if is_single else MIN_LENGTH
    yield f"has fewer than {least} tokens", lengths < least
    if is_single:
        yield "segment_b_start is not the length of the sample", starts_of_b != lengths
        yield "next_sentence_label is not 0", chunk.next_labels != 0
    else:
        is_empty = (starts_of_b < 3) | (starts_of_b > lengths - 2)
        yield "segment_b_start leaves a segment empty", is_empty
        yield "next_sentence_label is not 0 or 1", chunk.next_labels > 1
    problem = "does not have min(max_predictions, max(1, round(0.15 x tokens))) masked positions"
    yield problem, chunk.counts != table[lengths]
    is_outside = np.logical_or.reduceat(chunk.tokens >= manifest.vocab_size, chunk.starts)
    yield "has input_ids outside the vocabulary", is_outside
    is_outside = chunk.has_masked(chunk.labels >= manifest.vocab_size)
    yield "has masked_lm_ids outside the vocabulary", is_outside

    is_misplaced = (
        (positions < 1)  # [CLS]
        | (positions > lengths[owner] - 2)  # the last [SEP]
        | (positions == starts_of_b[owner] - 1)  # the other [SEP]
    )
    problem = "has masked_lm_positions on [CLS], on [SEP] or outside the sample"
    yield problem, chunk.has_masked(is_misplaced)
    falls = np.zeros(len(positions), dtype=np.bool_)
    falls[1:] = (positions[1:] <= positions[:-1]) & (owner[1:] == owner[:-1])
    yield "has masked_lm_positions that do not ascend", chunk.has_masked(falls)

    text, ends = chunk.text(), chunk.starts + lengths
    yield "does not start with [CLS]", text[chunk.starts] != manifest.cls_id
    before_b = chunk.starts + starts_of_b - 1
    yield "has no [SEP] before segment B", text[before_b] != manifest.sep_id
    yield "does not end with [SEP]", text[ends - 1] != manifest.sep_id
    is_special = np.isin(text, special_ids(manifest)).astype(np.int64)
    per_sample = np.add.reduceat(is_special, chunk.starts)
    problem = "has [CLS], [SEP], [PAD] or [MASK] in its text"
    yield problem, per_sample > (2 if is_single else 3)
