"""The loader: the plan's samples, read ahead, staged and padded, errors raised in the loop."""

import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import dali_stand_in
from bert_tools.bench.synthetic import synthetic_samples
from mlperf_bert.data import gather as gather_module
from mlperf_bert.data.balance import StepPlan, StepPlanner
from mlperf_bert.data.batch import UnpaddedBatch, blank, make_batch, pad
from mlperf_bert.data.capacity import StaticShape, plan_shapes, shape_of
from mlperf_bert.data.gather import STEPS_AFTER_A_FAULT, Gatherer, ReadAhead
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.loader import PREFETCHED_STEPS, DaliCopy, DirectSource, Loader
from mlperf_bert.data.sampler import Int64Array, UniformSampler
from mlperf_bert.data.shards import SampleReader, Shard
from mlperf_bert.data.staging import CapacityStaging, StagedBatches, Staging
from mlperf_bert.errors import ConfigError, DataError
from plan_cases import planner_of
from shard_sets import assert_same_batch, write_set

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
        deadline = time.monotonic() + 60
        while len(reads) < 2 * (1 + PREFETCHED_STEPS) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(reads) >= 2 * (1 + PREFETCHED_STEPS)  # and goes on reading ahead
    assert not [thread for thread in threading.enumerate() if thread.name == "loader"]


def test_a_thread_that_waits_for_room_is_let_go(planner: StepPlanner, gatherer: Gatherer) -> None:
    waits, closed = threading.Event(), threading.Event()

    class FullStaging(Staging):
        """Has room for the first step only."""

        def send(self, batches: tuple[UnpaddedBatch, ...], plan: StepPlan) -> StagedBatches:
            if plan.step > 1:
                waits.set()
                closed.wait(5)
            return super().send(batches, plan)

        def close(self) -> None:
            closed.set()

    with Loader(planner, DirectSource(gatherer, 0), CPU, staging=FullStaging(CPU)) as loader:
        next(iter(loader))
        assert waits.wait(60)
    assert closed.is_set()


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


SMALL = StaticShape(tokens=32, sequences=2, masked=12, max_seqlen=24, max_masked=6)
LARGE = StaticShape(tokens=48, sequences=2, masked=12, max_seqlen=24, max_masked=6)


def plan_of(lengths: list[int], world_size: int = 1) -> StepPlan:
    """The plan of a step in which each rank gets two sequences, in two forwards or in one."""
    masked = np.full(len(lengths), 4)
    planner = planner_of(
        np.array(lengths), len(lengths), masked_counts=masked, world_size=world_size
    )
    return planner.plan(1)


def batch_of(lengths: list[int]) -> UnpaddedBatch:
    samples = synthetic_samples(np.array(lengths), vocab_size=50, max_predictions=4, seed=1)
    return make_batch(samples, np.arange(len(lengths)), mlm_denominator=4, nsp_denominator=2)


def test_a_batch_is_padded_to_the_smallest_shape_that_holds_it_or_left_as_it_is() -> None:
    small, large = batch_of([10, 12]), batch_of([20, 20])

    def received(batch: UnpaddedBatch, staging: Staging) -> UnpaddedBatch:
        with staging.thread_context():
            staged = staging.send((batch,), plan_of(list(batch.lengths)))
        assert staged.copied is None  # on a CPU nothing is waited for
        (found,) = staging.receive(staged)
        return found

    assert received(large, Staging(CPU)) is large
    assert received(large, CapacityStaging((SMALL,), 1, CPU)) is large
    staging = CapacityStaging((SMALL, LARGE), 1, CPU)
    assert_same_batch(received(small, staging), pad(small, SMALL))
    assert received(large, staging).shape is LARGE

    def copy(block: torch.Tensor, memory: torch.Tensor) -> None:
        memory.fill_(1)  # which is what is received

    for staging in (Staging(CPU, copy), CapacityStaging((SMALL,), 1, CPU, copy)):
        assert set(received(small, staging).block.tolist()) == {1}


def test_all_ranks_choose_the_shape_that_the_longest_needs() -> None:
    plan = plan_of([9, 10, 9, 10], world_size=2)
    one_long = replace(plan, num_tokens=np.array([[19], [33]]))
    assert shape_of(plan, (SMALL, LARGE)) is SMALL
    assert shape_of(one_long, (SMALL, LARGE)) is LARGE
    too_long = replace(plan, num_tokens=np.array([[19], [49]]))
    assert shape_of(too_long, (SMALL, LARGE)) is None


def test_a_blank_batch_has_the_sizes_of_a_padded_one() -> None:
    padded, empty = pad(batch_of([10, 12]), SMALL), blank(SMALL, CPU)
    assert empty.shape is SMALL
    empty.block.copy_(padded.block)
    for name in ("input_ids", "cu_seqlens", "labels", "next_sentence_label", "nsp_denominator"):
        assert torch.equal(getattr(empty, name), getattr(padded, name))


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("is_real", [False, True])
def test_batches_by_dali_are_the_same_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_real: bool, is_padded: bool
) -> None:
    if is_real:
        pytest.importorskip("nvidia.dali", reason="nvidia-dali is not installed")
    else:
        dali_stand_in.install(monkeypatch)
    manifest = write_set(tmp_path / "set", [(9, "<u2"), (8, "<u4"), (7, "<u2")], seed=1)
    index = LengthIndex.open(tmp_path / "set")
    planner = planner_of(index.lengths, 8, masked_counts=index.masked_counts, grad_accum_steps=2)
    limits = {"max_seqlen": manifest.max_seq_length, "max_masked": manifest.max_predictions}
    shapes = plan_shapes(planner, 8, **limits) if is_padded else ()
    copy = DaliCopy(CPU)
    staging = CapacityStaging(shapes, 2, CPU, copy) if is_padded else Staging(CPU, copy)
    source = DirectSource(Gatherer(SampleReader(tmp_path / "set", manifest)), 0)
    with Loader(planner, source, CPU, staging=staging) as loader:
        # All are kept until the end: none may lie in memory that a later one overwrites.
        steps = [step for _, step in zip(range(8), loader, strict=False)]
    for step in steps:
        expected = source.micro_batches(planner.plan(step.plan.step))
        assert len(step.micro_batches) == len(expected) == 2
        shape = shape_of(step.plan, shapes) if is_padded else None
        assert (shape is not None) == is_padded
        for batch, wanted in zip(step.micro_batches, expected, strict=True):
            assert batch.shape is shape
            assert_same_batch(batch, wanted if shape is None else pad(wanted, shape))
    assert len(np.unique([step.plan.step for step in steps])) == 8


def test_without_dali_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(ConfigError, match=r"data\.loader: .*tools/venv\.sh dali"):
        DaliCopy(CPU)
