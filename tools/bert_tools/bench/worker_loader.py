"""The usual way to load such data, to compare ours with: torch's DataLoader with workers.

A map-style data set that reads one sample, a batch sampler with our loader's samples, and a
collate function that lays them end to end.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader, Dataset, Sampler

from mlperf_bert.data.balance import StepPlanner
from mlperf_bert.data.batch import UnpaddedBatch, make_batch
from mlperf_bert.data.index import Manifest
from mlperf_bert.data.shards import IntArray, SampleReader, Samples

PREFETCH_FACTOR = 2  # batches a worker keeps ready; torch's default, and PREFETCHED_STEPS of ours


class SampleDataset(Dataset[dict[str, IntArray]]):
    """One sample an item, read from the mapped arrays; each worker maps the files itself."""

    def __init__(self, set_dir: Path, manifest: Manifest) -> None:
        self._reader = SampleReader(set_dir, manifest)
        self._first_ids = np.cumsum([0, *(entry.num_samples for entry in manifest.shards)])

    def __getitem__(self, sample: int) -> dict[str, IntArray]:
        """The arrays of one sample, as the shard has them, by name."""
        number = int(np.searchsorted(self._first_ids, sample, side="right")) - 1
        arrays, row = self._reader.shards[number].arrays(), sample - self._first_ids[number]
        tokens = slice(arrays.offsets[row], arrays.offsets[row + 1])
        masked = slice(arrays.masked_lm_offsets[row], arrays.masked_lm_offsets[row + 1])
        return {
            "sample_id": np.int64(sample),
            "input_ids": arrays.input_ids[tokens],
            "segment_b_start": arrays.segment_b_start[row],
            "masked_positions": arrays.masked_lm_positions[masked],
            "masked_ids": arrays.masked_lm_ids[masked],
            "next_sentence_label": arrays.next_sentence_label[row],
        }


class PlannedBatches(Sampler[list[int]]):
    """The sample ids of every step of a single rank, from step 1 on, without end."""

    def __init__(self, planner: StepPlanner) -> None:
        self._planner = planner

    def __iter__(self) -> Iterator[list[int]]:
        step = 1
        while True:
            yield self._planner.plan(step).ids_of(0, 0).tolist()
            step += 1


def collate(items: Sequence[dict[str, IntArray]]) -> UnpaddedBatch:
    """Samples laid end to end; the denominators are the batch's own counts, as of one rank."""
    masked_counts = np.array([len(item["masked_ids"]) for item in items], dtype=np.int64)
    flat = {
        name: np.concatenate([item[name] for item in items], dtype=np.int64)
        for name in ("input_ids", "masked_positions", "masked_ids")
    }
    scalars = {
        name: np.array([item[name] for item in items], dtype=np.int64)
        for name in ("segment_b_start", "next_sentence_label")
    }
    lengths = np.array([len(item["input_ids"]) for item in items], dtype=np.int64)
    ids = np.array([item["sample_id"] for item in items])
    samples = Samples(**flat, **scalars, lengths=lengths, masked_counts=masked_counts)
    return make_batch(
        samples, ids, mlm_denominator=float(masked_counts.sum()), nsp_denominator=float(len(items))
    )


def make_worker_loader(
    set_dir: Path, manifest: Manifest, planner: StepPlanner, num_workers: int
) -> DataLoader[dict[str, IntArray]]:
    """A DataLoader over the planner's steps; iterating it yields UnpaddedBatch.

    Its epoch never ends, so the workers are started once.
    """
    return DataLoader(
        SampleDataset(set_dir, manifest),
        batch_sampler=PlannedBatches(planner),
        num_workers=num_workers,
        collate_fn=collate,
        prefetch_factor=PREFETCH_FACTOR,
    )
