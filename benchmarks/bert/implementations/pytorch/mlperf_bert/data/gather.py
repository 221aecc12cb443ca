"""Sample ids to a batch on the host, in one pass over the mapped shards by compiled code.

Equal to `make_batch(reader.read(ids), ids)` (data/batch.py, data/shards.py), the readable
reference, errors included; without the GIL.

Shape letters: n samples asked for, T tokens of all of them, P masked positions of all of them.
"""

import resource
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from mlperf_bert.compiled import compiled, usable_cache
from mlperf_bert.data.balance import StepPlan
from mlperf_bert.data.batch import UnpaddedBatch, empty_batch
from mlperf_bert.data.shards import IntArray, SampleReader, ShardArrays, span_error

# Arrays by sample, and how many elements of each one sample needs.
_TABLES = {"offsets": 2, "masked_lm_offsets": 2, "segment_b_start": 1, "next_sentence_label": 1}
ADVISED_STEPS = 2  # first a step's tables of offsets, one step later the data they point to
STEPS_AFTER_A_FAULT = 64

# One row a shard: the address of each of its arrays, and their bounds.
_SIZES = ("num_samples", "num_tokens", "num_masked", "input_id_bytes", "masked_id_bytes")
SHARD_ROW = np.dtype(
    [*((name, np.uint64) for name in ShardArrays.__slots__), *((name, np.int64) for name in _SIZES)]
)
SPANS_ARE_GOOD = -1

# Names of the values that `fill` can find out of range: bit i stands for name i.
CHECKED = (
    *("input_ids", "masked_lm_ids", "segment_b_start"),
    *("masked_lm_positions", "next_sentence_label"),
)
# The arrays of a batch that `fill` writes, in the order of its arguments.
_FILLED = (
    *("input_ids", "position_ids", "token_type_ids", "cu_seqlens", "masked_token_index"),
    *("labels", "next_sentence_label"),
)


class Gatherer:
    """A maker of batches from the samples of one prepared set.

    Construction compiles the code on synthetic arrays, or loads it from numba's cache: no sample is
    read. Raises ConfigError when the cache is damaged or cannot be written.
    """

    def __init__(self, reader: SampleReader, *, pin_memory: bool = False) -> None:
        """Make batches from `reader`; `pin_memory` puts them into page-locked memory (CUDA)."""
        self.reader = reader
        self._pin_memory = pin_memory
        self._table = np.zeros(len(reader.shards), SHARD_ROW)
        _compile()

    def batch(
        self, ids: IntArray, *, mlm_denominator: float, nsp_denominator: float
    ) -> UnpaddedBatch:
        """The samples of `ids`, int64 [n], laid end to end in that order, on the host.

        The denominators are the batch's. Raises DataError like `SampleReader.read`.
        """
        numbers, rows = self.reader.locate(ids)
        spans = self.spans(numbers, rows)
        lengths, masked_counts = (spans[:, 1::2] - spans[:, ::2]).T
        batch = empty_batch(
            tuple(lengths.tolist()), tuple(masked_counts.tolist()), pin_memory=self._pin_memory
        )
        batch.sample_ids.numpy()[:] = ids
        batch.mlm_denominator.fill_(mlm_denominator)
        batch.nsp_denominator.fill_(nsp_denominator)
        manifest = self.reader.manifest
        has_pairs = manifest.segments == "pair"
        wrong = _fill(batch, self._table, numbers, rows, spans, manifest.vocab_size, has_pairs)
        if wrong:
            first = (wrong & -wrong).bit_length() - 1
            raise self.reader.range_error(ids, CHECKED[first])
        return batch

    def spans(self, numbers: IntArray, rows: IntArray) -> IntArray:
        """Start and end of each sample's tokens and of its masked positions, int64 [n, 4].

        Both count within its shard; `numbers` are the shards and `rows` the rows there, int64 [n].
        Shards not yet mapped are mapped. Raises DataError like `SampleReader.read`.
        """
        for number in np.unique(numbers[self._table["num_samples"][numbers] == 0]).tolist():
            _fill_row(self._table[number], self.reader.shards[number].arrays())
        manifest = self.reader.manifest
        spans = np.empty((len(rows), 4), dtype=np.int64)
        limits = manifest.max_seq_length, manifest.max_predictions
        code = measure(self._table, numbers, rows, *limits, spans)
        if code != SPANS_ARE_GOOD:
            sample, which = divmod(code, 2)
            start, end = spans[sample, 2 * which : 2 * which + 2].tolist()
            raise span_error(self.reader.shards[numbers[sample]], int(rows[sample]), start, end)
        return spans


