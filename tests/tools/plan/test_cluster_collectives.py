"""Collectives of the cluster simulator against closed forms worked out by hand."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from bert_tools.plan.cluster.machine import (
    Network,
    make_machine,
    ring_all_gather_ms,
    ring_all_reduce_ms,
    tree_all_reduce_ms,
)
from cluster_cases import FREE


def test_a_ring_sends_twice_all_but_one_part() -> None:
    # 8 ranks: 14 messages of 125 MB at 100 GB/s take 1.25 ms each, and 5 us.
    assert ring_all_reduce_ms(1e9, 8, 100, 5) == pytest.approx(14 * (1.25 + 0.005))
    assert ring_all_gather_ms(1e9, 8, 100, 5) == pytest.approx(7 * (1.25 + 0.005))


def test_a_tree_has_the_logarithm_of_the_latency() -> None:
    # 2 GB at 100 GB/s; 1,000 ranks are ten levels, up and down.
    assert tree_all_reduce_ms(1e9, 1000, 100, 5) == pytest.approx(20 + 20 * 0.005)


@pytest.mark.parametrize("function", [ring_all_reduce_ms, ring_all_gather_ms, tree_all_reduce_ms])
def test_one_rank_sends_nothing(function: Callable[[float, int, float, float], float]) -> None:
    assert function(1e9, 1, 100, 5) == 0


def network(nodes: int, gpus: int, *, node_gb_s: float = 200, in_network: bool = False) -> Network:
    return Network(
        machine=make_machine("a100", nodes, gpus, node_gb_s),
        constants=replace(FREE, link_efficiency=1.0, network_efficiency=1.0),
        in_network_reduction=in_network,
    )


def test_one_node_reduces_over_its_links() -> None:
    # 2 * 7/8 of 672 MB at 300 GB/s.
    assert network(1, 8).all_reduce_ms(672e6) == pytest.approx(2 * 7 / 8 * 672 / 300)
    assert network(1, 1).all_reduce_ms(672e6) == 0


@pytest.mark.parametrize("nodes", [2, 16, 128, 12_500])
def test_between_nodes_no_way_beats_the_ports(nodes: int) -> None:
    # Every byte must leave a node and come back reduced, but for the node's own part.
    least = 2 * (nodes - 1) / nodes * 672 / 200
    assert network(nodes, 8).all_reduce_ms(672e6) >= least * (1 - 1e-9)


def test_switches_that_add_halve_what_the_ports_carry() -> None:
    assert network(128, 8, in_network=True).all_reduce_ms(672e6) == pytest.approx(672 / 200)


@pytest.mark.parametrize("num_bytes", [4, 25e6, 672e6])
@pytest.mark.parametrize("nodes", [1, 2, 64])
def test_more_bandwidth_is_never_slower(nodes: int, num_bytes: float) -> None:
    times = [
        network(nodes, 8, node_gb_s=rate).all_reduce_ms(num_bytes) for rate in (10, 25, 100, 400)
    ]
    assert times == sorted(times, reverse=True)


def test_latency_grows_with_the_nodes_and_slower_than_they_do() -> None:
    late = replace(FREE, network_latency_us=14.0, link_latency_us=3.4, collective_start_us=8.4)
    small = [
        Network(machine=make_machine("a100", nodes, 8), constants=late).all_reduce_ms(4)
        for nodes in (2, 16, 1024, 12_500)
    ]
    assert small == sorted(small)
    assert small[-1] < 10 * small[0]  # trees: log2(12,500) is 14 times log2(2)


def test_a_gather_over_all_carries_the_whole_once() -> None:
    # Inside a node 7/8 at 300 GB/s, between 2 nodes a half at 200 GB/s.
    expected = 7 / 8 * 672 / 300 + 672 / 2 / 200
    assert network(2, 8).all_gather_ms(672e6) == pytest.approx(expected)
