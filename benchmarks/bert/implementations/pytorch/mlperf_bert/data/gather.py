"""Sample ids to a batch on the host, in one pass over the mapped shards.

Equal to `make_batch(reader.read(ids), ids)`, the readable reference, errors included.
"""

import numpy as np
from numpy.typing import NDArray

from mlperf_bert.data.batch import UnpaddedBatch, empty_batch
from mlperf_bert.data.compiled_gather import CHECKED, SHARD_ROW, SPANS_ARE_GOOD, fill, measure
from mlperf_bert.data.numba_cache import usable_cache
from mlperf_bert.data.shards import IntArray, SampleReader, ShardArrays, span_error


class Gatherer:
    """Makes batches of the samples of one prepared set.

    Construction compiles the code that does it, or loads it from numba's cache, on made-up
    arrays: no sample is read. Raises ConfigError when the cache is damaged or cannot be written.
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
        """The samples laid end to end in the order of `ids`, on the host.

        Args:
            ids: int64 [n], n >= 1, in any order.
            mlm_denominator: see UnpaddedBatch.
            nsp_denominator: see UnpaddedBatch.

        Raises:
            DataError: as `SampleReader.read`.
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
        wrong = _fill(self._table, numbers, rows, spans, manifest.vocab_size, has_pairs, batch)
        if wrong:
            first = (wrong & -wrong).bit_length() - 1
            raise self.reader.range_error(ids, CHECKED[first])
        return batch

    def spans(self, numbers: IntArray, rows: IntArray) -> IntArray:
        """Start and end of each sample's tokens and of its masked positions within its shard.

        Args:
            numbers: int64 [n], the samples' shards; mapped here where they are not yet.
            rows: int64 [n], their rows there.

        Returns:
            int64 [n, 4].

        Raises:
            DataError: as `SampleReader.read`.
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
    """Describe the mapped arrays of a shard, which keeps them mapped as long as it lives."""
    for name in ShardArrays.__slots__:
        row[name] = getattr(arrays, name).ctypes.data
    row["num_tokens"] = len(arrays.input_ids)
    row["num_masked"] = len(arrays.masked_lm_ids)
    row["input_id_bytes"] = arrays.input_ids.itemsize
    row["masked_id_bytes"] = arrays.masked_lm_ids.itemsize
    row["num_samples"] = len(arrays.next_sentence_label)


def _fill(
    table: NDArray[np.void],
    numbers: IntArray,
    rows: IntArray,
    spans: IntArray,
    vocab_size: int,
    has_pairs: bool,
    batch: UnpaddedBatch,
) -> int:
    return fill(
        table,
        numbers,
        rows,
        spans,
        vocab_size,
        has_pairs,
        batch.input_ids.numpy(),
        batch.position_ids.numpy(),
        batch.token_type_ids.numpy(),
        batch.cu_seqlens.numpy(),
        batch.masked_token_index.numpy(),
        batch.labels.numpy(),
        batch.next_sentence_label.numpy(),
    )


def _compile() -> None:
    table, nothing = np.zeros(1, SHARD_ROW), np.zeros(0, dtype=np.int64)
    spans = np.zeros((0, 4), dtype=np.int64)
    with usable_cache(fill):
        measure(table, nothing, nothing, 1, 1, spans)
        _fill(table, nothing, nothing, spans, 1, True, empty_batch((), ()))
