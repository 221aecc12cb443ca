"""`mlperf_bert plan balance`: what it measures, prints and writes; the published imbalances.

Section 1.7's imbalances come out again, and ours are within the bars of this project. Their source
is the table of the analysis of the published runs, made with the same length histogram; quantiles
are the local batch size there.
"""

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from bert_tools.common.figures import new_figure
from bert_tools.plan.balance import BalanceRow, Question, make_samplers, measure_row
from bert_tools.plan.sample_index import SampleIndex
from mlperf_bert.__main__ import main
from mlperf_bert.config.sections import ModelSection, SamplerName
from mlperf_bert.data.balance import Balance, CostModel, StepPlanner
from mlperf_bert.data.index import LengthIndex
from mlperf_bert.data.length_histogram import LengthHistogram, wikipedia_lengths
from mlperf_bert.data.sampler import make_sampler
from mlperf_bert.data.token_packets import gathered_bytes
from plan_cases import Asked

PNG = b"\x89PNG\r\n"
SIZES = "--nodes 2 --gpus-per-node 4 --local-batch-size 6"
NONE, GLOBAL = ("none", None, "equal"), ("presort_global", None, "equal")
FAR, NEAR = ("exchange_global", "snake", "equal"), ("exchange_local", "snake", "equal")
PRESORT, UNEQUAL = ("presort_local", "snake", "equal"), ("presort_global", None, "unequal")
ONE_WAY = [(f"exchange_{name}", "one_direction", "equal") for name in ("global", "local")]
POLICIES = {NONE, *ONE_WAY, FAR, NEAR, PRESORT, GLOBAL}


@pytest.fixture
def balanced(asked: Asked) -> Asked:
    return partial(asked, "balance --draws 3")


def rows_by_policy(result: dict[str, Any], sampler: str = "uniform") -> dict[Any, Any]:
    return {
        (row["policy"], row["deal"], row["counts_per_rank"]): row
        for row in result["rows"]
        if row["sampler"] == sampler
    }


def planner_of(index: LengthIndex, **options: Any) -> StepPlanner:
    """A planner for 8 ranks of 6 sequences, seed 4, presorted."""
    return StepPlanner(
        make_sampler(
            "uniform",
            order_by_length=index.order_by_length,
            length_histogram=index.manifest.length_histogram,
            global_batch_size=48,
            seed=4,
        ),
        index.lengths,
        index.masked_counts,
        world_size=8,
        balance=Balance(policy="presort_global"),
        **options,
    )


def test_every_sampler_meets_every_policy(balanced: Asked, histogram: Path) -> None:
    result = balanced(SIZES, "--histogram", histogram)
    served = ["uniform", "quantile", "strata", "strata_6_3_2_5", "strata_4_2_2_4"]
    assert Counter(row["sampler"] for row in result["rows"]) == dict.fromkeys(served, len(POLICIES))
    assert result["picture"] is None and not list(Path().iterdir())
    for sampler in served:
        rows = rows_by_policy(result, sampler)
        assert set(rows) == POLICIES
        assert {row["quantiles"] for row in rows.values()} == (
            {48} if sampler == "quantile" else {None}
        )
        for row in rows.values():
            assert (row["world_size"], row["local_batch_size"]) == (8, 6)
            assert row["imbalance_tokens"] >= 1 and row["imbalance_cost"] >= 1
            rounding = 1 + 15 / row["capacity_tokens"]  # of captured shapes, to 16 tokens
            most = (1 + row["capacity_waste"]) * rounding
            assert most >= 1 + row["capacity_waste_ladder"] >= row["imbalance_tokens"]
            assert (row["exchanged_bytes_per_rank"] > 0) == row["policy"].startswith("exchange")
    rows = rows_by_policy(result)  # a presort equals its exchange without the bytes
    for key in ("imbalance_tokens", "imbalance_cost", "idle_fraction", "capacity_waste_masked"):
        assert rows[PRESORT][key] == rows[NEAR][key]
    assert rows[PRESORT]["exchanged_bytes_per_rank"] == 0
    assert rows[PRESORT]["padded_bytes_per_rank"] == 0
    assert rows[FAR]["exchanged_bytes_per_rank"] > rows[NEAR]["exchanged_bytes_per_rank"]


