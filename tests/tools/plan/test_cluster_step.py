"""One simulated step: conservation, and what must never be slower than what."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from bert_tools.plan.buckets import backward_order
from bert_tools.plan.cluster.device import sent_buckets
from bert_tools.plan.cluster.machine import default_constants
from bert_tools.plan.cluster.software import programs
from bert_tools.plan.cluster.step import jitter, simulate_step
from bert_tools.plan.cluster.workload import even_workload
from cluster_cases import EAGER, FREE, OURS, even, job, simulate, uneven
from mlperf_bert.config.sections import ClipPolicy, ModelSection
from mlperf_bert.distributed.bucket_plan import plan_buckets

PARAMETERS = 336_232_258
CLIPS: tuple[ClipPolicy, ...] = (
    "none",
    "after_allreduce",
    "whole_before_allreduce",
    "bucket_before_allreduce",
)


def test_one_rank_computes_and_sends_nothing() -> None:
    timing = simulate(job(1, 1), even(1))
    work = sum(float(phase.device_ms[0]) for phase in timing.phases)
    # Adam: 28 bytes a parameter, and 2 to zero its gradient.
    update = 1e3 * 30 * PARAMETERS / (2039e9 * FREE.memory_efficiency)
    assert timing.communication == [] and timing.exposed_ms == 0
    assert timing.step_ms == pytest.approx(work + update)


def test_without_communication_a_step_is_its_computing() -> None:
    alone = simulate(job(1, 1), even(1))
    endless = simulate(job(1, 8, constants=replace(FREE, link_efficiency=1e12)), even(8))
    assert endless.step_ms == pytest.approx(alone.step_ms)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", ["ours", "samsung_v2_0", "nvidia_v2_0", "nvidia_v2_0_captured"])
def test_parts_and_waits_of_every_rank_are_the_step(clip: ClipPolicy, name: str) -> None:
    program = programs()[name]
    of = job(2, 4, clip=clip, constants=default_constants(), program=program)
    work = uneven([512, 40, 300, 300, 128, 511, 7, 90], program)
    timing = simulate_step(of, work, jitter(8, 0.02, 3))
    parts = timing.parts
    assert all((part >= -1e-9).all() for part in parts.values())
    assert sum(parts.values()) == pytest.approx(np.full(8, timing.step_ms))
    assert timing.communication_ms >= timing.exposed_ms - 1e-9


def test_an_even_deal_of_the_same_tokens_is_never_slower() -> None:
    of = job()
    steps = [
        simulate(of, uneven(tokens)).step_ms
        for tokens in ([256] * 8, [240, 272] * 4, [128, 384] * 4, [512, 0 + 1] * 4)
    ]
    assert all(first <= second for first, second in pairwise(steps))
    timing = simulate(of, uneven([256] * 8))
    assert timing.parts["wait: slower ranks"].max() == pytest.approx(0)


def test_others_wait_for_the_longest() -> None:
    timing = simulate(job(), uneven([256] * 7 + [512]))
    waits = timing.parts["wait: slower ranks"]
    assert timing.slowest_rank == 7 and waits[7] == pytest.approx(0)
    assert waits[:7] == pytest.approx(np.full(7, waits[0])) and waits[0] > 0


def test_clipping_each_bucket_is_never_later_than_clipping_the_whole() -> None:
    for node_gb_s in (1, 10, 25, 200, 10_000):
        whole, bucket = (
            simulate(job(4, 4, clip=clip, node_gb_s=node_gb_s), even(16))
            for clip in ("whole_before_allreduce", "bucket_before_allreduce")
        )
        assert bucket.step_ms <= whole.step_ms + 1e-9


def test_the_whole_clipped_first_hides_no_communication() -> None:
    of = job(4, 4, clip="whole_before_allreduce")
    timing = simulate(of, even(16))
    assert timing.exposed_ms == pytest.approx(of.network.all_reduce_ms(2 * PARAMETERS))
    assert timing.exposed_ms == pytest.approx(timing.communication_ms)


def test_buckets_behind_each_other_on_a_slow_network() -> None:
    of = job(4, 4, node_gb_s=0.5)
    timing = simulate(of, even(16))
    total = sum(of.network.all_reduce_ms(bucket.num_bytes) for bucket in of.buckets)
    first = timing.communication[0][0]
    assert timing.reduced == pytest.approx(first + total)
    assert all(one[1] == pytest.approx(two[0]) for one, two in pairwise(timing.communication))


@pytest.mark.parametrize("clip", CLIPS)
def test_more_bandwidth_is_never_slower(clip: ClipPolicy) -> None:
    steps = [
        simulate(
            job(4, 4, clip=clip, constants=default_constants(), node_gb_s=rate), even(16)
        ).step_ms
        for rate in (5, 25, 50, 100, 200, 400)
    ]
    assert all(second <= first + 1e-9 for first, second in pairwise(steps))


@pytest.mark.parametrize("sequences", [1, 2, 4, 16, 56])
def test_capture_is_never_slower(sequences: int) -> None:
    eager, captured = (
        simulate(
            job(2, 8, constants=default_constants(), program=program),
            even(16, sequences, program=program),
        ).step_ms
        for program in (EAGER, OURS)
    )
    assert captured <= eager + 1e-9
    if sequences <= 4:
        assert captured < 0.8 * eager  # there launches take longer than kernels


def test_a_host_that_waits_in_each_hook_costs_time() -> None:
    synced = replace(EAGER, syncs_in_hooks="each bucket", sync_before_update="on")
    free, waiting = (
        simulate(job(2, 8, constants=default_constants(), program=program), even(16, 16))
        for program in (EAGER, synced)
    )
    assert waiting.step_ms > free.step_ms
    name = "wait: launches and host syncs"
    assert waiting.parts[name].mean() > free.parts[name].mean()


def test_clipping_after_reads_and_writes_all_gradients_behind_the_last_bucket() -> None:
    none, after = (simulate(job(clip=clip), even(8)) for clip in ("none", "after_allreduce"))
    passes = 1e3 * 3 * 2 * PARAMETERS / (2039e9 * FREE.memory_efficiency)
    assert after.step_ms - none.step_ms == pytest.approx(passes)


def test_shards_divide_the_update_and_add_a_gather() -> None:
    whole, shared = (
        simulate(job(program=replace(EAGER, sharding=sharding)), even(8))
        for sharding in ("none", "node")
    )
    state = 1e3 * 28 * PARAMETERS / (2039e9 * FREE.memory_efficiency)
    assert whole.optimizer_ms - shared.optimizer_ms == pytest.approx(state * 3 / 4)
    assert whole.all_gather_ms == 0 < shared.all_gather_ms


def test_buckets_are_those_of_the_project() -> None:
    order = backward_order(ModelSection(), "separate", 256, 38)
    planned = [2 * sum(each.numel for each in bucket) for bucket in plan_buckets(order, 2, 25.0)]
    found = sent_buckets(2)
    assert [bucket.num_bytes for bucket in found] == planned
    assert len(found) == 22 and sum(bucket.num_bytes for bucket in found) == 2 * PARAMETERS
    # Heads, 24 layers, embeddings: the last bucket, with the embedding, is ready last.
    assert [bucket.phase for bucket in found] == sorted(bucket.phase for bucket in found)
    assert found[-1].phase == 25 and found[-1].fraction == 1.0


def test_jitter_makes_many_ranks_slower_than_few() -> None:
    assert jitter(1000, 0.0, 1).tolist() == [1.0] * 1000
    slowest = [np.mean([jitter(p, 0.01, seed).max() for seed in range(200)]) for p in (8, 1024)]
    # The expected largest of 8 and of 1,024 normal draws: 1.42 and 3.25 deviations.
    assert slowest == pytest.approx([1.0142, 1.0325], abs=0.001)


def test_samples_of_other_ranks_arrive_before_the_forward() -> None:
    work = even_workload(8, 4, 256, 38, EAGER)
    moved = replace(work, input_bytes=32e6, input_scope="node")
    of = job(2, 4, constants=replace(FREE, link_efficiency=1.0))
    before, after = simulate(of, work), simulate(of, moved)
    # 3 of 4 ranks' parts over links of 300 GB/s.
    assert after.step_ms - before.step_ms == pytest.approx(0.75 * 32 / 300)
