"""Parts of the cluster simulator: collectives and device times by hand, and whole runs."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from bert_tools.plan.cluster.device import Device, embedding_ms, head_ms, layer_ms
from bert_tools.plan.cluster.machine import (
    Network,
    accelerators,
    default_constants,
    make_machine,
    ring_all_gather_ms,
    ring_all_reduce_ms,
    tree_all_reduce_ms,
)
from bert_tools.plan.cluster.simulation import evaluation_interval, evaluation_ms, run_time
from cluster_cases import EAGER, FREE, OURS, even, job, simulate
from support import load_study

calibrate = load_study("2026-11-22-cluster-model", "calibrate")
A100 = Device(accelerators()["a100"], "bf16", FREE)
RATE = 312e12 * FREE.matrix_efficiency / 108  # operations a second of one multiprocessor


def test_rings_and_trees_by_hand() -> None:
    # 8 ranks: 14 messages of 125 MB at 100 GB/s take 1.25 ms each, and 5 us.
    assert ring_all_reduce_ms(1e9, 8, 100, 5) == pytest.approx(14 * (1.25 + 0.005))
    assert ring_all_gather_ms(1e9, 8, 100, 5) == pytest.approx(7 * (1.25 + 0.005))
    # 2 GB at 100 GB/s; 1,000 ranks are ten levels, up and down.
    assert tree_all_reduce_ms(1e9, 1000, 100, 5) == pytest.approx(20 + 20 * 0.005)
    for function in (ring_all_reduce_ms, ring_all_gather_ms, tree_all_reduce_ms):
        assert function(1e9, 1, 100, 5) == 0  # one rank sends nothing


def network(nodes: int, gpus: int, *, node_gb_s: float = 200, in_network: bool = False) -> Network:
    constants = replace(FREE, link_efficiency=1.0, network_efficiency=1.0)
    return Network(make_machine("a100", nodes, gpus, node_gb_s), constants, in_network)


def test_one_node_reduces_over_its_links() -> None:
    # 2 * 7/8 of 672 MB at 300 GB/s.
    assert network(1, 8).all_reduce_ms(672e6) == pytest.approx(2 * 7 / 8 * 672 / 300)
    assert network(1, 1).all_reduce_ms(672e6) == 0


def test_between_nodes_no_way_beats_the_ports() -> None:
    for nodes in (2, 16, 128, 12_500):
        # Every byte must leave a node and come back reduced, but for the node's own part.
        least = 2 * (nodes - 1) / nodes * 672 / 200
        assert network(nodes, 8).all_reduce_ms(672e6) >= least * (1 - 1e-9)


def test_switches_that_add_halve_what_the_ports_carry() -> None:
    assert network(128, 8, in_network=True).all_reduce_ms(672e6) == pytest.approx(672 / 200)


def test_more_bandwidth_is_never_slower() -> None:
    for nodes, num_bytes in itertools.product((1, 2, 64), (4, 25e6, 672e6)):
        machines = [network(nodes, 8, node_gb_s=rate) for rate in (10, 25, 100, 400)]
        times = [each.all_reduce_ms(num_bytes) for each in machines]
        assert times == sorted(times, reverse=True)


def test_latency_grows_with_the_nodes_and_slower_than_they_do() -> None:
    late = replace(FREE, network_latency_us=14.0, link_latency_us=3.4, collective_start_us=8.4)
    small = [
        Network(make_machine("a100", nodes, 8), late).all_reduce_ms(4)
        for nodes in (2, 16, 1024, 12_500)
    ]
    assert small == sorted(small)
    assert small[-1] < 10 * small[0]  # trees: log2(12,500) is 14 times log2(2)


def test_a_gather_over_all_carries_the_whole_once() -> None:
    # Inside a node 7/8 at 300 GB/s, between 2 nodes a half at 200 GB/s.
    expected = 7 / 8 * 672 / 300 + 672 / 2 / 200
    assert network(2, 8).all_gather_ms(672e6) == pytest.approx(expected)


def product_ms(rows: int, columns: int, inner: int) -> float:
    return float(A100.product_ms(np.array([float(rows)]), columns, inner)[0])


def test_a_product_takes_whole_waves_of_tiles() -> None:
    one_tile = 1e3 * 2 * 128 * 128 * 1024 / RATE
    assert product_ms(128, 128, 1024) == pytest.approx(one_tile)
    assert product_ms(1, 128, 1024) == pytest.approx(one_tile)
    assert product_ms(108 * 128, 128, 1024) == pytest.approx(one_tile)
    assert product_ms(108 * 128 + 1, 128, 1024) == pytest.approx(2 * one_tile)
    # 27 rows of tiles times 8 columns are 216 tiles: two full waves of 108.
    assert product_ms(3456, 1024, 1024) * 1.5 == pytest.approx(product_ms(3457, 1024, 1024))
    times = [product_ms(tokens, 4096, 1024) for tokens in range(64, 9000, 64)]
    assert times == sorted(times)


def test_attention_grows_with_the_square_of_the_length() -> None:
    def attention(length: int) -> float:
        work = even(1, sequences=4096 // length, length=length)
        return float(A100.attention_ms(work.attended, 1024, 2)[0])

    # The same tokens: pairs double with the length.
    assert attention(512) == pytest.approx(2 * attention(256))


def test_memory_is_bytes_over_bandwidth() -> None:
    expected = 1e3 * 5e9 / (2039e9 * FREE.memory_efficiency)
    assert float(A100.memory_ms(5e9)) == pytest.approx(expected)


def test_activations_of_fp32_are_twice_as_wide() -> None:
    work = even(1, sequences=16, length=256)
    wide, narrow = (
        float(embedding_ms(replace(A100, precision=name), work.tokens)[0][0])
        for name in ("fp32", "bf16")
    )
    assert wide == pytest.approx(2 * narrow)


def test_a_layer_is_not_below_its_multiply_adds() -> None:
    work = even(1, sequences=16, length=256)
    layer = layer_ms(A100, EAGER, work, work.tokens)
    operations = 2 * 4096 * (4 * 1024**2 + 2 * 1024 * 4096)
    least = 1e3 * operations / (312e12 * FREE.matrix_efficiency)
    assert float(layer[0][0]) > least
    assert float(layer[1][0]) > 2 * least


def test_the_head_over_all_positions_costs_more() -> None:
    masked, everything = (head_ms(A100, np.array([rows])) for rows in (160.0, 1024.0))
    assert all(more[0] > less[0] for more, less in zip(everything, masked, strict=True))


def test_data_sheets_have_a_source_each() -> None:
    for accelerator in accelerators().values():
        assert "data sheet" in accelerator.source
        assert accelerator.peak_tflops("bf16") == accelerator.peak_tflops("fp16") > 0
    assert accelerators()["a100"].peak_tflops("fp8") == 0


def test_a_run_is_its_steps_evaluations_and_start() -> None:
    of, timing = job(1, 1), simulate(job(1, 1), even(1))
    inputs = {"samples": 2_932_736, "start_up_s": 2.0, "skipped_steps": 7}
    run = run_time(of, [timing], global_batch_size=16_384, **inputs)
    assert (run.step_ms, run.steps) == (timing.step_ms, 179)
    assert run.evaluations == 9  # every 325,000 samples: the rules' example for this batch
    training_s = 186 * run.step_ms / 1e3
    assert run.seconds == pytest.approx(2.0 + training_s + 9 * run.evaluation_ms / 1e3)
    assert run.steady_step_ms == pytest.approx(run.step_ms + 9 * run.evaluation_ms / 179)


@pytest.mark.parametrize(
    ("batch", "interval"), [(448, 150_000), (16_384, 325_000), (3072, 175_000), (4608, 200_000)]
)
def test_evaluations_come_as_often_as_the_rules_say(batch: int, interval: int) -> None:
    assert evaluation_interval(batch) == interval


def test_an_evaluation_is_shared_by_the_ranks() -> None:
    one, eight = (evaluation_ms(job(1, ranks)) for ranks in (1, 8))
    assert 7 < one / eight < 9


def test_small_evaluations_are_quicker_captured() -> None:
    constants = replace(FREE, host_launch_us=50.0)
    eager, captured = (
        evaluation_ms(job(128, 8, constants=constants, program=program))
        for program in (EAGER, OURS)
    )
    assert captured < eager


def test_samsungs_run_with_its_samples_skipped_steps_and_start() -> None:
    (step,) = [each for each in calibrate.published_steps() if each.id == "Samsung x1024 v2.0"]
    assert (step.samples, step.skipped_steps, step.start_up_s) == (2_932_736, 7, 2.15)
    constants = default_constants()
    assert step.run_time(constants).seconds == pytest.approx(22.3, rel=0.03)
    assert calibrate.compare(step, constants).predicted_ms == pytest.approx(108.3, rel=0.03)
