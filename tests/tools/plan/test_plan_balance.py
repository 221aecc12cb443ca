"""`mlperf_bert plan balance`: what it measures; the published imbalances.

Section 1.7's imbalances come out again, and ours are within the bars of this project. Their source
is the table of the analysis of the published runs, made with the same length histogram.
"""

import numpy as np
import pytest

from bert_tools.common.length_histogram import LengthHistogram
from bert_tools.plan.balance import measure_row
from bert_tools.plan.sample_index import SampleIndex, wikipedia_index
from mlperf_bert.config.files import load_config
from mlperf_bert.data.balance import Balance, StepPlanner
from mlperf_bert.data.capacity import CapacityPlan, micro_batch_sizes
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.sampler import make_sampler
from mlperf_bert.data.token_packets import gathered_bytes
from shard_sets import write_set
from support import CONFIGS

OPEN = "balance --config dgxa100_1x8x56x1 --draws 3 --set mlperf.enforce_rules=false"
SIZES = "--set parallel.nodes=2 --set parallel.ranks_per_node=4 --set parallel.local_batch_size=6"


def rows_by_policy(result):
    """Those of the uniform sampler."""
    return {row["policy"]: row for row in result["rows"] if row["sampler"] == "uniform"}


def test_bytes_that_exchanges_send(asked, monkeypatch):
    one = LengthHistogram(lengths=np.array([20, 512]), counts=np.array([1000, 0]))
    index = SampleIndex.of_histogram(one, "test")
    monkeypatch.setattr("bert_tools.plan.balance.wikipedia_index", lambda: index)
    rows = rows_by_policy(asked(OPEN, SIZES))
    packet = gathered_bytes(np.full((2, 1, 6), 20), np.full((2, 1, 6), 3), np.dtype("<u2"))
    for policy, group in (("exchange_local", 4), ("exchange_global", 8)):
        assert rows[policy]["exchanged_bytes_per_rank"] == (group - 1) * packet
    # A node of one rank exchanges nothing inside it.
    rows = rows_by_policy(asked(OPEN, SIZES, "--set parallel.ranks_per_node=1"))
    assert rows["exchange_local"]["exchanged_bytes_per_rank"] == 0


def planner_of(index, histogram, sampler, batch, world_size, balance):
    """Plans of the samples of an index."""
    return StepPlanner(
        make_sampler(
            sampler,
            order_by_length=index.order_by_length,
            length_histogram=histogram,
            global_batch_size=batch,
            seed=0,
        ),
        index.lengths,
        index.masked_counts,
        world_size=world_size,
        balance=balance,
    )


def test_measures_of_a_prepared_set_are_those_of_its_plans(asked, tmp_path):
    write_set(tmp_path / "data" / "train", [(300, "<u2")], seed=1)
    index = LengthIndex.open(tmp_path / "data" / "train")
    manifest = index.manifest
    longest = f"--set data.max_seq_length={manifest.max_seq_length}"
    words = "balance --draws 3 --config cpu_tiny --set data.corpus=prepared --data data"
    result = asked(words, longest, SIZES)
    assert result["samples"] == manifest.num_samples == 300
    balance = Balance(policy="presort_global")
    planner = planner_of(index, manifest.length_histogram, "uniform", 48, 8, balance)
    tokens = np.array([planner.plan(step).num_tokens for step in (1, 2, 3)])
    imbalances = tokens.max(axis=(1, 2)) / tokens.mean(axis=(1, 2))
    expected = {
        "imbalance_tokens": imbalances.mean(),
        "imbalance_tokens_error": imbalances.std(ddof=1) / 3**0.5,
        "idle_fraction": 1 - (1 / imbalances).mean(),
    }
    row = rows_by_policy(result)["presort_global"]
    assert {key: row[key] for key in expected} == pytest.approx(expected)


TABLE_ROUNDING = 0.003

# (nodes, local batch size) -> naive, preset + exchange_local, exchange_global in both directions.
PUBLISHED = {
    (171, 12): (1.686, 1.054, 1.010),
    (8, 16): (1.425, 1.026, 1.005),
    (1, 16): (1.256, 1.008, 1.009),
}
PRESETS = {16: "stratified_6_3_2_5", 12: "stratified_4_2_2_4"}

# (nodes, local batch size) -> largest imbalance, token waste and masked waste allowed. The project
# sets no bar for the wastes at 12 sequences: those are this test's.
BARS = {
    (128, 16): (1.0015, 0.003, 0.015),
    (171, 12): (1.005, 0.005, 0.015),
    (8, 48): (1.0005, 0.003, 0.015),
    (1, 56): (1.0005, 0.005, 0.015),
}

EQUAL_COUNTS = {3: 1.029, 2: 1.155}  # local batch size -> what equal counts reach (section 1.8)
UNEQUAL_SHARE = 1 / 3  # of what equal counts lose, that unequal ones may


def plans_of(nodes, local_batch_size, sampler, balance, draws):
    """Steps of Wikipedia's lengths on nodes of 8 ranks."""
    ranks = 8 * nodes
    index = wikipedia_index()
    sizes = (ranks * local_batch_size, ranks)
    planner = planner_of(index, index.length_histogram, sampler, *sizes, balance)
    return [planner.plan(step) for step in range(1, draws + 1)]


@pytest.mark.parametrize(("nodes", "size"), PUBLISHED)
def test_published_methods(nodes, size):
    cases = (
        ("uniform", Balance()),
        (PRESETS[size], Balance(policy="exchange_local", ranks_per_node=8)),
        ("uniform", Balance(policy="exchange_global")),
    )
    draws = 40 if nodes > 8 else 200
    for (sampler, balance), published in zip(cases, PUBLISHED[nodes, size], strict=True):
        plans = plans_of(nodes, size, sampler, balance, draws)
        found = np.array([plan.imbalance_tokens for plan in plans])
        allowed = 3 * found.std(ddof=1) / draws**0.5 + TABLE_ROUNDING
        assert found.mean() == pytest.approx(published, abs=allowed), balance


@pytest.mark.parametrize(("nodes", "size"), BARS)
def test_ours_is_within_its_bars(nodes, size):
    plans = plans_of(nodes, size, "quantile", Balance(policy="presort_global"), 60)
    imbalance, token_waste, masked_waste = BARS[nodes, size]
    assert np.mean([plan.imbalance_tokens for plan in plans]) <= imbalance
    sizes = np.stack([micro_batch_sizes(plan) for plan in plans], axis=1)
    capacity = CapacityPlan.of_sizes(sizes, 60)
    assert capacity.tokens / sizes[0].mean() - 1 <= token_waste
    assert capacity.masked / sizes[2].mean() - 1 <= masked_waste


@pytest.mark.parametrize("size", EQUAL_COUNTS)
def test_unequal_counts_beat_equal_ones(size):
    config = load_config(
        CONFIGS / "dgxa100_128x8x4x1.toml",
        [f"parallel.local_batch_size={size}", "data.sampler=quantile"],
    )
    row = measure_row(config, wikipedia_index(), 10)
    assert row.policy_in_words == "presort_global unequal"
    assert row.imbalance_tokens - 1 <= UNEQUAL_SHARE * (EQUAL_COUNTS[size] - 1)