def test_a_config_is_held_against_what_its_other_settings_allow(
    balanced: Asked, told: Callable[..., str]
) -> None:
    words = "--config dgxa100_128x8x4x1 --set parallel.nodes=1"
    result = balanced(words, "--set data.counts_per_rank=equal")
    assert {row["sampler"] for row in result["rows"]} == {"uniform"}
    assert set(rows_by_policy(result)) == {*POLICIES, UNEQUAL}
    keys = [(row["policy"], row["counts_per_rank"]) for row in result["rows"]]
    assert keys[:2] == [("presort_global", "equal"), ("presort_global", "unequal")]
    clipped = balanced(
        words, "--set data.counts_per_rank=equal --set", "clip.policy=whole_before_allreduce"
    )
    assert UNEQUAL not in rows_by_policy(clipped)
    lines = told(f"balance --draws 3 {words}").splitlines()
    own, other = lines[-1].removeprefix("dgxa100_128x8x4x1: ").split("; ")
    assert own.startswith("presort_global unequal: idle ") and other.startswith("presort_global: ")
    assert f"{100 * result['rows'][1]['capacity_waste_ladder']:.1f} %" in own


def test_small_batches_may_be_uneven_and_leave_samplers_out(
    balanced: Asked, histogram: Path
) -> None:
    sizes = "--nodes 1 --gpus-per-node 2 --local-batch-size 2 --histogram"
    result = balanced(sizes, histogram)
    assert set(rows_by_policy(result)) == POLICIES | {UNEQUAL}
    left_out = {each["sampler"]: each["reason"] for each in result["left_out"]}
    assert "need a multiple of 16" in left_out["strata_6_3_2_5"]
    assert "need a multiple of 12" in left_out["strata_4_2_2_4"]
    assert not set(left_out) & {row["sampler"] for row in result["rows"]}


def test_bytes_that_exchanges_send(balanced: Asked, histogram: Path) -> None:
    one = Path("one.csv")
    one.write_text("length,count\n20,1000\n")
    rows = rows_by_policy(balanced(SIZES, "--histogram", one))
    packet = gathered_bytes(np.full((2, 1, 6), 20), np.full((2, 1, 6), 3), np.dtype("<u2"))
    for policy, group in ((NEAR, 4), (FAR, 8)):
        assert rows[policy]["exchanged_bytes_per_rank"] == (group - 1) * packet
    # A node of one rank exchanges nothing inside it.
    sizes = "--nodes 2 --gpus-per-node 1 --local-batch-size 6 --histogram"
    rows = rows_by_policy(balanced(sizes, histogram))
    for key in ("exchanged_bytes_per_rank", "padded_bytes_per_rank"):
        assert rows[NEAR][key] == 0 < rows[FAR][key]
    # Published packets have their published size.
    rows = rows_by_policy(balanced("--nodes 1 --gpus-per-node 8 --local-batch-size 16"))
    assert rows[NEAR]["padded_bytes_per_rank"] == 524_544


def test_capacities_hold_the_steps_asked_for(balanced: Asked, synthetic_data: Path) -> None:
    words = (SIZES, "--seed 4 --data", synthetic_data)
    planner = planner_of(LengthIndex.open(synthetic_data / "train"))

    def largest(*steps: int) -> dict[str, Any]:
        plans = [planner.plan(step) for step in steps]
        return {
            "capacity_tokens": max(plan.num_tokens.max() for plan in plans),
            "capacity_sequences": 6,
            "capacity_masked": max(plan.num_masked.max() for plan in plans),
        }

    exact = rows_by_policy(balanced(*words))[GLOBAL]
    assert {**largest(1, 2, 3), "capacity_basis": "exact"}.items() <= exact.items()
    result = balanced(*words, "--steps 101")
    assert result["steps"] == 101
    bound = rows_by_policy(result)[GLOBAL]
    assert bound["capacity_basis"] == "bound" and bound["capacity_sequences"] == 6
    spread = largest(1, 51, 101)  # a bound leaves room beyond the draws
    for name in ("capacity_tokens", "capacity_masked"):
        assert bound[name] > spread[name]
    # It is no more than the sequences can have.
    sizes = "--nodes 1 --gpus-per-node 2 --local-batch-size 1 --steps 1000000"
    row = rows_by_policy(balanced(sizes))[NONE]
    capacity = [row[f"capacity_{name}"] for name in ("tokens", "sequences", "masked", "basis")]
    assert capacity == [512, 1, 76, "bound"]


