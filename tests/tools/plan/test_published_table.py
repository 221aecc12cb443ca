"""The published imbalances of section 1.7 come out again, and ours are within their bars.

Sources: the table of the analysis of the published runs, made with the same length histogram, and
the bars of this project. Quantiles are the local batch size here, as in the table.
"""

from collections.abc import Iterator

import pytest

from bert_tools.plan.balance import BalanceRow, Question, make_samplers, measure_row
from bert_tools.plan.sample_index import SampleIndex
from mlperf_bert.config.sections import Deal, ModelSection, SamplerName
from mlperf_bert.data.balance import Balance, CostModel
from mlperf_bert.data.length_histogram import wikipedia_lengths

TABLE_ROUNDING = 0.003

# (nodes, local batch size) -> naive, preset + exchange_local, exchange_global in both directions.
PUBLISHED = {
    (128, 16): (1.582, 1.041, 1.059, 1.004),
    (171, 12): (1.686, 1.054, 1.080, 1.010),
    (8, 16): (1.425, 1.026, 1.059, 1.005),
    (1, 16): (1.256, 1.008, 1.052, 1.009),
}
PRESETS: dict[int, SamplerName] = {16: "strata_6_3_2_5", 12: "strata_4_2_2_4"}

# (nodes, local batch size) -> largest imbalance, token waste and masked waste allowed. The project
# sets no bar for the wastes at 12 sequences: those are this test's.
BARS = {
    (128, 16): (1.0015, 0.003, 0.015),
    (171, 12): (1.005, 0.005, 0.015),
    (8, 48): (1.0005, 0.003, 0.015),
    (1, 56): (1.0005, 0.005, 0.015),
}

UNEQUAL = {3: 1.029, 2: 1.155}  # local batch size -> what equal counts reach (section 1.8)
UNEQUAL_SHARE = 1 / 3  # of what equal counts lose, that unequal ones may


@pytest.fixture(scope="module")
def index() -> Iterator[SampleIndex]:
    yield SampleIndex.of_histogram(wikipedia_lengths(), "published", 76)


def measured(
    index: SampleIndex,
    nodes: int,
    local_batch_size: int,
    sampler: SamplerName,
    balance: Balance,
    draws: int,
) -> BalanceRow:
    question = Question(
        nodes=nodes,
        gpus_per_node=8,
        local_batch_size=local_batch_size,
        draws=draws,
        steps=draws,
        seed=0,
        balance_model="tokens",
        cost=CostModel(linear=1.0, quadratic=ModelSection().attention_share),
        quantiles=local_batch_size,
    )
    samplers, _ = make_samplers(index, question)
    return measure_row(index, question, sampler, samplers[sampler], balance)


def exchange_global(direction: Deal) -> Balance:
    return Balance(policy="exchange_global", deal=direction)


@pytest.mark.parametrize(("nodes", "size"), PUBLISHED)
def test_published_methods(index: SampleIndex, nodes: int, size: int) -> None:
    cases: tuple[tuple[SamplerName, Balance], ...] = (
        ("uniform", Balance()),
        (PRESETS[size], Balance(policy="exchange_local", ranks_per_node=8)),
        ("uniform", exchange_global("one_direction")),
        ("uniform", exchange_global("snake")),
    )
    draws = 60 if nodes > 8 else 300
    for (sampler, balance), published in zip(cases, PUBLISHED[nodes, size], strict=True):
        row = measured(index, nodes, size, sampler, balance, draws)
        allowed = 3 * row.imbalance_tokens_error + TABLE_ROUNDING
        assert row.imbalance_tokens == pytest.approx(published, abs=allowed), row.policy_in_words


@pytest.mark.parametrize(("nodes", "size"), BARS)
def test_ours_is_within_its_bars(index: SampleIndex, nodes: int, size: int) -> None:
    row = measured(index, nodes, size, "quantile", Balance(policy="presort_global"), 60)
    imbalance, token_waste, masked_waste = BARS[nodes, size]
    assert row.imbalance_tokens <= imbalance
    assert row.capacity_waste <= token_waste
    assert row.capacity_waste_masked <= masked_waste
    assert row.exchanged_bytes_per_rank == 0


@pytest.mark.parametrize("size", UNEQUAL)
def test_unequal_counts_beat_equal_ones(index: SampleIndex, size: int) -> None:
    unequal = Balance(policy="presort_global", counts="unequal")
    row = measured(index, 128, size, "quantile", unequal, 10)
    assert row.imbalance_tokens - 1 <= UNEQUAL_SHARE * (UNEQUAL[size] - 1)
