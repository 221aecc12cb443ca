"""`bench loader`: batches per second of our loader, nvidia-dali's and torch's DataLoader.

Each is opened anew on the same steps of one set.
"""

import contextlib
import gc
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from bert_tools.bench.synthetic import open_or_make_set
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.data.balance import StepPlanner
from mlperf_bert.data.batch import UnpaddedBatch, make_batch
from mlperf_bert.data.gather import Gatherer, ReadAhead
from mlperf_bert.data.index import LengthIndex, Manifest
from mlperf_bert.data.loader import DaliCopy, DirectSource, Loader
from mlperf_bert.data.sampler import Int64Array
from mlperf_bert.data.shards import IntArray, SampleReader, Samples
from mlperf_bert.data.staging import Staging

OURS = "thread"
DATALOADERS = {"dataloader_1": 1, "dataloader_2": 2}  # name: workers
CPU = torch.device("cpu")
BATCHES_BEFORE = 20  # taken before the clock starts, when threads and workers are at work
COLD_BATCHES = 32  # few, as a cold file does not stay cold for long
PREFETCH_FACTOR = 2  # batches a worker keeps ready; torch's default and our PREFETCHED_STEPS

Batches = Iterator[UnpaddedBatch]
Contender = Callable[[Path, int, int], AbstractContextManager[Batches]]
"""Opens the set in a directory: batch size, seed -> the batches of step 1, 2, and so on."""


def measure(
    report: Callable[[str], None],
    *,
    out: Path | None,
    megabytes: int,
    rounds: int,
    batches: Sequence[int],
    seconds: float,
    seed: int,
) -> dict[str, Any]:
    """The JSON object of `bench loader`: `rounds` visits of `seconds` each from a warm page cache.

    The set is made in `out` if it has none, or in a temporary directory. Raises DataError if that
    fails, ConfigError for batches larger than the set.
    """
    with contextlib.ExitStack() as stack:
        if out is None:
            directory = tempfile.TemporaryDirectory(prefix="bench-loader-")
            out = Path(stack.enter_context(directory))
        index = open_or_make_set(out, num_bytes=megabytes * 10**6, seed=seed)
        largest, num_samples = max(batches), index.manifest.num_samples
        if largest > num_samples:
            remedy = f"set it to {num_samples} at most: the set has no more samples"
            raise ConfigError("--batches", f"is {largest}", remedy)
        shards = [out / "shards" / entry.file for entry in index.manifest.shards]
        contenders, dali_reason = make_contenders()
        rows = []
        for batch_size in batches:
            warm: dict[str, list[float]] = {name: [] for name in contenders}
            for number, (name, contender) in itertools.product(range(rounds), contenders.items()):
                with contender(out, batch_size, seed) as taken:
                    warm[name].append(_warm_rate(taken, seconds))
                report(
                    f"{batch_size} sequences, round {number + 1}/{rounds}: {name} "
                    f"{warm[name][-1]:,.0f} batches/s"
                )
            cold = {}
            for name, contender in contenders.items():
                _drop_from_memory(shards)
                with contender(out, batch_size, seed) as taken:
                    cold[name] = [_cold_rate(taken)]
            rows += [*_rows(warm, batch_size, "warm"), *_rows(cold, batch_size, "cold")]
        return {
            "schema_version": 1,
            "rows": rows,
            "dali_reason": dali_reason,
            "set_bytes": sum(path.stat().st_size for path in shards),
            "num_samples": num_samples,
            "mean_length": float(index.lengths.mean()),
            "rounds": rounds,
            "seconds": seconds,
            "cold_batches": COLD_BATCHES,
            "seed": seed,
            "cpus": os.cpu_count(),
            "torch": torch.__version__,
        }


