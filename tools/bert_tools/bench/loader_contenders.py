"""The loaders that `bench loader` compares, each opened afresh on the same steps of one set."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bert_tools.bench.worker_loader import make_worker_loader
from mlperf_bert.common.errors import ConfigError
from mlperf_bert.data.balance import StepPlanner
from mlperf_bert.data.batch import UnpaddedBatch
from mlperf_bert.data.gather import Gatherer, ReadAhead
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.loader import BatchSource, DaliSource, DirectSource, Loader, make_pipeline
from mlperf_bert.data.sampler import Int64Array
from mlperf_bert.data.shards import SampleReader

OURS = "thread"
DATALOADERS = {"dataloader_1": 1, "dataloader_2": 2}  # name: workers
CPU = torch.device("cpu")

Batches = Iterator[UnpaddedBatch]
Contender = Callable[[Path, int, int], AbstractContextManager[Batches]]
"""Opens the set in a directory: batch size, seed -> the batches of step 1, 2, and so on."""


def make_contenders() -> tuple[dict[str, Contender], str | None]:
    """All contenders by name, ours first; and why nvidia-dali's is left out, where it is."""
    contenders: dict[str, Contender] = {OURS: partial(_open_ours, through_dali=False)}
    reason = None
    try:
        make_pipeline(CPU)
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
    source: BatchSource = DirectSource(gatherer, rank=0)
    if through_dali:
        source = DaliSource(source, CPU)
    planner = _make_planner(index, batch_size, seed)
    with Loader(planner, source, CPU, read_ahead=ReadAhead(gatherer, rank=0)) as loader:
        yield (step.micro_batches[0] for step in loader)


@contextmanager
def _open_workers(
    set_dir: Path, batch_size: int, seed: int, *, num_workers: int
) -> Iterator[Batches]:
    index = LengthIndex.open(set_dir)
    planner = _make_planner(index, batch_size, seed)
    batches = iter(make_worker_loader(set_dir, index.manifest, planner, num_workers))
    yield batches
    del batches  # ends the workers
    gc.collect()


class StoredShuffle:
    """A sampler that keeps its order, as torch's own does.

    Ours computes an order of any length without keeping it, which takes longer than to load a
    batch; here loaders are compared, not samplers.
    """

    def __init__(self, num_samples: int, batch_size: int, seed: int) -> None:
        self._order = np.random.default_rng(seed).permutation(num_samples)
        self._batch_size = batch_size

    def global_batch(self, step: int) -> Int64Array:
        """Sample ids, int64 [batch_size], of a step counted from 1."""
        start = (step - 1) * self._batch_size % (len(self._order) - self._batch_size + 1)
        return self._order[start : start + self._batch_size]


def _make_planner(index: LengthIndex, batch_size: int, seed: int) -> StepPlanner:
    """The plan of a single rank: every loader asks for it, so it is part of their work."""
    return StepPlanner(
        StoredShuffle(index.manifest.num_samples, batch_size, seed),
        index.lengths,
        index.masked_counts,
        world_size=1,
    )