def test_measures_of_a_prepared_set_are_those_of_its_plans(
    balanced: Asked, synthetic_data: Path
) -> None:
    model = "--balance-model cost --cost-a 2 --cost-b 0.5 --seed 4 --data"
    result = balanced(SIZES, model, synthetic_data)
    index = LengthIndex.open(synthetic_data / "train")
    assert result["samples"] == index.manifest.num_samples
    cost = CostModel(linear=2.0, quadratic=0.5)
    planner = planner_of(index, balance_model="cost", cost=cost)
    plans = [planner.plan(step) for step in (1, 2, 3)]
    row = rows_by_policy(result)[GLOBAL]
    tokens = np.array([plan.num_tokens for plan in plans])
    masked = np.array([plan.num_masked for plan in plans])
    costs = np.array([plan.imbalance_cost for plan in plans])
    imbalances = tokens.max(axis=(1, 2)) / tokens.mean(axis=(1, 2))
    expected = {
        "balance_model": "cost",
        "imbalance_tokens": imbalances.mean(),
        "imbalance_tokens_error": imbalances.std(ddof=1) / 3**0.5,
        "imbalance_cost": costs.mean(),
        "idle_fraction": 1 - (1 / costs).mean(),
        "capacity_waste": tokens.max() / tokens.mean() - 1,
        "capacity_waste_masked": masked.max() / masked.mean() - 1,
    }
    assert {key: row[key] for key in expected} == pytest.approx(expected)


def test_the_cost_model_is_bert_large_by_default(balanced: Asked, histogram: Path) -> None:
    cost = balanced(SIZES, "--cost-a 3 --histogram", histogram)["cost"]
    share = 3 * ModelSection().attention_share
    assert cost == {"linear": 3.0, "quadratic": share, "local_share": 0.0, "reach": 0}


def test_a_configs_windows_are_in_its_cost(balanced: Asked) -> None:
    modern = "--set model.architecture=modern --set model.objective=mlm --set"
    config = "--config h100_1x8x96x1 --set mlperf.enforce_rules=false"
    costs = [balanced(config, *also)["cost"] for also in ((), (modern, "model.num_layers=22"))]
    assert [cost["local_share"] for cost in costs] == [0.0, 14 / 22]
    assert [cost["reach"] for cost in costs] == [0, 64]


def test_masked_positions_follow_the_published_rounding() -> None:
    histogram = LengthHistogram(lengths=np.array([1, 10, 30, 511]), counts=np.array([1, 2, 1, 1]))
    # 0.15 * 10 is 1.5, which goes to the even 2; 0.15 * 30 is 4.5, which goes to 4.
    for most, masked in ((255, [1, 2, 2, 4, 77]), (76, [1, 2, 2, 4, 76]), (3, [1, 2, 2, 3, 3])):
        index = SampleIndex.of_histogram(histogram, "test", most)
        assert index.masked_counts.tolist() == masked
        assert index.lengths.tolist() == [1, 10, 10, 30, 511]


