"""The loader: the plan's samples in the plan's order, read ahead, errors raised in the loop."""

import threading
import time
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mlperf_bert.common.errors import DataError
from mlperf_bert.data import gather as gather_module
from mlperf_bert.data.balance import StepPlan, StepPlanner
from mlperf_bert.data.batch import UnpaddedBatch, make_batch
from mlperf_bert.data.gather import STEPS_AFTER_A_FAULT, Gatherer, ReadAhead
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.loader import PREFETCHED_STEPS, DirectSource, Loader
from mlperf_bert.data.sampler import Int64Array, UniformSampler
from mlperf_bert.data.shards import SampleReader, Samples, Shard
from mlperf_bert.data.staging import Staging

CPU = torch.device("cpu")


@pytest.fixture
def index(synthetic_data: Path) -> LengthIndex:
    return LengthIndex.open(synthetic_data / "train")


@pytest.fixture
def gatherer(reader: SampleReader) -> Gatherer:
    return Gatherer(reader)


@pytest.fixture
def planner(index: LengthIndex) -> StepPlanner:
    return StepPlanner(
        UniformSampler(index.manifest.num_samples, 16, seed=1),
        index.lengths,
        index.masked_counts,
        world_size=2,
        grad_accum_steps=2,
    )


@pytest.fixture
def reader(synthetic_data: Path, index: LengthIndex) -> SampleReader:
    return SampleReader(synthetic_data / "train", index.manifest)


def sequence(batch: UnpaddedBatch, number: int) -> list[int]:
    start, stop = batch.cu_seqlens[number : number + 2].tolist()
    return batch.input_ids[start:stop].tolist()


def test_batches_hold_the_planned_samples(
    planner: StepPlanner, gatherer: Gatherer, reader: SampleReader
) -> None:
    with Loader(planner, DirectSource(gatherer, 1), CPU, first_step=3) as loader:
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
    planner: StepPlanner, gatherer: Gatherer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    batch = Gatherer.batch

    def counted(self: Gatherer, ids: Int64Array, **denominators: float) -> UnpaddedBatch:
        reads.append(ids)
        return batch(self, ids, **denominators)

    monkeypatch.setattr(Gatherer, "batch", counted)
    with Loader(planner, DirectSource(gatherer, 0), CPU) as loader:
        time.sleep(0.05)
        assert reads == []
        next(iter(loader))
        deadline = time.monotonic() + 5
        while len(reads) < 2 * (1 + PREFETCHED_STEPS) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(reads) >= 2 * (1 + PREFETCHED_STEPS)  # and goes on reading ahead
    assert not [thread for thread in threading.enumerate() if thread.name == "loader"]


def test_an_error_of_the_thread_reaches_the_loop(
    planner: StepPlanner, gatherer: Gatherer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Gatherer, ids: Int64Array, **denominators: float) -> UnpaddedBatch:
        raise DataError("shard", "is damaged", "make it again")

    monkeypatch.setattr(Gatherer, "batch", broken)
    with (
        pytest.raises(DataError, match="damaged"),
        Loader(planner, DirectSource(gatherer, 0), CPU) as loader,
    ):
        next(iter(loader))


def test_samples_are_advised_before_they_are_read(
    planner: StepPlanner, gatherer: Gatherer, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, int, int]] = []  # array and its elements; or "read" and a step

    def advised(self: Shard, name: str, start: int, stop: int) -> None:
        events.append((name, start, stop))

    class WatchedSource(DirectSource):
        def micro_batches(self, plan: StepPlan) -> tuple[UnpaddedBatch, ...]:
            events.append(("read", plan.step, plan.step))
            return super().micro_batches(plan)

    monkeypatch.setattr(Shard, "will_need", advised)
    read_ahead = ReadAhead(gatherer, 1)
    source = WatchedSource(gatherer, 1)
    with Loader(planner, source, CPU, read_ahead=read_ahead) as loader:
        for batch in loader:
            if batch.plan.step == 4:
                break
    for step in range(1, 5):
        before = set(events[: events.index(("read", step, step))])
        ids = np.concatenate([planner.plan(step).ids_of(1, forward) for forward in (0, 1)])
        _, rows = gatherer.reader.locate(ids)
        spans = gatherer.spans(*gatherer.reader.locate(ids))
        for row, (start, stop, masked_start, masked_stop) in zip(
            rows.tolist(), spans.tolist(), strict=True
        ):
            assert before >= {
                ("offsets", row, row + 2),
                ("masked_lm_offsets", row, row + 2),
                ("segment_b_start", row, row + 1),
                ("next_sentence_label", row, row + 1),
                ("input_ids", start, stop),
                ("masked_lm_positions", masked_start, masked_stop),
                ("masked_lm_ids", masked_start, masked_stop),
            }


def test_advice_ends_when_nothing_waits_for_the_disk(
    planner: StepPlanner, gatherer: Gatherer, monkeypatch: pytest.MonkeyPatch
) -> None:
    advised: list[str] = []
    faults = 0
    monkeypatch.setattr(Shard, "will_need", lambda self, name, *_: advised.append(name))
    monkeypatch.setattr(gather_module, "_major_faults", lambda: faults)
    read_ahead, plans = ReadAhead(gatherer, 0), [planner.plan(1), planner.plan(2)]

    def advised_steps(steps: int) -> int:
        given = 0
        for _ in range(steps):
            advised.clear()
            read_ahead.advise(plans)
            given += bool(advised)
        return given

    assert advised_steps(3 * STEPS_AFTER_A_FAULT) == STEPS_AFTER_A_FAULT
    assert advised_steps(10) == 0
    faults = 5
    assert advised_steps(3 * STEPS_AFTER_A_FAULT) == STEPS_AFTER_A_FAULT


def test_on_a_cpu_staging_hands_on_what_it_gets(planner: StepPlanner, gatherer: Gatherer) -> None:
    batches = DirectSource(gatherer, 0).micro_batches(planner.plan(1))
    staging = Staging(CPU)
    with staging.thread_context():
        staged = staging.send(batches, planner.plan(1))
    assert staged.copied is None
    assert staging.receive(staged) is batches


def test_tensors_that_share_no_memory_are_changed_one_by_one() -> None:
    samples = Samples(
        input_ids=np.array([2, 7, 3, 3]),
        lengths=np.array([4]),
        segment_b_start=np.array([3]),
        masked_positions=np.array([1]),
        masked_ids=np.array([10]),
        masked_counts=np.array([1]),
        next_sentence_label=np.array([0]),
    )
    batch = make_batch(samples, np.arange(1), mlm_denominator=1.0, nsp_denominator=4.0)
    batch = replace(batch, token_type_ids=batch.input_ids)
    blocks: list[torch.Tensor] = []

    def doubled(block: torch.Tensor) -> torch.Tensor:
        blocks.append(block)
        return torch.cat([block, block])  # more than is needed changes nothing

    changed = batch.map_blocks(doubled)
    assert len(blocks) == 9
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(changed, field.name), value)


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
    batch = make_batch(samples, np.array([7, 3]), mlm_denominator=3.0, nsp_denominator=2.0)
    assert batch.cu_seqlens.tolist() == [0, 6, 11]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]
    assert batch.token_type_ids.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1]
    assert batch.masked_token_index.tolist() == [1, 4, 9]
    assert batch.labels.tolist() == [10, 11, 12]
    assert batch.lengths == (6, 5) and batch.max_seqlen == 6
    assert batch.masked_counts == (2, 1) and batch.sample_ids.tolist() == [7, 3]
