"""The loader: the plan's samples in the plan's order, read ahead, errors raised in the loop."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from mlperf_bert.data.balance import TOKENS, Balance
from mlperf_bert.data.batch import UnpaddedBatch, make_batch
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.loader import PREFETCHED_STEPS, DirectSource, Loader
from mlperf_bert.data.permutation import Int64Array
from mlperf_bert.data.sampler import UniformSampler
from mlperf_bert.data.shards import SampleReader, Samples
from mlperf_bert.data.step_plan import StepPlanner
from mlperf_bert.errors import DataError

CPU = torch.device("cpu")


@pytest.fixture
def index(synthetic_data: Path) -> LengthIndex:
    return LengthIndex.open(synthetic_data / "train")


@pytest.fixture
def planner(index: LengthIndex) -> StepPlanner:
    return StepPlanner(
        UniformSampler(index.manifest.num_samples, 16, seed=1),
        index.lengths,
        index.masked_counts,
        world_size=2,
        grad_accum_steps=2,
        loss_normalization="global",
        balance=Balance(),
        balance_model="tokens",
        cost=TOKENS,
    )


@pytest.fixture
def reader(synthetic_data: Path, index: LengthIndex) -> SampleReader:
    return SampleReader(synthetic_data / "train", index.manifest)


def sequence(batch: UnpaddedBatch, number: int) -> list[int]:
    start, stop = batch.cu_seqlens[number : number + 2].tolist()
    return batch.input_ids[start:stop].tolist()


def test_batches_hold_the_planned_samples(planner: StepPlanner, reader: SampleReader) -> None:
    with Loader(planner, DirectSource(reader, 1), CPU, first_step=3) as loader:
        batches = iter(loader)
        for step in (3, 4):
            batch = next(batches)
            assert batch.plan.step == step
            assert len(batch.micro_batches) == 2
            for forward, micro_batch in enumerate(batch.micro_batches):
                for number, sample in enumerate(planner.plan(step).ids_of(1, forward)):
                    alone = reader.read(np.array([sample]))
                    assert sequence(micro_batch, number) == alone.input_ids.tolist()


def test_nothing_is_read_before_the_first_batch(
    planner: StepPlanner, reader: SampleReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    read = SampleReader.read

    def counted(self: SampleReader, ids: Int64Array) -> Samples:
        reads.append(ids)
        return read(self, ids)

    monkeypatch.setattr(SampleReader, "read", counted)
    with Loader(planner, DirectSource(reader, 0), CPU) as loader:
        time.sleep(0.05)
        assert reads == []
        next(iter(loader))
        deadline = time.monotonic() + 5
        while len(reads) < 2 * (1 + PREFETCHED_STEPS) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(reads) >= 2 * (1 + PREFETCHED_STEPS)  # and goes on reading ahead
    assert not [thread for thread in threading.enumerate() if thread.name == "loader"]


def test_an_error_of_the_thread_reaches_the_loop(
    planner: StepPlanner, reader: SampleReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: SampleReader, ids: Int64Array) -> Samples:
        raise DataError("shard", "is damaged", "make it again")

    monkeypatch.setattr(SampleReader, "read", broken)
    with (
        pytest.raises(DataError, match="damaged"),
        Loader(planner, DirectSource(reader, 0), CPU) as loader,
    ):
        next(iter(loader))


def test_make_batch_lays_sequences_end_to_end() -> None:
    samples = Samples(
        input_ids=np.array([2, 7, 3, 8, 9, 3, 2, 5, 3, 6, 3]),
        lengths=np.array([6, 5]),
        segment_b_start=np.array([3, 3]),
        masked_positions=np.array([1, 4, 3]),
        masked_ids=np.array([10, 11, 12]),
        masked_counts=np.array([2, 1]),
        next_sentence_label=np.array([0, 1]),
    )
    batch = make_batch(samples, mlm_denominator=3.0, nsp_denominator=2.0)
    assert batch.cu_seqlens.tolist() == [0, 6, 11]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]
    assert batch.token_type_ids.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1]
    assert batch.masked_token_index.tolist() == [1, 4, 9]
    assert batch.labels.tolist() == [10, 11, 12]
    assert batch.lengths == (6, 5) and batch.max_seqlen == 6