def test_rows_are_kept_where_the_picture_fails(
    capsys: pytest.CaptureFixture[str], histogram: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = Path("gone")
    words = f"plan balance {SIZES} --histogram {histogram} --draws 2 --out {gone}/own.png".split()

    def lose_the_directory(*_: object) -> Figure:
        gone.rmdir()
        return new_figure(1, 1)

    monkeypatch.setattr("bert_tools.plan.balance._draw", lose_the_directory)
    gone.mkdir()
    assert main(words) == 2
    output = capsys.readouterr()
    assert output.out.count("\nuniform ") == len(POLICIES)
    assert "own.png: No such file" in output.err and output.err.count("\n") == 1
    gone.mkdir()
    assert main([*words, "--json"]) == 2
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 5 * len(POLICIES)


def test_the_table_has_a_line_a_row_and_the_picture_its_place(
    told: Callable[..., str], asked: Asked, histogram: Path
) -> None:
    words = f"balance {SIZES} --histogram {histogram} --draws 2"
    lines = told(words).splitlines()
    head = next(line for line in lines if line.startswith("sampler"))
    table = lines[lines.index(head) + 1 : lines.index("", lines.index(head))]
    assert len(table) == 5 * len(POLICIES)
    column = head.index("policy")
    assert {line[column:].split("  ")[0] for line in table} == {
        f"{policy} {deal}" if deal else policy for policy, deal, _ in POLICIES
    }
    assert any(line.startswith("imbalance: ") for line in lines)
    assert "quantile: 48 quantiles" in lines
    assert any("in a run of 2 steps (all drawn)" in line for line in lines)
    assert not list(Path().iterdir())
    assert asked(words, "--out own.png")["picture"] == "own.png"
    assert Path("own.png").read_bytes().startswith(PNG)
    assert [path.name for path in Path().iterdir()] == ["own.png"]


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

EQUAL_COUNTS = {3: 1.029, 2: 1.155}  # local batch size -> what equal counts reach (section 1.8)
UNEQUAL_SHARE = 1 / 3  # of what equal counts lose, that unequal ones may


@pytest.fixture(scope="module")
def wikipedia() -> SampleIndex:
    return SampleIndex.of_histogram(wikipedia_lengths(), "published", 76)


def measured(
    wikipedia: SampleIndex,
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
    samplers, _ = make_samplers(wikipedia, question)
    return measure_row(wikipedia, question, sampler, samplers[sampler], balance)


@pytest.mark.parametrize(("nodes", "size"), PUBLISHED)
def test_published_methods(wikipedia: SampleIndex, nodes: int, size: int) -> None:
    cases: tuple[tuple[SamplerName, Balance], ...] = (
        ("uniform", Balance()),
        (PRESETS[size], Balance(policy="exchange_local", ranks_per_node=8)),
        ("uniform", Balance(policy="exchange_global", deal="one_direction")),
        ("uniform", Balance(policy="exchange_global", deal="snake")),
    )
    draws = 60 if nodes > 8 else 300
    for (sampler, balance), published in zip(cases, PUBLISHED[nodes, size], strict=True):
        row = measured(wikipedia, nodes, size, sampler, balance, draws)
        allowed = 3 * row.imbalance_tokens_error + TABLE_ROUNDING
        assert row.imbalance_tokens == pytest.approx(published, abs=allowed), row.policy_in_words


@pytest.mark.parametrize(("nodes", "size"), BARS)
def test_ours_is_within_its_bars(wikipedia: SampleIndex, nodes: int, size: int) -> None:
    row = measured(wikipedia, nodes, size, "quantile", Balance(policy="presort_global"), 60)
    imbalance, token_waste, masked_waste = BARS[nodes, size]
    assert row.imbalance_tokens <= imbalance
    assert row.capacity_waste <= token_waste
    assert row.capacity_waste_masked <= masked_waste
    assert row.exchanged_bytes_per_rank == 0


@pytest.mark.parametrize("size", EQUAL_COUNTS)
def test_unequal_counts_beat_equal_ones(wikipedia: SampleIndex, size: int) -> None:
    unequal = Balance(policy="presort_global", counts="unequal")
    row = measured(wikipedia, 128, size, "quantile", unequal, 10)
    assert row.imbalance_tokens - 1 <= UNEQUAL_SHARE * (EQUAL_COUNTS[size] - 1)