def _fill_row(row: np.void, arrays: ShardArrays) -> None:
    """Describe the mapped arrays of a shard, which keeps them mapped for its lifetime."""
    for name in ShardArrays.__slots__:
        row[name] = getattr(arrays, name).ctypes.data
    row["num_tokens"] = len(arrays.input_ids)
    row["num_masked"] = len(arrays.masked_lm_ids)
    row["input_id_bytes"] = arrays.input_ids.itemsize
    row["masked_id_bytes"] = arrays.masked_lm_ids.itemsize
    row["num_samples"] = len(arrays.next_sentence_label)


def _fill(batch: UnpaddedBatch, *about: Any) -> int:
    """`fill` for a batch; `about` holds all arguments before its arrays."""
    return int(fill(*about, *(getattr(batch, name).numpy() for name in _FILLED)))


def _compile() -> None:
    table, nothing = np.zeros(1, SHARD_ROW), np.zeros(0, dtype=np.int64)
    spans = np.zeros((0, 4), dtype=np.int64)
    with usable_cache(fill):
        measure(table, nothing, nothing, 1, 1, spans)
        _fill(empty_batch((), ()), table, nothing, nothing, spans, 1, True)


class ReadAhead:
    """Advice to the kernel to read the pages of one rank's coming samples, step after step.

    A sample lies in seven arrays, so reading 16 one after the other from a file not yet in memory
    means about 100 waits for the disk. With advice from the loader's thread, the disk works on many
    at once while earlier steps train.

    Advice for warm files would cost more than gathering from them: seven system calls a sample. So
    it is given only for the first STEPS_AFTER_A_FAULT steps and for as many after every step in
    which this thread had to wait for the disk (a major page fault). At the first reading of a file
    about one step in 65 goes unadvised. If the operating system does not count a thread's faults,
    only the first steps are advised.
    """

    def __init__(self, gatherer: Gatherer, rank: int) -> None:
        self._gatherer = gatherer
        self._shards = gatherer.reader.shards
        self._rank = rank
        self._faults = 0
        self._steps_left = STEPS_AFTER_A_FAULT
        self._last_step = 0  # steps whose tables were advised

    def advise(self, coming: Sequence[StepPlan]) -> None:
        """Advise for the steps that are read next, in their order; at least one.

        Raises DataError if a shard cannot be mapped or its offsets are damaged.
        """
        faults = _major_faults()
        if faults > self._faults:
            self._faults, self._steps_left = faults, STEPS_AFTER_A_FAULT
        if self._steps_left:
            self._steps_left -= 1
            for plan in coming:
                if plan.step > self._last_step:
                    self._advise_tables(plan)
                    self._last_step = plan.step
            self._advise_samples(coming[0])

    def _advise_tables(self, plan: StepPlan) -> None:
        numbers, rows = self._locate(plan)
        for number, row in zip(numbers.tolist(), rows.tolist(), strict=True):
            for name, elements in _TABLES.items():
                self._shards[number].will_need(name, row, row + elements)

    def _advise_samples(self, plan: StepPlan) -> None:
        numbers, rows = self._locate(plan)
        spans = self._gatherer.spans(numbers, rows)
        for number, span in zip(numbers.tolist(), spans.tolist(), strict=True):
            self._shards[number].will_need("input_ids", *span[:2])
            for name in ("masked_lm_positions", "masked_lm_ids"):
                self._shards[number].will_need(name, *span[2:])

    def _locate(self, plan: StepPlan) -> tuple[IntArray, IntArray]:
        """Shard and row of this rank's samples, both int64 [n]."""
        ids = np.concatenate([ids for ids, _ in plan.forwards_of(self._rank)])
        return self._gatherer.reader.locate(ids)


def _major_faults() -> int:
    """Number of times this thread waited for a page from disk; 0 if that is not counted."""
    who = getattr(resource, "RUSAGE_THREAD", None)
    return 0 if who is None else resource.getrusage(who).ru_majflt


