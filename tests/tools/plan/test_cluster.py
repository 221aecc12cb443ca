"""The cluster simulator: collectives, devices, what ranks compute, and whole steps and runs."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_tools.common.length_histogram import LengthHistogram
from bert_tools.plan.buckets import backward_order
from bert_tools.plan.cluster.device import Device, sent_buckets
from bert_tools.plan.cluster.machine import (
    Network,
    accelerators,
    default_constants,
    make_machine,
    ring_all_gather_ms,
    ring_all_reduce_ms,
    tree_all_reduce_ms,
)
from bert_tools.plan.cluster.step import Job, jitter, simulate_step
from bert_tools.plan.cluster.workload import Workload, draw_steps, even_workload
from bert_tools.plan.entries import published_entries, published_minutes
from bert_tools.plan.sample_index import SampleIndex
from mlperf_bert.config.files import load_config
from mlperf_bert.config.sections import ModelSection
from mlperf_bert.data.balance import Balance, StepPlanner
from mlperf_bert.data.sampler import UniformSampler
from mlperf_bert.data.token_packets import gathered_bytes
from mlperf_bert.distributed.bucket_plan import plan_buckets
from support import CONFIGS

FULL = default_constants()
# No overheads: what is left is work and messages.
FREE = replace(
    FULL,
    **dict.fromkeys(("kernel_overhead_us", "host_launch_us", "jitter_fraction", "sync_us"), 0.0),
    **dict.fromkeys(("link_latency_us", "network_latency_us", "collective_start_us"), 0.0),
    overlap_slowdown=0.0,
)
A100 = Device(accelerators()["a100"], "bf16", FREE)
PARAMETERS = 336_232_258
WHOLE = "whole_before_allreduce"
BUCKET = "bucket_before_allreduce"
CLIPS = ("none", "after_allreduce", WHOLE, BUCKET)


def job(nodes=2, gpus=4, *, clip="none", constants=FREE, node_gb_s=None, **program):
    """Eager unless `program` says else."""
    machine = make_machine("a100", nodes, gpus, node_gb_s)
    program = {"capture": "off", "precision": "bf16", "element_bytes": 2, **program}
    return Job(machine=machine, constants=constants, clip=clip, **program)


def even(ranks, sequences=4, length=256):
    return even_workload(ranks, sequences, length, 38)


def uneven(tokens):
    """Ranks of one sequence each, all cut from `even_workload` but for its tokens."""
    parts = [even_workload(1, 1, length, 38) for length in tokens]
    names = ("tokens", "real_tokens", "attended", "masked", "sequences")
    return Workload(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def simulate(of, work):
    return simulate_step(of, work, np.ones(work.world_size))


def network(nodes, gpus, *, node_gb_s=200):
    constants = replace(FREE, link_efficiency=1.0, network_efficiency=1.0)
    return Network(make_machine("a100", nodes, gpus, node_gb_s), constants)


def test_rings_trees_and_machines_by_hand():
    # 8 ranks: 14 messages of 125 MB at 100 GB/s take 1.25 ms each, and 5 us.
    assert ring_all_reduce_ms(1e9, 8, 100, 5) == pytest.approx(14 * (1.25 + 0.005))
    assert ring_all_gather_ms(1e9, 8, 100, 5) == pytest.approx(7 * (1.25 + 0.005))
    # 2 GB at 100 GB/s; 1,000 ranks are ten levels, up and down.
    assert tree_all_reduce_ms(1e9, 1000, 100, 5) == pytest.approx(20 + 20 * 0.005)
    for function in (ring_all_reduce_ms, ring_all_gather_ms, tree_all_reduce_ms):
        assert function(1e9, 1, 100, 5) == 0  # one rank sends nothing
    # 2 * 7/8 of 672 MB at 300 GB/s.
    assert network(1, 8).all_reduce_ms(672e6) == pytest.approx(2 * 7 / 8 * 672 / 300)
    assert network(1, 1).all_reduce_ms(672e6) == 0
    # A gather carries the whole once: inside a node 7/8, between 2 nodes a half at 200 GB/s.
    gathered = 7 / 8 * 672 / 300 + 672 / 2 / 200
    assert network(2, 8).all_gather_ms(672e6) == pytest.approx(gathered)


@settings(deadline=None, max_examples=15)
@given(*[st.floats(5, 400)] * 2, st.sampled_from((1, 2, 64)), st.floats(4, 1e9))
def test_more_bandwidth_is_never_slower(one, other, nodes, num_bytes):
    rates = sorted((one, other), reverse=True)
    times = [network(nodes, 8, node_gb_s=rate).all_reduce_ms(num_bytes) for rate in rates]
    assert times == sorted(times)
    # Every byte must leave a node and come back reduced, but for the node's own part.
    assert times[0] >= 2 * (nodes - 1) / nodes * num_bytes / 1e6 / rates[0] * (1 - 1e-9)
    for clip in CLIPS:
        jobs = [job(4, 4, clip=clip, constants=FULL, node_gb_s=rate) for rate in rates]
        fast, slow = (simulate(each, even(16)).step_ms for each in jobs)
        assert fast <= slow + 1e-9


def product_ms(rows, columns, inner):
    return float(A100.product_ms(np.array([float(rows)]), columns, inner)[0])


def test_a_product_takes_whole_waves_of_tiles():
    rate = 312e12 * FREE.matrix_efficiency / 108  # operations a second of one multiprocessor
    one_tile = 1e3 * 2 * 128 * 128 * 1024 / rate
    for rows, waves in ((128, 1), (1, 1), (108 * 128, 1), (108 * 128 + 1, 2)):
        assert product_ms(rows, 128, 1024) == pytest.approx(waves * one_tile)
    # 27 rows of tiles times 8 columns are 216 tiles: two full waves of 108.
    assert product_ms(3456, 1024, 1024) * 1.5 == pytest.approx(product_ms(3457, 1024, 1024))
    times = [product_ms(tokens, 4096, 1024) for tokens in range(64, 9000, 64)]
    assert times == sorted(times)


@pytest.fixture(scope="module")
def index():
    """A few thousand samples in all four strata of 512 tokens."""
    lengths = np.arange(8, 513, 4)
    histogram = LengthHistogram(lengths=lengths, counts=20 + lengths % 7)
    return SampleIndex.of_histogram(histogram, "test")


def drawn(index, balance="none", sizes=(2, 4, 1), *, is_captured=False, changes=()):
    """Nodes, accelerators of each, and steps; 8 sequences a rank."""
    nodes, gpus_per_node, draws = sizes
    changed = {
        "mlperf.enforce_rules": "false",
        "parallel.nodes": nodes,
        "parallel.ranks_per_node": gpus_per_node,
        "parallel.local_batch_size": 8,
        "data.balance": balance,
        "run.step_mode": "captured" if is_captured else "eager",
        **dict(changes),
    }
    words = [f"{name}={value}" for name, value in changed.items()]
    return draw_steps(load_config(CONFIGS / "dgxa100_1x8x56x1.toml", words), index, draws)


@pytest.mark.parametrize("policy", ["none", "presort_local", "presort_global"])
def test_ranks_get_what_the_planner_gives_them(policy, index):
    works = drawn(index, policy, (4, 4, 3))
    planner = StepPlanner(
        UniformSampler(len(index.lengths), 128, 0),
        index.lengths,
        index.masked_counts,
        world_size=16,
        balance=Balance(policy=policy, ranks_per_node=4),
    )
    assert len(works) == 3
    plan = planner.plan(1)
    assert works[0].tokens.tolist() == plan.num_tokens[:, 0].tolist()
    assert works[0].masked.tolist() == plan.num_masked[:, 0].tolist()
    assert works[0].sequences.tolist() == [8] * 16


def test_masks_that_are_drawn_while_training_are_those_of_the_rate(index):
    limits = {"data.max_predictions": 154, "model.objective": "mlm"}
    whole, half = (
        drawn(index, changes={**limits, "data.masking": "dynamic", "data.masking_rate": rate})
        for rate in (0.3, 0.15)
    )
    ratio = whole[0].masked.sum() / half[0].masked.sum()
    assert ratio == pytest.approx(2, rel=0.02)
    assert half[0].masked.sum() == pytest.approx(drawn(index)[0].masked.sum(), rel=0.02)


def test_accumulation_computes_all_micro_batches(index):
    changes = {"parallel.local_batch_size": 2, "parallel.grad_accum_steps": 4}
    eager, captured = (
        drawn(index, changes=changes, is_captured=is_captured)[0] for is_captured in (False, True)
    )
    batch = UniformSampler(len(index.lengths), 64, 0).global_batch(1)
    tokens = index.lengths[batch].astype(int).reshape(8, 4, 2).sum(axis=2)
    assert eager.tokens.tolist() == tokens.mean(axis=1).tolist()
    assert captured.tokens.tolist() == [tokens.max()] * 8
    assert captured.real_tokens.tolist() == eager.real_tokens.tolist()


def test_an_exchange_gathers_packets_of_real_tokens(index):
    batch = UniformSampler(len(index.lengths), 64, 0).global_batch(1).reshape(8, 1, 8)
    for scope, ranks in (("world", 8), ("node", 4)):
        (work,) = drawn(index, "exchange_global" if scope == "world" else "exchange_local")
        group = batch[:ranks]
        packets = gathered_bytes(index.lengths[group], index.masked_counts[group], np.dtype("<u2"))
        assert (work.input_bytes, work.input_scope) == (packets, scope)


def test_without_communication_a_step_is_its_computing():
    timing = simulate(job(1, 1), even(1))
    work = sum(float(phase.device_ms[0]) for phase in timing.phases)
    # Adam: 28 bytes a parameter, and 2 to zero its gradient.
    update = 1e3 * 30 * PARAMETERS / (2039e9 * FREE.memory_efficiency)
    assert timing.communication == [] and timing.exposed_ms == 0
    assert timing.step_ms == pytest.approx(work + update)
    endless = simulate(job(1, 8, constants=replace(FREE, link_efficiency=1e12)), even(8))
    assert endless.step_ms == pytest.approx(timing.step_ms)


@pytest.mark.parametrize("capture", ["on", "off"])
@pytest.mark.parametrize("clip", CLIPS)
def test_parts_and_waits_of_every_rank_are_the_step(clip, capture):
    of = job(clip=clip, constants=FULL, capture=capture)
    work = uneven([512, 40, 300, 300, 128, 511, 7, 90])
    timing = simulate_step(of, work, jitter(8, 0.02, 3))
    assert all((part >= -1e-9).all() for part in timing.parts.values())
    assert sum(timing.parts.values()) == pytest.approx(np.full(8, timing.step_ms))
    assert timing.communication_ms >= timing.exposed_ms - 1e-9


def test_clipping_by_buckets_hides_communication_that_the_whole_does_not():
    for node_gb_s in (1, 25, 200, 10_000):
        jobs = [job(4, 4, clip=clip, node_gb_s=node_gb_s) for clip in (WHOLE, BUCKET)]
        whole, bucket = (simulate(of, even(16)) for of in jobs)
        assert bucket.step_ms <= whole.step_ms + 1e-9
        assert whole.exposed_ms == pytest.approx(whole.communication_ms)
        alone = jobs[0].network.all_reduce_ms(2 * PARAMETERS)
        assert whole.exposed_ms == pytest.approx(alone)


def test_buckets_are_those_of_the_project():
    order = backward_order(ModelSection(), 256, 38)
    planned = [2 * sum(each.numel for each in bucket) for bucket in plan_buckets(order, 2, 25.0)]
    found = sent_buckets(2)
    assert [bucket.num_bytes for bucket in found] == planned
    assert len(found) == 22 and sum(bucket.num_bytes for bucket in found) == 2 * PARAMETERS
    # Heads, 24 layers, embeddings: the last bucket, with the embedding, is ready last.
    assert [bucket.phase for bucket in found] == sorted(bucket.phase for bucket in found)
    assert found[-1].phase == 25 and found[-1].fraction == 1.0


@pytest.mark.parametrize(
    ("name", "nodes", "gpus", "joined"),
    [
        ("gb200", 18, 4, (1, 72)),  # a whole rack
        ("gb200", 128, 4, (8, 64)),
        ("gb200", 19, 4, (2, 38)),
        ("gb200", 37, 4, (3, 50)),  # 148 GPUs do not fill three racks equally
        ("gb200", 1, 72, (1, 72)),
        ("b200", 4, 8, (4, 8)),
        ("a100", 4, 4, (4, 4)),  # links end at a node, even if it has only four GPUs
    ],
)
def test_links_reach_over_the_nodes_of_a_rack(name, nodes, gpus, joined):
    machine = make_machine(name, nodes, gpus)
    linked = machine.by_links()
    assert (linked.nodes, linked.gpus_per_node) == joined
    assert 0 <= linked.world_size - machine.world_size < linked.nodes
    assert linked.nodes * linked.node_gb_s == pytest.approx(nodes * machine.node_gb_s)


def test_a_rack_is_faster_than_the_same_nodes_on_a_network():
    rack = Network(make_machine("gb200", 16, 4), default_constants())
    accelerator = replace(rack.machine.accelerator, link_gpus=4)
    apart = replace(rack, machine=replace(rack.machine, accelerator=accelerator))
    more = replace(rack, machine=make_machine("gb200", 19, 4))
    for name in ("all_reduce_ms", "all_gather_ms"):
        assert getattr(more, name)(2**28) < 1.5 * getattr(rack, name)(2**28)  # no cliff
        assert 1.5 * getattr(rack, name)(2**28) < getattr(apart, name)(2**28)
    assert rack.all_gather_in_node_ms(2**28) == apart.all_gather_in_node_ms(2**28)


def test_every_accelerator_has_published_entries():
    counts = {}
    for each in accelerators().values():
        entries = [e for e in published_entries() if re.search(each.published_as, e.accelerator)]
        counts[each.name] = len(entries)
        times = published_minutes(each.published_as, 8)
        assert times == sorted(times) and all(time > 0 for time in times)
    assert all(counts.values())
    assert counts["gb200"] == 7 and counts["b200"] == 12  # of v4.1 and v5.0


def test_every_collective_of_several_ranks_has_a_start():
    for nodes, gpus in ((1, 1), (1, 8), (4, 1), (4, 8)):
        network = Network(make_machine("a100", nodes, gpus), FULL)
        alone = nodes * gpus == 1
        start_ms = FULL.collective_start_us / 1e3
        for name in ("all_reduce_ms", "all_gather_ms"):
            assert getattr(network, name)(0) == 0 if alone else getattr(network, name)(0) > start_ms