def in_words(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [
        f"{result['num_samples']:,} samples of {result['mean_length']:.1f} tokens on average in "
        f"{result['set_bytes'] / 1e6:,.0f} MB, {result['cpus']} CPUs; warm: median of "
        f"{result['rounds']} visits of {result['seconds']:g} s; cold: {result['cold_batches']} "
        "batches after the first, file not in memory",
        f"{'loader':14} {'cache':5} {'batch':>5} {'batches/s':>10} {'samples/s':>10}  ours is",
    ]
    lines += [
        f"{row['loader']:14} {row['cache']:5} {row['batch_size']:5} "
        f"{row['batches_per_s']:10,.0f} {row['samples_per_s']:10,.0f} {row['ratio']:7.2f} x"
        for row in result["rows"]
    ]
    if result["dali_reason"]:
        lines.append(f"nvidia-dali: not measured ({result['dali_reason']})")
    return "\n".join(lines)


def _warm_rate(batches: Batches, seconds: float) -> float:
    """Batches per second."""
    for _ in range(BATCHES_BEFORE):
        next(batches)
    started, count = time.perf_counter(), 0
    while (taken := time.perf_counter() - started) < seconds:
        next(batches)
        count += 1
    return count / taken


def _cold_rate(batches: Batches) -> float:
    """Batches per second after the first one, with no files in memory when the loader opens."""
    next(batches)
    started = time.perf_counter()
    for _ in range(COLD_BATCHES):
        next(batches)
    return COLD_BATCHES / (time.perf_counter() - started)


def _drop_from_memory(paths: Sequence[Path]) -> None:
    """Ask the kernel to drop the files' pages; it does so for pages that no process maps."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _rows(rates: dict[str, list[float]], batch_size: int, cache: str) -> list[dict[str, Any]]:
    """One object per loader; `ratio` is our number of batches per batch of this one."""
    middle = {name: statistics.median(visits) for name, visits in rates.items()}
    return [
        {
            "loader": name,
            "cache": cache,
            "batch_size": batch_size,
            "batches_per_s": rate,
            "batches_per_s_range": [min(rates[name]), max(rates[name])],
            "samples_per_s": rate * batch_size,
            "ratio": middle[OURS] / rate,
        }
        for name, rate in middle.items()
    ]


def make_contenders() -> tuple[dict[str, Contender], str | None]:
    """All contenders by name, ours first; and the reason if nvidia-dali's is left out."""
    contenders: dict[str, Contender] = {OURS: partial(_open_ours, through_dali=False)}
    reason = None
    try:
        DaliCopy(CPU)
        contenders["dali"] = partial(_open_ours, through_dali=True)
    except ConfigError as error:
        reason = str(error)
    for name, num_workers in DATALOADERS.items():
        contenders[name] = partial(_open_workers, num_workers=num_workers)
    return contenders, reason


@contextmanager
def _open_ours(
    set_dir: Path, batch_size: int, seed: int, *, through_dali: bool
) -> Iterator[Batches]:
    index = LengthIndex.open(set_dir)
    gatherer = Gatherer(SampleReader(set_dir, index.manifest))
    staging = Staging(CPU, DaliCopy(CPU) if through_dali else None)
    source, read_ahead = DirectSource(gatherer, rank=0), ReadAhead(gatherer, rank=0)
    planner = _make_planner(index, batch_size, seed)
    with Loader(planner, source, CPU, read_ahead=read_ahead, staging=staging) as loader:
        yield (step.micro_batches[0] for step in loader)


@contextmanager
def _open_workers(
    set_dir: Path, batch_size: int, seed: int, *, num_workers: int
) -> Iterator[Batches]:
    """The usual way to load such data: a map-style data set and torch's DataLoader with workers."""
    index = LengthIndex.open(set_dir)
    planner = _make_planner(index, batch_size, seed)
    loader = DataLoader(
        SampleDataset(set_dir, index.manifest),
        # Its epoch never ends, so the workers are started once.
        batch_sampler=(planner.plan(step).ids_of(0, 0).tolist() for step in itertools.count(1)),
        num_workers=num_workers,
        collate_fn=collate,
        prefetch_factor=PREFETCH_FACTOR,
    )
    batches = iter(loader)
    yield batches
    del batches  # ends the workers
    gc.collect()


class SampleDataset(Dataset[dict[str, IntArray]]):
    """One sample an item, read from the mapped arrays; each worker maps the files itself."""

    def __init__(self, set_dir: Path, manifest: Manifest) -> None:
        self._reader = SampleReader(set_dir, manifest)
        self._first_ids = np.cumsum([0, *(entry.num_samples for entry in manifest.shards)])

    def __getitem__(self, sample: int) -> dict[str, IntArray]:
        """The arrays of one sample by name, as in the shard."""
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


def collate(items: Sequence[dict[str, IntArray]]) -> UnpaddedBatch:
    """Samples laid end to end; the denominators are the batch's own counts, as on one rank."""
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


class StoredShuffle:
    """A sampler that keeps its order, as torch's own does.

    Ours computes an order of any length without keeping it, which takes longer than loading a
    batch; this command compares loaders, not samplers.
    """

    def __init__(self, num_samples: int, batch_size: int, seed: int) -> None:
        self._order = np.random.default_rng(seed).permutation(num_samples)
        self._batch_size = batch_size

    def global_batch(self, step: int) -> Int64Array:
        """Sample ids, int64 [batch_size], of a step counted from 1."""
        start = (step - 1) * self._batch_size % (len(self._order) - self._batch_size + 1)
        return self._order[start : start + self._batch_size]


def _make_planner(index: LengthIndex, batch_size: int, seed: int) -> StepPlanner:
    """The plan of a single rank; every loader asks for it as part of its work."""
    return StepPlanner(
        StoredShuffle(index.manifest.num_samples, batch_size, seed),
        index.lengths,
        index.masked_counts,
        world_size=1,
    )