def _as_pointer(_typing: Any, address: Any) -> Any:
    """An address as a pointer for `carray`."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


_pointer: Any = intrinsic(_as_pointer)


@compiled
def measure(
    table: NDArray[Any],
    numbers: NDArray[np.int64],
    rows: NDArray[np.int64],
    max_length: int,
    max_masked: int,
    spans: NDArray[np.int64],
) -> int:
    """Write `spans`, as returned by `Gatherer.spans`; `table` is SHARD_ROW [shards].

    Returns SPANS_ARE_GOOD, or 2 i (tokens) or 2 i + 1 (masked positions) if those of sample i are
    empty, too long or outside the shard; `spans` then holds the shard's values.
    """
    for i in range(len(rows)):
        shard, row = table[numbers[i]], rows[i]
        ends = shard.num_samples + 1
        offsets = carray(_pointer(shard.offsets), (ends,), np.int64)
        masked_offsets = carray(_pointer(shard.masked_lm_offsets), (ends,), np.int64)
        spans[i, 0], spans[i, 1] = offsets[row], offsets[row + 1]
        spans[i, 2], spans[i, 3] = masked_offsets[row], masked_offsets[row + 1]
        if not _is_good(spans[i, 0], spans[i, 1], shard.num_tokens, max_length):
            return 2 * i
        if not _is_good(spans[i, 2], spans[i, 3], shard.num_masked, max_masked):
            return 2 * i + 1
    return SPANS_ARE_GOOD


@compiled
def _is_good(start: int, end: int, total: int, limit: int) -> bool:
    return 0 <= start < end <= total and end - start <= limit


@compiled
def fill(
    table: NDArray[Any],
    numbers: NDArray[np.int64],
    rows: NDArray[np.int64],
    spans: NDArray[np.int64],
    vocab_size: int,
    has_pairs: bool,
    input_ids: NDArray[np.int64],
    position_ids: NDArray[np.int64],
    token_type_ids: NDArray[np.int64],
    cu_seqlens: NDArray[np.int32],
    masked_token_index: NDArray[np.int64],
    labels: NDArray[np.int64],
    next_sentence_label: NDArray[np.int64],
) -> int:
    """Lay samples end to end; the arrays from `input_ids` on are written, shaped as in a batch.

    If samples are no pairs, segment B begins at their end. `measure` has checked `spans`: the
    offsets are not read again, because a file that changes in between must not move a write out of
    the batch. Returns 0, or the bits of the CHECKED names that have a value out of range.
    """
    wrong = 0
    token, masked = 0, 0
    cu_seqlens[0] = 0
    for i in range(len(rows)):
        shard, row = table[numbers[i]], rows[i]
        start, end, masked_start, masked_end = spans[i]
        length, count = end - start, masked_end - masked_start
        largest = _copy(
            shard.input_ids, shard.input_id_bytes, start, input_ids[token : token + length]
        )
        wrong |= largest >= vocab_size
        largest = _copy(
            shard.masked_lm_ids,
            shard.masked_id_bytes,
            masked_start,
            labels[masked : masked + count],
        )
        wrong |= (largest >= vocab_size) << 1
        starts_of_b = carray(_pointer(shard.segment_b_start), (shard.num_samples,), np.uint16)
        segment_b_start = np.int64(starts_of_b[row])
        wrong |= (segment_b_start >= length if has_pairs else segment_b_start != length) << 2
        for position in range(length):
            position_ids[token + position] = position
            token_type_ids[token + position] = position >= segment_b_start
        index = masked_token_index[masked : masked + count]
        largest = _copy(shard.masked_lm_positions, 2, masked_start, index)
        wrong |= (largest >= length) << 3
        index += token
        next_labels = carray(_pointer(shard.next_sentence_label), (shard.num_samples,), np.uint8)
        next_sentence_label[i] = next_labels[row]
        wrong |= (next_labels[row] > 1) << 4
        token += length
        masked += count
        cu_seqlens[i + 1] = token
    return wrong


@compiled
def _copy(address: int, item_bytes: int, start: int, target: NDArray[np.int64]) -> Any:
    """Copy unsigned numbers of 2 or 4 bytes from element `start` on; return the largest."""
    if item_bytes == 2:
        return _copy_all(
            carray(_pointer(address), (start + len(target),), np.uint16)[start:], target
        )
    return _copy_all(carray(_pointer(address), (start + len(target),), np.uint32)[start:], target)


@compiled
def _copy_all(source: NDArray[Any], target: NDArray[np.int64]) -> Any:
    largest = np.int64(0)
    for i in range(len(target)):
        value = np.int64(source[i])
        target[i] = value
        largest = max(largest, value)
    return largest
