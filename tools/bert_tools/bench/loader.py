"""`bench loader`: batches a second of our loader, nvidia-dali's and torch's DataLoader."""

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bert_tools.bench.loader_contenders import OURS, Batches, Contender, make_contenders
from bert_tools.bench.loader_data import open_or_make_set
from mlperf_bert.common.errors import ConfigError

BATCHES_BEFORE = 20  # taken before the clock starts: by then threads and workers are at work
COLD_BATCHES = 32  # few, as a cold file does not stay cold for long


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What is loaded, and for how long.

    From a warm page cache every loader is visited `rounds` times for `seconds` each.
    """

    batch_sizes: tuple[int, ...]
    set_bytes: int
    rounds: int
    seconds: float
    seed: int


def compare(set_dir: Path, settings: Settings, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure, and return the JSON object of `bench loader`; `report` gets lines of progress.

    The set is made in `set_dir` where none is; DataError where that fails, ConfigError for batches
    larger than the set.
    """
    index = open_or_make_set(set_dir, num_bytes=settings.set_bytes, seed=settings.seed)
    largest, num_samples = max(settings.batch_sizes), index.manifest.num_samples
    if largest > num_samples:
        remedy = f"set it to {num_samples} at most: the set has no more samples"
        raise ConfigError("--batches", f"is {largest}", remedy)
    shards = [set_dir / "shards" / entry.file for entry in index.manifest.shards]
    contenders, dali_reason = make_contenders()
    rows = []
    for batch_size in settings.batch_sizes:
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        for number, (name, contender) in itertools.product(
            range(settings.rounds), contenders.items()
        ):
            with contender(set_dir, batch_size, settings.seed) as batches:
                rates[name].append(_warm_rate(batches, settings.seconds))
            report(
                f"{batch_size} sequences, round {number + 1}/{settings.rounds}: {name} "
                f"{rates[name][-1]:,.0f} batches/s"
            )
        rows += _rows(rates, batch_size, "warm")
        cold = {
            name: [_cold_rate(contender, set_dir, shards, batch_size, settings.seed)]
            for name, contender in contenders.items()
        }
        rows += _rows(cold, batch_size, "cold")
    return {
        "schema_version": 1,
        "rows": rows,
        "dali_reason": dali_reason,
        "set_bytes": sum(path.stat().st_size for path in shards),
        "num_samples": num_samples,
        "mean_length": float(index.lengths.mean()),
        "rounds": settings.rounds,
        "seconds": settings.seconds,
        "cold_batches": COLD_BATCHES,
        "seed": settings.seed,
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
    }


@contextmanager
def set_directory(given: Path | None) -> Iterator[Path]:
    """Where the set is: the given directory, which is kept, or a temporary one."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="bench-loader-") as name:
        yield Path(name)


def _warm_rate(batches: Batches, seconds: float) -> float:
    """Batches a second."""
    for _ in range(BATCHES_BEFORE):
        next(batches)
    started, count = time.perf_counter(), 0
    while (taken := time.perf_counter() - started) < seconds:
        next(batches)
        count += 1
    return count / taken


def _cold_rate(
    contender: Contender, set_dir: Path, shards: list[Path], batch_size: int, seed: int
) -> float:
    """Batches a second after the first one, the files not in memory when the loader is opened."""
    for path in shards:
        _drop_from_memory(path)
    with contender(set_dir, batch_size, seed) as batches:
        next(batches)
        started = time.perf_counter()
        for _ in range(COLD_BATCHES):
            next(batches)
        return COLD_BATCHES / (time.perf_counter() - started)


def _drop_from_memory(path: Path) -> None:
    """Ask the kernel to forget a file's pages; it does for pages that no process has mapped."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _rows(rates: dict[str, list[float]], batch_size: int, cache: str) -> list[dict[str, Any]]:
    """One object a loader; `ratio` says how often ours does a batch while this one does one."""
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
